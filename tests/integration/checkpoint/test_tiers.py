"""Two tiers with real stores and processes: S3, kills during uploads, ranks that share a folder."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.upload import uploader
from dtruntime.errors import StorageError
from dtruntime.retry import Backoff
from dtruntime.testing import LocalCoordinator
from tests.support.kill_rounds import Saver, Savers
from tests.support.programs.checkpoint_savers import content, load, same
from tests.support.servers.http_faults import HttpFaults

SEED = int(os.environ.get("STRATA_KILL_SEED") or random.SystemRandom().randrange(10**9))
MEGABYTE = 2**20


def noise(step: int, size: int = 3 * MEGABYTE) -> bytes:
    return np.random.default_rng(step).bytes(size)


@pytest.mark.usefixtures("s3")
def test_bucket_gets_what_the_local_disk_has(tmp_path: Path) -> None:
    url, local = "s3://ready/tiers/plain", tmp_path / "local"
    with CheckpointManager(url, local_tier=local, keep_count=9, incremental=True) as manager:
        for step in range(1, 5):
            manager.save(content("incremental", step), step)
        manager.save(noise(5, 40 * MEGABYTE), 5).wait_uploaded(60)
        with CheckpointManager(url) as reader:
            assert reader.steps() == [1, 2, 3, 4, 5]
            assert reader.load_bytes() == noise(5, 40 * MEGABYTE)
    shutil.rmtree(local)
    with CheckpointManager(url, local_tier=local) as manager:
        assert manager.latest().step == 5  # type: ignore[union-attr]
        assert same(manager.load_state(4), content("incremental", 4))


def test_bucket_that_fails_for_a_while_gets_everything_later(
    s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(uploader, "BACKOFF", Backoff(0.01, 0.05))
    url = "s3://ready/tiers/failing"
    with (
        HttpFaults(s3_server["AWS_ENDPOINT_URL"]) as faults,
        CheckpointManager(
            url, local_tier=tmp_path, endpoint=faults.url, retry_seconds=0.2
        ) as manager,
    ):
        manager.save(noise(1), 1).wait_uploaded(60)
        faults.fail("PUT|POST", 503, 10_000)
        handles = [manager.save(noise(step), step) for step in (2, 3)]
        assert [handle.wait(60).step for handle in handles] == [2, 3]
        with pytest.raises(StorageError, match=r"only in the local tier.*overloaded"):
            handles[1].wait_uploaded(60)
        assert manager.load_bytes() == noise(3)
        faults.fail("", None, 0)
        handles[1].wait_uploaded(60)
        with CheckpointManager(url) as reader:
            assert [reader.load_bytes(step) for step in reader.steps()] == [
                noise(step) for step in (1, 2, 3)
            ]


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    print(f"again with the same kills: STRATA_KILL_SEED={SEED}")
    with Savers() as started:
        yield started


class KilledUploads:
    """A run with two tiers whose process is killed again and again."""

    def __init__(self, savers: Savers, url: str, local: Path, mode: str) -> None:
        self.savers = savers
        self.url = url
        self.local = local
        self.mode = mode
        self.random = random.Random(f"{SEED}/tiers/{mode}/{url[:2]}")
        self.committed = 0
        self.uploaded = 0

    def kill_once(self) -> None:
        operation = self.random.randint(2, 60) if self.random.random() < 0.6 else 0
        saver = self.start(saves=1000, operation=operation)
        if operation:
            code = saver.wait()
        else:
            saver.wait_for("committed ")
            time.sleep(self.random.uniform(0.0, 0.2))
            code = saver.kill()
        assert code == -signal.SIGKILL, saver.said
        self.note(saver)
        self.check()

    def start(self, **arguments: Any) -> Saver:
        place = {"url": self.url, "local": str(self.local), "mode": self.mode}
        return self.savers.start("save_tiers", step=self.committed + 1, **place, **arguments)

    def note(self, saver: Saver) -> None:
        uploaded = [int(x.split()[1]) for x in saver.said if x.startswith("uploaded ")]
        self.committed = max(self.committed, saver.committed)
        self.uploaded = max([self.uploaded, *uploaded])

    def check(self) -> None:
        """What each place lists is whole and right; neither has lost what was reported."""
        assert self.steps(self.url)[-1:] >= [self.uploaded] or not self.uploaded
        found = self.steps(str(self.local))
        assert max(found, default=0) >= self.committed
        self.committed = max(found, default=0)

    def steps(self, url: str) -> list[int]:
        with CheckpointManager(url) as manager:
            steps = manager.steps()
            for step in steps:
                assert same(load(manager, self.mode, step), content(self.mode, step)), step
            return steps


def kill_and_go_on(killed: KilledUploads, kills: int) -> None:
    for _ in range(kills):
        killed.kill_once()
    last = killed.start(saves=3)
    assert last.wait() == 0, last.said
    killed.note(last)
    assert killed.steps(killed.url)[-1] == killed.committed, "a clean end uploads the newest"
    assert killed.steps(str(killed.local))[-1] == killed.committed


@pytest.mark.parametrize("mode", ["full", "incremental", "delta"])
def test_process_killed_during_uploads_loses_nothing(
    savers: Savers, tmp_path: Path, mode: str
) -> None:
    kill_and_go_on(KilledUploads(savers, str(tmp_path / "main"), tmp_path / "local", mode), 5)
    assert not list((tmp_path / "main" / "locks").iterdir())
    packs = len(list((tmp_path / "main" / "packs").iterdir()))
    assert packs <= (16 if mode == "delta" else 8), "leftovers were collected"


def test_process_killed_during_uploads_to_s3_loses_nothing(
    s3_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    with Savers(s3_server) as savers:
        url = "s3://ready/tiers/kills"
        kill_and_go_on(KilledUploads(savers, url, tmp_path / "local", "incremental"), 4)


def test_next_process_uploads_what_a_killed_one_had_committed(
    savers: Savers, tmp_path: Path
) -> None:
    url, local = str(tmp_path / "main"), tmp_path / "local"
    killed = KilledUploads(savers, url, local, "full")
    saver = killed.start(saves=1000, operation=6)
    assert saver.wait() == -signal.SIGKILL
    killed.note(saver)
    assert killed.steps(url) == []
    with CheckpointManager(url, local_tier=local, upload_every=2) as manager:
        assert manager.newest_step() == max(killed.steps(str(local)))
        manager.wait(60)
        assert max(killed.steps(url)) == manager.newest_step()


def test_interpreter_that_ends_without_closing_uploads_the_newest(tmp_path: Path) -> None:
    main, local = tmp_path / "main", tmp_path / "local"
    program = f"""
