"""Where a run's batches come from: a dataset, a loader of the user's own, or just numbers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from ..data.loading import Loader
from ..data.loading.state import merge_states
from .crew import Crew


class Stream(ABC):
    """Batches from a position on, which is saved with everything else."""

    epoch: int

    @abstractmethod
    def open(self, crew: Crew) -> None:
        """Make ready to read as a member of a crew, from the start."""

    @abstractmethod
    def batches(self) -> Iterator[tuple[Any, int]]:
        """Batches up to the end of the epoch, each with how many samples it has."""

    @abstractmethod
    def state(self) -> Any:
        """The position behind the last batch."""

    @abstractmethod
    def restore(self, states: Sequence[Any], index: int) -> None:
        """Go on from what the ranks saved; this rank is the ``index``-th now.

        Of many ranks only the first one's state and this one's are there, and ``None`` for others.
        """

    def close(self) -> None:  # noqa: B027 - some have nothing to close
        """Stop reading ahead."""


class DatasetStream(Stream):
    """A dataset read by `Loader`."""

    def __init__(self, make: Callable[[Crew], Loader]) -> None:
        self._make = make
        self._loader: Loader | None = None

    @property
    def loader(self) -> Loader:
        """The loader of the present crew."""
        assert self._loader is not None, "the stream is not open"
        return self._loader

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch that is read."""
        return self.loader.epoch

    def open(self, crew: Crew) -> None:
        """Make a loader for the crew."""
        self.close()
        self._loader = self._make(crew)

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Batches up to the end of the epoch; all ranks have the same number of them."""
        loader = self.loader
        last: Any = None
        for step in loader.deliveries():
            loader.accept(step)
            if step.batch is None and last is None:
                continue
            batch = _none_of(last) if step.batch is None else step.batch
            last = batch
            yield batch, len(step.numbers)
        loader.end_epoch()

    def state(self) -> Any:
        """The loader's state."""
        return json.dumps(self.loader.state_dict())

    def restore(self, states: Sequence[Any], index: int) -> None:
        """Join the states, so that coverage is proved across the interruption."""
        positions = [json.loads(state) for state in states if state is not None]
        complete = len(positions) == positions[0]["world"]
        self.loader.load_state_dict(merge_states(positions) if complete else positions[0])

    def close(self) -> None:
        """Stop reading ahead."""
        if self._loader is not None:
            self._loader.close()


class OwnStream(Stream):
    """Whatever the user iterates; with a position if it has ``state_dict`` and so on."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.epoch = 0
        self._read = 0
        self._skip = 0

    def open(self, crew: Crew) -> None:
        """From the start."""
        self.epoch = self._read = self._skip = 0

    def batches(self) -> Iterator[tuple[Any, int]]:
        """One pass; without a position of its own it is read again up to where it was."""
        skip, self._skip = self._skip, 0
        if not skip:
            self._read = 0
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(self.epoch)
        for number, batch in enumerate(self._batches):
            if number < skip:
                continue
            self._read += 1
            yield batch, _length(batch)
        self.epoch += 1
        self._read = 0

    def state(self) -> Any:
        """The position, and the loader's own state where it has one."""
        inner = self._batches.state_dict() if self._has_state else None
        return {"epoch": self.epoch, "read": self._read, "inner": inner}

    def restore(self, states: Sequence[Any], index: int) -> None:
        """Go on from this rank's state, or from the first one's."""
        state = states[index if index < len(states) else 0]
        self.epoch, self._read = state["epoch"], state["read"]
        if self._has_state and state["inner"] is not None:
            self._batches.load_state_dict(state["inner"])
            self._skip = 0
        else:
            self._skip = self._read

    @property
    def _has_state(self) -> bool:
        return hasattr(self._batches, "state_dict") and hasattr(self._batches, "load_state_dict")


class Numbers(Stream):
    """No data: the numbers of the steps, without an end."""

    def __init__(self) -> None:
        self.epoch = 0
        self._next = 0

    def open(self, crew: Crew) -> None:
        """From the start."""
        self._next = 0

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Steps from where it is."""
        for number in count(self._next):
            self._next = number + 1
            yield number, 1

    def state(self) -> Any:
        """The next number."""
        return {"next": self._next}

    def restore(self, states: Sequence[Any], index: int) -> None:
        """Go on with it."""
        self._next = states[0]["next"]


def _none_of(batch: Any) -> Any:
    """A batch of the same form without samples."""
    if isinstance(batch, Mapping):
        return {name: _none_of(column) for name, column in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_none_of(part) for part in batch)
    return batch[:0]


def _length(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return _length(next(iter(batch.values()), ()))
    if isinstance(batch, tuple | list) and batch and hasattr(batch[0], "__len__"):
        return _length(batch[0])
    return len(batch) if hasattr(batch, "__len__") else 1
