"""Saves and loads, beside the memory and the disk or store under them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..checkpoint.manager import CheckpointManager
from ..errors import StorageError
from ..storage.local_disk.direct_io import ALIGNMENT
from .measures import Section, Series, Tell, in_round, results
from .places import RawPlace, new_place
from .states import State, claim_memory

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
        race = _Race(raw, State(size))
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


class _Race:
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
