"""Memory for copies: who gets it when there is little, and that it is used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import CheckpointManager
from dtruntime.checkpoint import engine
from dtruntime.checkpoint.save.handle import SaveHandle
from dtruntime.checkpoint.save.staging import SLAB, DeviceSource, StagingPool
from dtruntime.errors import StorageError
from dtruntime.storage.backend import StreamWriter

SLABS = 3
SECONDS = 60.0


def _states(count: int, slabs: int) -> list[dict[str, np.ndarray]]:
    return [{"a": np.random.default_rng(n).random(slabs * SLAB // 8)} for n in range(count)]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    manager = CheckpointManager(tmp_path, memory_budget=SLABS * SLAB, keep_count=10)
    yield manager
    manager.close()


def _check(manager: CheckpointManager, states: list[dict[str, np.ndarray]]) -> None:
    for step, state in enumerate(states):
        assert np.array_equal(manager.load_state(step)["a"], state["a"])


def test_several_threads_save_more_than_the_memory_holds(manager: CheckpointManager) -> None:
    states = _states(3, slabs=SLABS + 1)
    threads = [
        threading.Thread(target=manager.save, args=(state, step), daemon=True)
        for step, state in enumerate(states)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "the saves wait for each other"
    manager.wait()
    _check(manager, states)


@pytest.mark.parametrize("saves", [1, pytest.param(2, marks=pytest.mark.long)])
def test_store_that_fails_while_memory_is_short_leaves_nobody_waiting(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    """The memory that the rest of a state waits for is that of what was not written."""
    states = _states(saves, slabs=2 * SLABS)
    begun, backend = threading.Barrier(saves), manager.engine.store.backend
    writer, failed = backend.writer, threading.Event()

    class Failing(StreamWriter):
        def _write(self, view: memoryview) -> None:
            if self.written > SLAB and not failed.is_set():
                time.sleep(0.3)  # others take what memory there is
                failed.set()
                raise StorageError("the disk is on fire")

        def _finish(self) -> None: ...

        def _abort(self) -> None: ...

    def opened(name: str) -> StreamWriter:
        return writer(name) if failed.is_set() else Failing(name, name)

    monkeypatch.setattr(backend, "writer", opened)
    handles: list[SaveHandle] = []

    def save(step: int) -> None:
        begun.wait(SECONDS)
        handles.append(manager.save(states[step], step))

    threads = [threading.Thread(target=save, args=(n,), daemon=True) for n in range(saves)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a save waits for memory for ever"
    good, errors = [], []
    for handle in handles:
        try:
            good.append(handle.wait(SECONDS).step)
        except StorageError as exc:
            errors.append(str(exc))
    assert errors == ["the disk is on fire"]
    assert manager.steps() == good
    for step in good:
        assert np.array_equal(manager.load_state(step)["a"], states[step]["a"])
    last = _states(1, slabs=SLABS + 1)[0]
    manager.save(last, 9).wait(SECONDS)
    assert np.array_equal(manager.load_state(9)["a"], last["a"])


class _Held(DeviceSource):
    """Stands for a copy on a device, which is fetched when somebody says so."""

    def __init__(self, data: memoryview, may_be_fetched: threading.Event) -> None:
        self.nbytes = data.nbytes
        self._data = data
        self._may_be_fetched = may_be_fetched

    def copy_part(self, first: int, target: memoryview) -> None:
        assert self._may_be_fetched.wait(SECONDS)
        target[:] = self._data[first : first + target.nbytes]

    def wait(self) -> None:
        pass


@pytest.mark.long
def test_save_leaves_memory_to_one_that_is_still_being_fetched(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU that has room for one copy: the next save is copied while it is fetched."""
    states = _states(2, slabs=SLABS + 1)
    fetched = threading.Event()
    kept = iter([True, False])

    def sources(_: Any, buffers: Sequence[Any]) -> tuple[Sequence[Any], bool]:
        if not next(kept):
            return buffers, False
        copies = [bytearray(buffer.nbytes) for buffer in buffers]
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.copy_into(memoryview(copy))
        return [_Held(memoryview(copy), fetched) for copy in copies], True

    monkeypatch.setattr(engine.CheckpointEngine, "_sources", sources)
    manager.save(states[0], 0)
    second = threading.Thread(target=manager.save, args=(states[1], 1), daemon=True)
    second.start()
    second.join(0.5)  # it has all that it may take
    fetched.set()
    second.join(SECONDS)
    assert not second.is_alive(), "the saves wait for each other"
    manager.wait()
    _check(manager, states)


def test_memory_that_was_used_is_used_again_first() -> None:
    pool = StagingPool(3 * SLAB)
    with pool.turn() as turn:
        first, second = pool.borrow(turn), pool.borrow(turn)
        for order in ([first, second], [second, first]):
            for slab in order:
                pool.give_back(slab)
            assert [pool.borrow(turn), pool.borrow(turn)] == [first, second]
    assert pool.allocated == 2 * SLAB


def test_last_slab_is_for_the_earliest() -> None:
    pool = StagingPool(2 * SLAB)
    earlier, later = pool.turn(), pool.turn()
    one = pool.borrow(later)
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(pool.borrow(later)), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    last = pool.borrow(earlier)
    pool.give_back(last)
    waiting.join(0.2)
    assert waiting.is_alive()
    earlier.give_up()
    waiting.join(SECONDS)
    assert got == [last]
    pool.give_back(one)
    later.give_up()
