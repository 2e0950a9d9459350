"""What the workers note of every step, and what that says about a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..run import Run


class StepMark(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a worker has done."""

    at: float
    """Seconds since 1970."""
    generation: int
    """Of the crew that did it."""
    step: int
    """From 1."""
    rank: int
    loss: float
    """Mean over the batch of all workers."""


class StepNote(StepMark, frozen=True, kw_only=True):
    """A step that a worker has done, with the samples that it used."""

    epoch: int
    ids: list[int]


class Notebook:
    """A worker's notes. They outlive the process, however it ends."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder = folder
        self._run = run
        self.samples = 0
        """How many samples this process has used."""

    def __enter__(self) -> Self:
        worker = self._run.orchestrator
        assert worker is not None
        self._file = (self._folder / f"{worker.worker_id}.jsonl").open("ab", buffering=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, ids: NDArray[np.int64], loss: float) -> None:
        """Note the step that is being done."""
        run = self._run
        note = StepNote(
            at=time.time(),
            generation=run.crew.generation,
            step=run.step + 1,
            epoch=run.epoch,
            rank=run.rank,
            loss=loss,
            ids=ids.tolist(),
        )
        self._file.write(msgspec.json.encode(note) + b"\n")
        self.samples += len(ids)


class Follower:
    """Reads the notes of a run while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(StepMark)

    def news(self) -> list[StepMark]:
        """What was noted since the last call, in the order of time."""
        marks = [mark for path in self._folder.glob("*.jsonl") for mark in self._more(path)]
        return sorted(marks, key=lambda mark: mark.at)

    def _more(self, path: Path) -> Iterator[StepMark]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return map(self._decoder.decode, whole.splitlines())


def read_notes(folder: Path) -> list[StepNote]:
    """All notes of a run; one that a killed worker did not finish is left out."""
    decoder = msgspec.json.Decoder(StepNote)
    notes = []
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_bytes()
        notes += [decoder.decode(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    return notes


def kept(notes: Iterable[StepNote]) -> dict[int, list[StepNote]]:
    """The notes of each step that count: those of the last crew that did it.

    What crews before it did of that step was undone when the run went back to a checkpoint.
    """
    found: dict[int, list[StepNote]] = {}
    for note in notes:
        others = found.setdefault(note.step, [])
        if others and note.generation > others[0].generation:
            others.clear()
        if not others or note.generation == others[0].generation:
            others.append(note)
    return dict(sorted(found.items()))
