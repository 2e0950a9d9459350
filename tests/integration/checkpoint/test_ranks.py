"""Checkpoints of all ranks: committed together, cleared away when aborted, healed when lost."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.checkpoint.file_format.chunks import PAGE
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.save.commit import SharedCommitter
from dtruntime.errors import CheckpointAbortedError, CheckpointDamagedError, StorageError
from dtruntime.storage import LocalBackend
from dtruntime.testing import LocalCoordinator
from tests.support.workers import remote_workers

WORLD = 2


class Rank:
    """A registered worker with a manager of its own; a process would have one of each."""

    def __init__(self, url: str, job: str, rank: int, folder: Path, **options: Any) -> None:
        self.orchestrator = TrainingOrchestrator(
            coordinator_url=url, job=job, rank=rank, world_size=WORLD, worker_id=f"worker-{rank}"
        )
        self.orchestrator.register()
        self.manager = CheckpointManager(
            folder, sharded=True, orchestrator=self.orchestrator, **options
        )

    def state(self, step: int) -> dict[str, Any]:
        rank = self.orchestrator.rank
        return {"rank": rank, "w": np.full(1000, step * 10 + rank)}

    def save(self, step: int, **options: Any) -> Any:
        return self.manager.save(self.state(step), step, **options)

    def close(self) -> None:
        self.manager.close()
        self.orchestrator.deregister()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def ranks(coordinator: LocalCoordinator, job: str, folder: Path) -> Iterator[list[Rank]]:
    started = [Rank(coordinator.url, job, rank, folder) for rank in range(WORLD)]
    yield started
    for rank in started:
        rank.close()


def files(folder: Path, *kinds: str) -> list[Path]:
    return [path for kind in kinds for path in (folder / kind).rglob("*") if path.is_file()]


def save_all(ranks: list[Rank], step: int, **options: Any) -> None:
    for handle in [rank.save(step, **options) for rank in ranks]:
        handle.wait(60)


def test_every_rank_loads_its_own_part(ranks: list[Rank]) -> None:
    save_all(ranks, 1, metrics={"loss": 0.5}, metadata={"run": "a"})
    save_all(ranks, 2, is_full=False)
    for number, rank in enumerate(ranks):
        assert rank.manager.steps() == [1, 2]
        assert rank.manager.load_state()["rank"] == number
        assert rank.manager.load_state(1)["w"][0] == 10 + number
    first = ranks[0].manager.checkpoints()[0]
    assert (first.parts, first.is_full, first.metadata) == (WORLD, True, {"run": "a"})


def test_chunks_that_another_rank_has_stored_are_not_stored_again(ranks: list[Rank]) -> None:
    """As after a change of who holds what: each rank saves what the other one had."""
    shares = [np.random.default_rng(rank).random(200_000) for rank in range(WORLD)]

    def save(step: int, shift: int) -> list[int]:
        handles = [
            rank.manager.save({"w": shares[(number + shift) % WORLD]}, step, is_full=False)
            for number, rank in enumerate(ranks)
        ]
        return [handle.wait(60).written_bytes for handle in handles]

    assert save(1, 0) == [-(-share.nbytes // PAGE) * PAGE for share in shares]
    assert save(2, 1) == [0] * WORLD
    for number, rank in enumerate(ranks):
        assert np.array_equal(rank.manager.load_state(2)["w"], shares[(number + 1) % WORLD])


def test_checkpoints_of_all_ranks_count_once(
    coordinator: LocalCoordinator, job: str, folder: Path
) -> None:
    ranks = [Rank(coordinator.url, job, rank, folder, keep_count=2) for rank in range(WORLD)]
    for step in range(1, 7):
        save_all(ranks, step)
    for rank in ranks:
        rank.manager.wait()
    assert [rank.manager.steps() for rank in ranks] == [[5, 6]] * WORLD
    assert len(files(folder, "packs")) <= 3 * WORLD, "the kept ones, and the one dropped last"
    for rank in ranks:
        rank.close()


def test_aborted_save_leaves_neither_part_nor_pack(ranks: list[Rank], folder: Path) -> None:
    save_all(ranks, 1)
    before = files(folder, "packs", "parts")
    handle = ranks[0].save(2)
    ranks[1].orchestrator.deregister()
    with pytest.raises(CheckpointAbortedError, match="worker-1"):
        handle.wait(60)
    assert files(folder, "packs", "parts") == before
    assert ranks[0].manager.load_state()["w"][0] == 10


def leave_unwritten(ranks: list[Rank], step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks commit a step, of which the manifest is not written."""
    with monkeypatch.context() as patch:

        def die(*_: object) -> None:
            raise OSError("as if it was killed before the manifest")

        patch.setattr(SharedCommitter, "write_manifest", die)
        handles = [
            rank.save(step, epoch=3, metrics={"loss": 0.25}, metadata={"a": "b"}) for rank in ranks
        ]
        with pytest.raises(StorageError, match="as if it was killed"):
            handles[0].wait(60)
        handles[1].wait(60)


