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
from .report import Section, Series, Tell, in_round, results

MOST_ROUNDS = 5
STORED_COPIES = 5
"""The raw file, and of bytes and arrays a checkpoint with the one before it."""


def bench_checkpoints(
    place: str, size: int, rounds: int | None, seconds: float, tell: Tell
) -> Section:
    """Measure ``rounds`` rounds, or else as many as begin within ``seconds``.

    Everything that it writes lies in a folder or prefix of its own, and is removed in the end.
    """
    size -= size % ALIGNMENT
    with new_place(place, STORED_COPIES * size) as raw:
        tell("making a state")
        race = _CheckpointRounds(raw, State(size))
        with _manager(f"{raw.url}/bytes") as plain, _manager(f"{raw.url}/arrays") as arrays:
            race.first_save(arrays, tell)
            began = time.monotonic()
            while not race.has_enough(rounds, began + seconds):
                race.round(plain, arrays, tell)
        return Section(
            name="checkpoints",
            place=place,
            facts={
                "size_bytes": size,
                "rounds": race.rounds,
                "raw_write": raw.raw_write,
                "raw_read": raw.raw_read,
            },
            measures=results(race.records),
            notes=[
                "a save of bytes copies nothing: its stall is the time to hand them over",
                "the first save of arrays allocates the memory that the later ones copy to",
            ],
        )


