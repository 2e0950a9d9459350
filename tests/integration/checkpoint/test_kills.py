"""Processes that save are killed at any moment; what was committed stays, and is right."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime.testing import LocalCoordinator, WorkerProcess
from tests.support.kill_rounds import (
    HOWS,
    MODES,
    KilledRanks,
    Savers,
    torture_bucket,
    torture_folder,
    torture_ranks,
)

SEED = int(os.environ.get("STRATA_KILL_SEED") or random.SystemRandom().randrange(10**9))


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    print(f"again with the same kills: STRATA_KILL_SEED={SEED}")
    with Savers() as started:
        yield started


@pytest.mark.parametrize("mode", MODES)
def test_killed_writers_lose_nothing_and_leave_nothing(
    savers: Savers, tmp_path: Path, mode: str
) -> None:
    assert torture_folder(savers, tmp_path / "ckpt", mode, 4, SEED) == 4


@pytest.mark.parametrize("mode", ["bytes", pytest.param("incremental", marks=pytest.mark.long)])
def test_killed_writers_to_s3_lose_nothing(
    s3_server: dict[str, str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    with Savers(s3_server) as savers:
        assert torture_bucket(savers, f"s3://ready/kills/{mode}", mode, 3, SEED) == 3


@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.long), "incremental"])
def test_killed_ranks_and_coordinators_lose_nothing(
    savers: Savers, own_coordinator: LocalCoordinator, tmp_path: Path, mode: str
) -> None:
    url = str(tmp_path / "ckpt")
    assert torture_ranks(savers, own_coordinator, url, mode, len(HOWS), SEED) == len(HOWS)


def test_commit_without_a_manifest_is_healed_and_never_swept(
    savers: Savers, own_coordinator: LocalCoordinator, tmp_path: Path
) -> None:
    killed = KilledRanks(savers, own_coordinator, str(tmp_path / "ckpt"), "full", SEED)
    killed.kill_once("manifest")
    assert killed.reported == 1
    assert not (tmp_path / "ckpt" / "manifests").exists()
    with killed.ranks() as ranks:
        assert ranks[0].wait_for("found ") == "found [1]"


COMMITTED_WITHOUT_A_MANIFEST = """
import os, pathlib, signal, sys, time
import numpy as np
from dtruntime import CheckpointManager

place, said = sys.argv[1], pathlib.Path(sys.argv[2])

class Agreement:
    def __init__(self, rank):
        self.rank = rank

    def begin_checkpoint(self, step):
        return f"step-{step}-1"

    def commit_checkpoint(self, checkpoint_id, step, **told):
        (said / f"{checkpoint_id}.{self.rank}").touch()
        while not all((said / f"{checkpoint_id}.{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        if self.rank == 0 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def latest_checkpoint(self):
        return None

    def report_checkpoints(self, *told, **more):
        return 0

child = os.fork()
manager = CheckpointManager(place, orchestrator=Agreement(int(bool(child))), sharded=True)
for step in (1, 2):
    manager.save({"weights": np.arange(1000) + step}, step).wait()
os.waitpid(child, 0)
manager.close()
"""


def test_rank_that_closes_leaves_what_a_killed_one_has_committed(tmp_path: Path) -> None:
    """The manifest of step 2 was not written: whoever asks the coordinator can write it yet."""
    said = tmp_path / "said"
    said.mkdir()
    with WorkerProcess(COMMITTED_WITHOUT_A_MANIFEST, [str(tmp_path / "c"), str(said)]) as process:
        assert process.wait() == 0
    files = [path.name.split("-")[0] for path in (tmp_path / "c" / "packs").iterdir()]
    assert sorted(files) == ["000000000001"] * 2 + ["000000000002"] * 2
