"""The mean of what all workers have, through a folder and a barrier."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..run import Run
from .model import Floats

BARRIER_MS = 60_000


class Exchange:
    """Sums up vectors of all workers: what NCCL or gloo do where there is torch.

    Everybody adds in the order of the ranks and so gets the same sum, bit for bit.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder = folder
        self._run = run
        self._read: Path | None = None
        """Our file of the step before."""

    def sum(self, vector: Floats) -> Floats:
        """The sum over all workers; raises `SyncError` when one is lost meanwhile."""
        run = self._run
        assert run.orchestrator is not None
        mine = self._path(run.rank)
        np.save(mine, vector)
        run.orchestrator.barrier(f"step-{run.step + 1}", timeout_ms=BARRIER_MS)
        total: Floats = np.load(self._path(0))
        for rank in range(1, run.world_size):
            total += np.load(self._path(rank))
        self._forget(mine)
        return total

    def _forget(self, mine: Path) -> None:
        # Nobody needs the file of the last step, now that all have come to the barrier of this one.
        if self._read is not None:
            self._read.unlink(missing_ok=True)
        self._read = mine

    def _path(self, rank: int) -> Path:
        # A worker that is believed dead and is not must not change what the next crew reads.
        run = self._run
        return self._folder / f"crew-{run.crew.generation}.step-{run.step + 1}.rank-{rank}.npy"