class _CheckpointRounds:
    """Everything once in each round, so that all meet the same machine."""

    def __init__(self, raw: RawPlace, state: State) -> None:
        self._raw = raw
        self._state = state
        self._size = len(state.data)
        self.rounds = 0
        self._copy = Series("copy in memory", "bytes", bytes_each=1)
        self._write = Series("write raw", "bytes", bytes_each=1)
        self._read = Series("read raw", "bytes", bytes_each=1)
        self._bytes_stall = Series("save bytes: stall", "bytes", bytes_each=1)
        self._bytes_durable = self._beside(self._write, "save bytes: durable")
        self._first_stall = Series("save arrays: first stall", "bytes", bytes_each=1)
        self._arrays_stall = self._beside(self._copy, "save arrays: stall")
        self._arrays_durable = self._beside(self._write, "save arrays: durable")
        self._load_bytes = self._beside(self._read, "load bytes")
        self._load_arrays = self._beside(self._read, "load arrays")

    @property
    def records(self) -> list[Series]:
        """Limits, each followed by what is compared with it."""
        return [
            self._copy,
            self._first_stall,
            self._arrays_stall,
            self._bytes_stall,
            self._write,
            self._arrays_durable,
            self._bytes_durable,
            self._read,
            self._load_arrays,
            self._load_bytes,
        ]

    def has_enough(self, rounds: int | None, deadline: float) -> bool:
        """Whether no more rounds are to be measured."""
        if rounds is not None:
            return self.rounds >= rounds
        late = time.monotonic() > deadline
        return self.rounds >= MOST_ROUNDS or (late and self.rounds > 0)

    def first_save(self, arrays: CheckpointManager, tell: Tell) -> None:
        """Let memory be allocated; later saves use it again."""
        tell("first save of arrays")
        handle = arrays.save(self._state.arrays, 0)
        handle.wait()
        arrays.wait()
        self._first_stall.add(handle.stall_seconds, self._size)

    def round(self, plain: CheckpointManager, arrays: CheckpointManager, tell: Tell) -> None:
        """Measure everything once."""
        self.rounds += 1
        say = in_round(tell, self.rounds)
        say("copying in memory")
        self._time(self._copy, self._state.copy)
        say("writing raw")
        self._time(self._write, lambda: self._raw.write(self._state.memory))
        say("saving bytes")
        self._save(plain, self._state.data, self._bytes_stall, self._bytes_durable)
        say("saving arrays")
        self._save(arrays, self._state.arrays, self._arrays_stall, self._arrays_durable)
        say("reading")
        self._reads(plain, arrays)
        self._raw.delete()

    def _reads(self, plain: CheckpointManager, arrays: CheckpointManager) -> None:
        claim_memory(self._size)
        reads: list[tuple[Series, Callable[[], Any], Callable[[Any], bool]]] = [
            (self._read, lambda: self._raw.read(self._size), self._state.holds_memory),
            (self._load_bytes, plain.load_bytes, self._state.holds_bytes),
            (self._load_arrays, arrays.load_state, self._state.holds_arrays),
        ]
        first = self.rounds % len(reads)  # no one always comes first
        for record, load, holds in reads[first:] + reads[:first]:
            self._load(record, load, holds)

    def _beside(self, limit: Series, name: str) -> Series:
        return Series(name, "bytes", limit.name, bytes_each=1)

    def _time(self, record: Series, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = work()
        record.add(time.perf_counter() - began, self._size)
        return found

    def _save(self, manager: CheckpointManager, state: Any, stall: Series, durable: Series) -> None:
        began = time.perf_counter()
        handle = manager.save(state, self.rounds)
        stalled = time.perf_counter() - began
        handle.wait()
        durable.add(time.perf_counter() - began, self._size)
        # Bytes are not copied, and a rate of copying would mean nothing.
        stall.add(stalled, 0 if isinstance(state, bytes) else self._size)
        manager.wait()  # until the checkpoint before it is removed

    def _load(self, record: Series, load: Callable[[], Any], holds: Callable[[Any], bool]) -> None:
        self._raw.forget()
        found = self._time(record, load)
        if self.rounds == 1 and not holds(found):
            raise StorageError(f"other data came back than were saved ({record.name})")


@contextlib.contextmanager
def _manager(url: str) -> Iterator[CheckpointManager]:
    """Keeps one checkpoint; at the end it waits for what is under way, which then is removed."""
    manager = CheckpointManager(url, keep_count=1, compression="none")
    try:
        yield manager
    except BaseException:
        with contextlib.suppress(StorageError):  # the first error tells what happened
            manager.close()
        raise
    manager.close()


ARRAY_BYTES = 16 * 2**20
COPIES = 6
"""The bytes, the arrays, where they are copied to here and in a save, and `claim_memory`'s."""
COPY_THREADS = 8
_SEED = 7


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
        _fill(self._target)
        self.data = self._target.tobytes()
        parts = range(0, size, ARRAY_BYTES)
        self.arrays = {f"layer-{at}": self._target[at : at + ARRAY_BYTES].copy() for at in parts}

    @property
    def memory(self) -> memoryview:
        """The bytes in memory that is aligned."""
        return memoryview(self._memory)

    def copy(self) -> None:
        """Copy the arrays to where they were copied before, with the threads of a save."""
        pieces = zip(self.arrays.values(), range(0, len(self._target), ARRAY_BYTES), strict=True)

        def copy(piece: tuple[NDArray[np.uint8], int]) -> None:
            array, at = piece
            np.copyto(self._target[at : at + array.nbytes], array)

        side_by_side(pieces, copy, min(COPY_THREADS, usable_cores()))

    def holds_memory(self, found: NDArray[np.uint8]) -> bool:
        """Whether these are the bytes in memory."""
        return np.array_equal(found, self._target)

    def holds_bytes(self, found: bytes) -> bool:
        """Whether these are the bytes."""
        return found == self.data

    def holds_arrays(self, found: dict[str, NDArray[np.uint8]]) -> bool:
        """Whether these are the arrays."""
        return found.keys() == self.arrays.keys() and all(
            np.array_equal(array, found[name]) for name, array in self.arrays.items()
        )


def claim_memory(size: int) -> None:
    """Use twice as much memory as a read needs, and free it.

    A virtual machine may have given memory back to its host; whoever reads first would wait until
    it is here again.
    """
    np.empty(2 * size, np.uint8).fill(1)


def _fill(target: NDArray[np.uint8]) -> None:
    """Random bytes that differ from block to block, without a random one for each."""
    words = target.view(np.uint32)
    random = np.random.default_rng(_SEED).integers(0, 2**32, ARRAY_BYTES // 4, np.uint32)
    for at in range(0, len(words), len(random)):
        part = words[at : at + len(random)]
        np.add(random[: len(part)], np.uint32(at * 2654435761 % 2**32), out=part)
