"""One engine behind every way to save: each saves alike, and through the backend it was given."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dtruntime._shutdown import shutdown
from dtruntime.checkpoint import CheckpointManager, CheckpointWriter
from dtruntime.checkpoint.dcp import StrataReader, StrataWriter
from dtruntime.errors import StorageError
from dtruntime.retention import PLACE_KEY, RETENTION_KEY, SECONDS_KEY, WRITTEN_KEY
from dtruntime.storage import MemoryBackend, StorageBackend, open_backend
from dtruntime.telemetry import tracing
from dtruntime.testing import FaultRates, FaultyBackend, RecordingBackend, eventually
from dtruntime.types import CheckpointCondition

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Place = CheckpointManager | StorageBackend | Path


def save_distributed(place: Place, step: int, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=StrataWriter(place, step, **options))


def load_distributed(place: Place, state: dict[str, Any]) -> dict[str, Any]:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(target, storage_reader=StrataReader(place))
    return target


# What distributed saves have in common with those of a manager


def test_distributed_saves_store_differences(tmp_path: Path) -> None:
    weights = torch.linspace(0, 1, 400_000)
    with CheckpointManager(tmp_path, delta=True) as manager:
        written = []
        for step in (1, 2, 3):
            weights = weights + 1e-7
            save_distributed(manager, step, {"w": weights})
            entry, manifest = manager.engine.store.catalog.readable()[-1]
            assert entry.step == step
            written.append(manifest.written_bytes)
            assert torch.equal(load_distributed(manager, {"w": weights})["w"], weights)
        (part,) = manager.engine.store.catalog.parts(manifest)
    assert written[0] >= weights.nbytes
    assert max(written[1:]) < weights.nbytes / 2
    assert {chunk.codec for chunk in part.chunks} == {"delta4"}


def test_difference_is_not_made_from_a_distributed_save_that_was_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.linspace(0, 1, 400_000)
    with CheckpointManager(tmp_path, delta=True) as manager:
        writer = StrataWriter(manager)

        def save(step: int) -> None:
            state = {"w": weights + step * 1e-7}
            dcp.save(state, checkpoint_id=str(step), storage_writer=writer)

        save(1)
        monkeypatch.setattr(StrataWriter, "finish", _fail)
        with pytest.raises(dcp.api.CheckpointException, match="no luck"):
            save(2)
        monkeypatch.undo()
        save(3)
        target = load_distributed(manager, {"w": weights})
        assert torch.equal(target["w"], weights + 3e-7)
        assert manager.steps() == [1, 3]
    assert not list(tmp_path.glob("packs/000000000002-*"))


def _fail(*_: object, **__: object) -> None:
    raise StorageError("no luck")


def test_distributed_saves_are_estimated(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        save_distributed(manager, 1, {"w": torch.randn(300_000)})
        full = manager.estimate_seconds()
        assert full is not None
        assert full > 0
        save_distributed(manager, 2, {"w": torch.randn(300_000)}, is_full=False)
        assert manager.estimate_seconds(is_full=False)


CURRENT = ContextVar("CURRENT", default="")


class RecordedSpan(tracing.Span):
    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.name, self.parent, self.attributes = name, CURRENT.get(), attributes
        self.ended = False

    def set(self, **attributes: Any) -> None:
        self.attributes |= attributes

    def end(self) -> None:
        self.ended = True

    @contextmanager
    def current(self) -> Iterator[None]:
        token = CURRENT.set(self.name)
        yield
        CURRENT.reset(token)

    def __enter__(self) -> Self:
        CURRENT.set(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        CURRENT.set(self.parent)
        self.end()


class Spans:
    """Records the spans of this process."""

    def __init__(self) -> None:
        self.begun: list[RecordedSpan] = []

    def begin(self, name: str, attributes: dict[str, Any], *, calls: bool = False) -> RecordedSpan:
        self.begun.append(RecordedSpan(name, attributes))
        return self.begun[-1]


def test_distributed_saves_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans()
    monkeypatch.setattr(tracing, "_recorder", spans)
    with CheckpointManager(tmp_path) as manager:
        save_distributed(manager, 7, {"w": torch.ones(5000)})
        (info,) = manager.checkpoints()
    assert {span.name: span.parent for span in spans.begun} == {
        "save": "",
        "save.write": "save",
        "save.encode": "save.write",
        "save.commit": "save",
    }
    save = spans.begun[0].attributes
    assert (save["step"], save["checkpoint_id"]) == (7, info.checkpoint_id)
    assert save["size_bytes"] == info.size_bytes
    assert save["written_bytes"] > 0
    assert all(span.ended for span in spans.begun)


class Coordinator:
    """Takes everything that a registered worker's coordinator is told."""

    rank = 0

    def __init__(self) -> None:
        self.commits: list[dict[str, Any]] = []
        self.reports: list[tuple[list[str], CheckpointCondition]] = []

    def begin_checkpoint(self, step: int) -> str:
        raise NotImplementedError

    def latest_checkpoint(self) -> None:
        return None

    def commit_checkpoint(self, checkpoint_id: str, step: int, **told: Any) -> None:
        self.commits.append({"id": checkpoint_id, "step": step, **told})

    def report_checkpoints(
        self, checkpoint_ids: list[str], condition: CheckpointCondition, **_: object
    ) -> int:
        self.reports.append((checkpoint_ids, condition))
        return len(checkpoint_ids)