def test_missing_manifest_is_written_by_whoever_looks_first(
    ranks: list[Rank], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_unwritten(ranks, 5, monkeypatch)
    assert not files(folder, "manifests")
    assert ranks[1].manager.steps() == [5]
    (found,) = ranks[1].manager.checkpoints()
    assert (found.epoch, found.parts, found.metadata, found.is_full) == (3, 2, {"a": "b"}, True)
    assert ranks[0].manager.load_state()["w"][0] == 50
    assert len(files(folder, "manifests")) == 1


def test_all_ranks_may_heal_at_the_same_time(
    ranks: list[Rank], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_unwritten(ranks, 5, monkeypatch)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(rank.manager.load_state()["rank"]))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1]
    assert len(files(folder, "manifests")) == 1


def test_successors_heal_before_they_sweep(
    coordinator: LocalCoordinator,
    job: str,
    folder: Path,
    ranks: list[Rank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_all(ranks, 4)
    leave_unwritten(ranks, 5, monkeypatch)
    for rank in ranks:
        rank.manager.engine.store.session.close()  # as the death of its process would
    successors = [Rank(coordinator.url, job, number, folder) for number in range(WORLD)]
    save_all(successors, 6)
    assert successors[1].manager.steps() == [4, 5, 6]
    assert [r.manager.load_state(5)["w"][0] for r in successors] == [50, 51]
    assert "checkpoint.healed" in caplog.text
    for successor in successors:
        successor.close()


def test_commit_whose_pack_is_gone_is_not_healed(
    ranks: list[Rank], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    save_all(ranks, 4)
    leave_unwritten(ranks, 5, monkeypatch)
    next((folder / "packs").glob("000000000005-*")).unlink()
    assert ranks[1].manager.steps() == [4]
    assert "checkpoint.not_healed" in caplog.text


def test_commit_whose_pack_goes_before_the_manifest_is_there_is_taken_back_and_told(
    ranks: list[Rank], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(ranks, 4)
    create = LocalBackend._create

    def remove_first(backend: LocalBackend, name: str, views: Any) -> bool:
        next((folder / "packs").glob("000000000005-*")).unlink(missing_ok=True)
        return create(backend, name, views)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "_create", remove_first)
        handles = [rank.save(5) for rank in ranks]
        with pytest.raises(StorageError, match="was removed while"):
            handles[0].wait(60)
        handles[1].wait(60)
    assert [rank.manager.steps() for rank in ranks] == [[4], [4]]
    assert [rank.manager.load_state()["w"][0] for rank in ranks] == [40, 41]
    latest = ranks[1].orchestrator.latest_checkpoint()
    assert latest is not None
    assert (latest.step, latest.verified) == (5, False)


def test_damaged_part_is_named_and_ranks_do_not_fall_back_one_by_one(
    ranks: list[Rank], folder: Path
) -> None:
    save_all(ranks, 1)
    save_all(ranks, 2)
    victim = next((folder / "parts").glob("step-000000000002-*/00001-*"))
    data = victim.read_bytes()
    for damage in (data[:-50], data.replace(b"1000", b"1001"), None):
        victim.unlink() if damage is None else victim.write_bytes(damage)
        assert ranks[0].manager.load_state()["w"][0] == 20
        with pytest.raises(CheckpointDamagedError, match="All ranks have to load the same step"):
            ranks[1].manager.load_state()
        assert ranks[0].manager.load_latest().step == 1, "it reads all parts, on every rank"
        assert [rank.manager.load_state(1)["w"][0] for rank in ranks] == [10, 11]


def test_rank_that_takes_over_writes_what_the_lowest_one_left(
    coordinator: LocalCoordinator, job: str, folder: Path
) -> None:
    """Elastic: rank 0 commits, dies before the manifest, and nobody takes its place."""
    options: dict[str, Any] = {"coordinator_url": coordinator.url, "job": job}
    first, second = TrainingOrchestrator(**options), TrainingOrchestrator(**options)
    first.register()
    second.register()
    lowest = CheckpointManager(folder, sharded=True, orchestrator=first)
    other = CheckpointManager(folder, sharded=True, orchestrator=second)
    lowest.engine.committer.write_manifest = lambda *_: None  # type: ignore[attr-defined]
    handles = [lowest.save(b"a", 1), other.save(b"b", 1)]
    for handle in handles:
        handle.wait(60)
    lowest.close()
    first.deregister()
    with pytest.raises(StorageError):
        other.save(b"not told of the loss yet", 2).wait(60)
    with pytest.raises(Exception, match="worker-0"):
        second.barrier("told")
    other.save(b"c", 3).wait(60)
    with CheckpointManager(folder) as reader:
        assert reader.steps() == [1, 3]
        assert reader.load_bytes(1) == b"a"
    other.close()
    second.deregister()


def test_attempt_that_a_member_went_past_ends(coordinator: LocalCoordinator, job: str) -> None:
    """As after a restart of the coordinator while one rank waited and another had yet to begin."""
    with remote_workers(2, coordinator, job=job, world_size=2) as (first, second):
        early = second.call("begin_checkpoint", 3)
        part = second.begin("commit_checkpoint", early, 3, partial=True, timeout_ms=100)
        part.exception(60)
        late = first.call("begin_checkpoint", 3)
        waiting = first.begin("commit_checkpoint", late, 3, partial=True, timeout_ms=60_000)
        second.call("begin_checkpoint", 4)
        error = waiting.exception(60)
        assert isinstance(error, CheckpointAbortedError), error
        assert "worker-1" in str(error)


def test_save_that_failed_on_one_rank_ends_when_that_rank_stores_the_next(
    coordinator: LocalCoordinator, job: str
) -> None:
    with remote_workers(2, coordinator, job=job, world_size=2) as (first, second):
        ids = {worker.call("begin_checkpoint", 3) for worker in (first, second)}
        waiting = first.begin("commit_checkpoint", *ids, 3, partial=True, timeout_ms=60_000)
        later = second.call("begin_checkpoint", 4)
        stored = second.begin("commit_checkpoint", later, 4, partial=True, timeout_ms=60_000)
        assert isinstance(waiting.exception(60), CheckpointAbortedError)
        assert first.call("begin_checkpoint", 4) == later
        first.call("commit_checkpoint", later, 4, partial=True)
        stored.result(60)


@pytest.mark.parametrize("options", [{}, {"keep_count": 2, "incremental": True}], ids=str)
def test_nothing_is_healed_in_undisturbed_saves(
    options: dict[str, Any],
    coordinator: LocalCoordinator,
    job: str,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = [Rank(coordinator.url, job, rank, folder, **options) for rank in range(WORLD)]

    def train(rank: Rank) -> None:
        for step in range(1, 31):
            rank.save(step).wait(60)
            # Whoever looks may be here before the manifest is.
            assert rank.manager.steps()[-1] == step

    threads = [threading.Thread(target=train, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [rank.manager.load_state()["w"][0] for rank in ranks] == [300, 301]
    for rank in ranks:
        rank.close()
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


def test_nothing_is_healed_in_undisturbed_saves_of_one_writer(
    coordinator: LocalCoordinator, job: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = TrainingOrchestrator(coordinator_url=coordinator.url, job=job)
    with CheckpointManager(folder) as manager, worker:
        worker.register()
        for step in range(1, 31):
            manager.save({"w": np.full(1000, step)}, step)
            assert manager.steps()[-1] == step
        assert manager.load_state()["w"][0] == 30
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
