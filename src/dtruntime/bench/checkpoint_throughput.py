"""Saves and loads, beside the memory and the disk or store under them."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from .._background import side_by_side, usable_cores
from ..checkpoint.manager import CheckpointManager
from ..display import size as readable
from ..errors import StorageError, StrataError
from ..storage.local_writer import ALIGNMENT
from .raw_storage import RawPlace, new_place
from .report import Announce, Section, Series, in_turn, results

MOST_ROUNDS = 5
STORED_COPIES = 5
"""The raw file, and of bytes and arrays a checkpoint with the one before it."""
ARRAY_BYTES = 16 * 2**20
COPIES = 6
"""The bytes, the arrays, where they are copied to here and in a save, and `claim_memory`'s."""
COPY_THREADS = 8
COPY, WRITE, READ = "copy in memory", "write raw", "read raw"
MEASURES = {
    COPY: "",
    "save arrays: first stall": "",
    "save arrays: stall": COPY,
    "save bytes: stall": "",
    WRITE: "",
    "save arrays: durable": WRITE,
    "save bytes: durable": WRITE,
    READ: "",
    "load arrays": READ,
    "load bytes": READ,
}
"""The limit of each; limits come before what is compared with them."""
_SEED = 7


def bench_checkpoints(
    place: str, size: int, rounds: int | None, seconds: float, tell: Announce
) -> Section:
    """Measure ``rounds`` rounds, or else as many as begin within ``seconds``.

    Everything that it writes lies in a folder or prefix of its own, and is removed in the end.
    """
    size -= size % ALIGNMENT
    with new_place(place, STORED_COPIES * size) as raw:
        tell("making a state")
        state, done = State(size), 0
        with _manager(f"{raw.url}/bytes") as plain, _manager(f"{raw.url}/arrays") as arrays:
            bench = _CheckpointRounds(raw, state, plain, arrays)
            tell("first save of arrays")
            bench.first_save()
            deadline = time.monotonic() + seconds
            while done < (rounds or (1 if time.monotonic() > deadline else MOST_ROUNDS)):
                done += 1
                bench.round(done, tell)
        return Section(
            name="checkpoints",
            place=place,
            facts={
                "size_bytes": size,
                "rounds": done,
                "raw_write": raw.raw_write,
                "raw_read": raw.raw_read,
            },
            measures=results(list(bench.series.values())),
            notes=[
                "a save of bytes copies nothing: its stall is the time to hand them over",
                "the first save of arrays allocates the memory that later ones copy to",
            ],
        )


class _CheckpointRounds:
    """Measures everything once in each round, so that all see the same machine."""

    def __init__(
        self, raw: RawPlace, state: State, plain: CheckpointManager, arrays: CheckpointManager
    ) -> None:
        self._raw, self._state, self._plain, self._arrays = raw, state, plain, arrays
        self._size = len(state.data)
        self.series = {
            name: Series(name, "bytes", limit, bytes_each=1) for name, limit in MEASURES.items()
        }

    def first_save(self) -> None:
        """Save arrays once: memory is allocated, which later saves use again."""
        handle = self._arrays.save(self._state.arrays, 0)
        handle.wait()
        self._arrays.wait()
        self.series["save arrays: first stall"].add(handle.stall_seconds, self._size)

    def round(self, number: int, tell: Announce) -> None:
        """Measure everything once."""
        state, raw = self._state, self._raw
        tell(f"round {number}: writing")
        self._time(COPY, state.copy)
        self._time(WRITE, lambda: raw.write(state.memory))
        tell(f"round {number}: saving")
        self._save("bytes", self._plain, state.data, number)
        self._save("arrays", self._arrays, state.arrays, number)
        tell(f"round {number}: reading")
        claim_memory(self._size)
        loads: list[tuple[str, Callable[[], Any], Callable[[Any], bool]]] = [
            (READ, lambda: raw.read(self._size), lambda loaded: loaded.data == state.data),
            ("load bytes", self._plain.load_bytes, lambda loaded: loaded == state.data),
            ("load arrays", self._arrays.load_state, state.is_arrays),
        ]
        for name, load, is_right in in_turn(loads, number):
            raw.forget()
            loaded = self._time(name, load)
            if number == 1 and not is_right(loaded):
                raise StorageError(f"what was loaded differs from what was saved ({name})")
            del loaded
        raw.delete()

    def _time(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.series[name].add(time.perf_counter() - began, self._size)
        return result

    def _save(self, kind: str, manager: CheckpointManager, state: Any, step: int) -> None:
        began = time.perf_counter()
        handle = manager.save(state, step)
        stall = time.perf_counter() - began
        handle.wait()
        self.series[f"save {kind}: durable"].add(time.perf_counter() - began, self._size)
        # Bytes are not copied, and a rate of copying would mean nothing.
        self.series[f"save {kind}: stall"].add(stall, 0 if kind == "bytes" else self._size)
        manager.wait()  # until the checkpoint before it is removed


@contextlib.contextmanager
def _manager(url: str) -> Iterator[CheckpointManager]:
    """Keeps one checkpoint; waits in the end for saves under way, so that all can be removed."""
    manager = CheckpointManager(url, keep_count=1, compression="none")
    try:
        yield manager
    except BaseException:
        with contextlib.suppress(StorageError):  # the first error says what happened
            manager.close()
        raise
    manager.close()


class State:
    """The same random bytes three times: as ``bytes``, as arrays, and in aligned memory."""

    def __init__(self, size: int) -> None:
        """``StrataError`` when there is not enough memory."""
        available = psutil.virtual_memory().available
        if available < COPIES * size:
            raise StrataError(
                f"{readable(available)} of memory are available, and {readable(COPIES * size)} are "
                f"needed for a state of {readable(size)}: choose a smaller --size"
            )
        # Anonymous memory begins at a page, as direct writes want.
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._target = np.frombuffer(self._memory, np.uint8)
        fill_random(self._target.view(np.uint32))
        self.data = self._target.tobytes()
        parts = range(0, size, ARRAY_BYTES)
        self.arrays = {f"layer-{at}": self._target[at : at + ARRAY_BYTES].copy() for at in parts}

    @property
    def memory(self) -> memoryview:
        """The bytes in aligned memory."""
        return memoryview(self._memory)

    def copy(self) -> None:
        """Copy the arrays into the aligned memory, with the threads of a save."""
        pieces = zip(self.arrays.values(), range(0, len(self._target), ARRAY_BYTES), strict=True)

        def copy(piece: tuple[NDArray[np.uint8], int]) -> None:
            array, at = piece
            np.copyto(self._target[at : at + array.nbytes], array)

        side_by_side(pieces, copy, min(COPY_THREADS, usable_cores()))

    def is_arrays(self, loaded: dict[str, NDArray[np.uint8]]) -> bool:
        """Whether these are the arrays."""
        return loaded.keys() == self.arrays.keys() and all(
            np.array_equal(array, loaded[name]) for name, array in self.arrays.items()
        )


def claim_memory(size: int) -> None:
    """Use twice as much memory as a read needs, and free it.

    A virtual machine may have given memory back to its host; the first read would wait for it.
    """
    np.empty(2 * size, np.uint8).fill(1)


def fill_random(words: NDArray[np.uint32], salt: int = 0) -> None:
    """Random numbers that differ from block to block, without drawing each of them."""
    block = np.random.default_rng(_SEED).integers(0, 2**32, ARRAY_BYTES // 4, np.uint32)
    for at in range(0, len(words), len(block)):
        part = words[at : at + len(block)]
        np.add(block[: len(part)], np.uint32((salt + at) * 2654435761 % 2**32), out=part)