def test_coordinator_learns_of_a_distributed_save_what_it_learns_of_others(tmp_path: Path) -> None:
    coordinator = Coordinator()
    with CheckpointManager(tmp_path, keep_count=1, orchestrator=coordinator) as manager:
        manager.save({"w": np.ones(5)}, 1).wait()
        save_distributed(manager, 2, {"w": torch.ones(5)})
        ids = [commit["id"] for commit in coordinator.commits]
        assert coordinator.reports == [([ids[0]], CheckpointCondition.REMOVED)]
    alone, distributed = coordinator.commits
    assert (alone["step"], distributed["step"]) == (1, 2)
    assert alone.keys() == distributed.keys()
    for key in (RETENTION_KEY, PLACE_KEY):
        assert distributed[key] == alone[key]
    assert int(distributed[WRITTEN_KEY]) > 0
    assert float(distributed[SECONDS_KEY]) > 0


# Backends


@pytest.fixture
def storage(tmp_path: Path) -> RecordingBackend:
    return RecordingBackend(MemoryBackend(f"engine-{tmp_path}"))


def test_writer_writes_through_the_backend_it_was_given(storage: RecordingBackend) -> None:
    with CheckpointWriter(storage) as writer:
        writer.write_checkpoint("model", 1, b"one")
        writer.write_checkpoint("optimizer", 2, {"m": np.ones(3)})
        assert writer.load_checkpoint("model") == b"one"
        assert writer.load_state("optimizer")["m"].sum() == 3
    created = [call.name for call in storage.calls if call.operation == "create"]
    assert [name.split("/")[0] for name in created] == ["model", "optimizer"]
    assert storage.counts["writer.finish"] == 2
    storage.write("mine", b"x")  # it is still the caller's


def test_manager_and_writer_meet_the_faults_of_the_backend_they_were_given(tmp_path: Path) -> None:
    def only(operation: str, name: str) -> bool:
        return operation == "create" and "manifests/" in name

    faulty = FaultyBackend(open_backend(tmp_path), rates=FaultRates(disconnect=1.0), only=only)
    with (
        CheckpointManager(faulty) as manager,
        pytest.raises(StorageError, match="on purpose"),
    ):
        manager.save(b"x", 1).wait()
    with CheckpointWriter(faulty) as writer, pytest.raises(StorageError, match="on purpose"):
        writer.write_checkpoint("model", 1, b"x")
    with pytest.raises(dcp.api.CheckpointException, match="on purpose"):
        save_distributed(faulty, 1, {"w": torch.ones(5)})
    assert {fault.name.split("/")[-2] for fault in faulty.faults} == {"manifests"}
    assert not list(tmp_path.rglob("manifests/*.json"))


def test_distributed_checkpoints_are_written_to_and_read_from_the_backend_that_was_given(
    storage: RecordingBackend,
) -> None:
    state = {"w": torch.arange(500.0)}
    save_distributed(storage, 1, state)
    assert storage.counts["writer.finish"] == 1
    storage.reset()
    assert torch.equal(load_distributed(storage, state)["w"], state["w"])
    assert storage.counts["read_into"] == 1


# Garbage


@pytest.mark.parametrize("saves", [0, 1])
def test_writer_may_be_collected_while_the_process_registers_other_work(
    tmp_path: Path, saves: int
) -> None:
    """The collector runs wherever memory is allocated, also with the lock of `shutdown` held."""
    writer: Any = StrataWriter(tmp_path, 1)
    reader: Any = StrataReader(tmp_path)
    for _ in range(saves):
        dcp.save({"w": torch.ones(5)}, storage_writer=writer)
        dcp.load({"w": torch.ones(5)}, storage_reader=reader)
    writer.cycle, reader.cycle = writer, reader
    gc.collect()
    del writer, reader

    def collect() -> None:
        with shutdown._lock:
            gc.collect()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(30)
    assert not collecting.is_alive(), "the collector waits for a lock that its own thread has"
    eventually(lambda: not list(tmp_path.glob("locks/*")), what="the writer is closed")
