"""Who trains together: what follows from a roll call of all members of a job.

Every worker that wants to train comes to the roll call, a barrier at which each hands round what it
knows. All who were there draw the same conclusion from the same values: they are a crew, or they
wait for more, or they call the roll again because a member was not there. This is pure: it knows
neither a coordinator nor a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from ..errors import StrataError
from .recovery import Recovery


class Attendance(msgspec.Struct, frozen=True, array_like=True):
    """What a worker brings to a roll call."""

    formed: bool
    """Whether it has been in a crew before. Others leave it to those who have how long to wait."""
    wanted: int
    """How many workers the run had, or is to have."""
    least: int
    """With fewer it would not train."""
    seconds: float
    """How much longer it would wait for replacements of those who were lost."""
    failures: tuple[int, ...] = ()
    """How many seconds ago the crews that it knows of had to recover."""


@dataclass(frozen=True, slots=True)
class Called:
    """A roll call that has ended, in the same words for all who were there."""

    values: Mapping[int, bytes]
    """What each brought, by rank."""
    generation: int
    """The membership at that moment."""
    left_out: int
    """How many live members were not there."""


@dataclass(frozen=True, slots=True)
class Formed:
    """These train together."""

    ranks: tuple[int, ...]
    generation: int
    wanted: int
    """More than there are: the crew goes on smaller."""
    failures: tuple[int, ...] = ()
    """How many seconds ago it had to recover, as far as anybody knows."""


@dataclass(frozen=True, slots=True)
class Waits:
    """There are too few: wait until there are more, then call the roll again."""

    workers: int
    """How many would do."""
    seconds: float | None
    """For how long at most; None: however long it takes."""


@dataclass(frozen=True, slots=True)
class CallsAgain:
    """A live member was not there, and is expected at the next roll call."""


class Rendezvous:
    """One worker's part in forming crews, over the whole run."""

    def __init__(self, world_size: int, recovery: Recovery, now: float) -> None:
        """``world_size`` is 0 in an elastic job."""
        self._world_size = world_size
        self._recovery = recovery
        self._wanted = world_size or recovery.min_workers
        self._formed = False
        self._lost: frozenset[int] = frozenset()
        self._until = now + recovery.wait_seconds

    @property
    def wanted(self) -> int:
        """How many workers the run had, or is to have."""
        return self._wanted

    def hear(self, lost: Set[int], now: float) -> None:
        """Learn which ranks of the crew were lost: the replacement of each is waited for once."""
        if not lost <= self._lost:
            self._until = now + self._recovery.wait_seconds
        self._lost = frozenset(lost)

    def bring(self, now: float, failures: Sequence[int] = ()) -> bytes:
        """What this worker hands round."""
        seconds = round(max(0.0, self._until - now), 3)
        return msgspec.json.encode(
            Attendance(
                self._formed, self._wanted, self._recovery.min_workers, seconds, tuple(failures)
            )
        )

    def conclude(self, called: Called) -> Formed | Waits | CallsAgain:
        """What all who were there do next."""
        if called.left_out:
            return CallsAgain()
        there = [_attendance(rank, value) for rank, value in called.values.items()]
        wanted, least = max(one.wanted for one in there), max(one.least for one in there)
        deciding = [one for one in there if one.formed] or there
        seconds = max(one.seconds for one in deciding)
        if len(there) < wanted and seconds > 0:
            return Waits(wanted, seconds)
        if len(there) < least:
            return Waits(least, None)
        failures = max((one.failures for one in there), key=len)
        return Formed(tuple(sorted(called.values)), called.generation, wanted, failures)

    def begin(self, workers: int) -> None:
        """A crew of so many begins to train; one that was only formed has not."""
        self._formed = True
        self._wanted = max(workers, self._world_size)
        self._lost = frozenset()
        self._until = 0.0


def _attendance(rank: int, value: bytes) -> Attendance:
    try:
        return msgspec.json.decode(value, type=Attendance)
    except msgspec.DecodeError:
        raise StrataError(
            f"rank {rank} came to the roll call with something else than a run brings: all workers "
            "of a run have to be of the same version of Strata"
        ) from None
