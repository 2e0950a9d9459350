"""Where a run's batches come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..crew import Crew


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

    def explain(self, error: BaseException) -> str:
        """What an error in the work on a batch may come from; empty if nothing is known."""
        return ""

    def close(self) -> None:  # noqa: B027 - some have nothing to close
        """Stop reading ahead."""


class StepNumbers(Stream):
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
