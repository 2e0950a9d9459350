"""Where a run's batches come from; datasets are in `datasets`, since they need pyarrow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from .crew import Crew


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What to read, and how."""

    data: Any
    format: str | None
    dataset: str
    loader: Mapping[str, Any]


class Stream(ABC):
    """Batches from a position on, which is saved with everything else."""

    epoch: int

    @abstractmethod
    def open(self, crew: Crew) -> None:
        """Make ready to read as a member of a crew, from the start."""

    @abstractmethod
    def batches(self) -> Iterator[tuple[Any, int]]:
        """Batches up to the end of the epoch, each with how many samples it has."""

    def steps_in(self, epochs: int, step: int) -> int | None:
        """How many steps so many epochs have, of which this is ``step``; None if nobody knows."""
        return None

    @abstractmethod
    def used(self) -> None:
        """The batch that was given last has been used: the position is behind it now."""

    @abstractmethod
    def state(self) -> Any:
        """The position behind the last batch that was used."""

    @abstractmethod
    def restore(self, states: Sequence[Any], index: int) -> None:
        """Go on from what the ranks saved; this rank is the ``index``-th now.

        Of many ranks only the first one's state and this one's are there, and ``None`` for others.
        """

    def close(self) -> None:  # noqa: B027 - some have nothing to close
        """Stop reading ahead."""


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
            yield batch, _length(batch)
        self.epoch += 1
        self._read = 0

    def used(self) -> None:
        """Count the batch."""
        self._read += 1

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
            yield number, 1

    def used(self) -> None:
        """Go to the next."""
        self._next += 1

    def state(self) -> Any:
        """The next number."""
        return {"next": self._next}

    def restore(self, states: Sequence[Any], index: int) -> None:
        """Go on with it."""
        self._next = states[0]["next"]


def _length(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return _length(next(iter(batch.values()), ()))
    if isinstance(batch, tuple | list) and batch and hasattr(batch[0], "__len__"):
        return _length(batch[0])
    return len(batch) if hasattr(batch, "__len__") else 1