from dtruntime import CheckpointManager
manager = CheckpointManager({str(main)!r}, local_tier={str(local)!r}, upload_every=100)
manager.save(b"x" * 30_000_000, 1)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with CheckpointManager(main) as reader:
        assert reader.load_bytes() == b"x" * 30_000_000


class Rank:
    """A registered worker with a manager of its own; a process would have one of each."""

    def __init__(self, url: str, job: str, rank: int, world: int, main: Any, local: Path) -> None:
        self.orchestrator = TrainingOrchestrator(
            coordinator_url=url, job=job, rank=rank, world_size=world, worker_id=f"worker-{rank}"
        )
        self.orchestrator.register()
        self.manager = CheckpointManager(
            main, local_tier=local, sharded=True, orchestrator=self.orchestrator, keep_count=9
        )

    def save(self, step: int) -> Any:
        state = {"rank": self.orchestrator.rank, "w": np.full(1000, step)}
        return self.manager.save(state, step, is_full=step % 2 == 1)

    def close(self) -> None:
        self.manager.close()
        self.orchestrator.deregister()


def test_ranks_that_share_a_folder_have_two_tiers(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    main, local = tmp_path / "main", tmp_path / "local"
    ranks = [Rank(coordinator.url, job, rank, 3, main, local) for rank in range(3)]
    for step in (1, 2, 3, 4):
        for handle in [rank.save(step) for rank in ranks]:
            handle.wait(60)
    last = [rank.save(5) for rank in ranks]
    for handle in last:
        assert handle.wait_uploaded(60).step == 5
    for number, rank in enumerate(ranks):
        assert rank.manager.ranks() == [0, 1, 2]
        assert rank.manager.load_state()["rank"] == number
        assert rank.manager.load_state(4, rank=2)["rank"] == 2
    shutil.rmtree(local)
    for number, rank in enumerate(ranks):
        assert rank.manager.load_state()["rank"] == number, "the main storage has all parts"
    for rank in ranks:
        rank.close()
    with CheckpointManager(main) as reader:
        assert reader.steps() == [1, 2, 3, 4, 5]
        assert [reader.load_state(2, rank=rank)["rank"] for rank in reader.ranks(2)] == [0, 1, 2]


def test_ranks_with_folders_of_their_own_are_refused_at_the_save(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    main = tmp_path / "main"
    ranks = [
        Rank(coordinator.url, job, rank, 2, main, tmp_path / f"machine-{rank}") for rank in range(2)
    ]
    for handle in [rank.save(1) for rank in ranks]:
        with pytest.raises(StorageError, match="local_tier has to be a folder that they share"):
            handle.wait(60)
    for rank in ranks:
        assert rank.manager.steps() == []
        rank.close()
    assert not (main / "manifests").exists()
