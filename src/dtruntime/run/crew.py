"""The ranks that train together, and how they come together again."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec

from .._sync_bridge import io
from ..client import TrainingOrchestrator
from ..client.membership import ANYBODY
from ..errors import ConnectionError, StrataError, SyncError
from ..telemetry import EventLog
from .preemption import PreemptionNotices
from .recovery import Failures, Recovery

log = EventLog("run")

POLL_SECONDS = 0.1
POLL_PER_WORKER = 0.001
POLL_MOST = 1.0
"""Of many workers each asks less often how many there are."""
ROUND_MS = 30_000
RENDEZVOUS = "run:assemble"
FIRST_WORD_SECONDS = 2.0
"""After so long a worker that waits for others says so."""
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks of one formation, in order."""

    ranks: tuple[int, ...]
    rank: int
    """This worker's."""
    generation: int
    """The membership that it was formed of."""

    @property
    def index(self) -> int:
        """This worker's place among the ranks."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    @property
    def leads(self) -> bool:
        """Whether this worker does what one has to do for all."""
        return self.index == 0


def lost_ranks(worker: TrainingOrchestrator, crew: Crew) -> frozenset[int]:
    """The ranks of a crew whose holders were lost or left since it was formed.

    Members that are not in the crew, because they wait to be let in, do not matter to it.
    """
    lost = worker.losses_since(crew.generation)
    return lost and lost & {*crew.ranks, ANYBODY}


def has_lost(worker: TrainingOrchestrator, crew: Crew) -> bool:
    """Whether one of a crew is gone, or this worker itself is not a member any more."""
    return not worker.is_registered or bool(lost_ranks(worker, crew))


class CrewMembership(ABC):
    """Where the crew comes from."""

    @abstractmethod
    def assemble(self) -> Crew:
        """Come together with all others that are there."""

    def begin(self, crew: Crew) -> None:  # noqa: B027 - a run of one process has nothing to note
        """A crew begins to train."""

    @abstractmethod
    def share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        """Give the others a value, and get theirs by rank; ``SyncError`` when one is lost."""

    @abstractmethod
    def wait_with(self, crew: Crew, work: Future[None], seconds: float) -> None:
        """Wait for what needs all of a crew; ``SyncError`` as soon as one is lost.

        Raises what the work raises, and ``TimeoutError`` when it is not done after ``seconds``.
        """

    @abstractmethod
    def has_lost(self, crew: Crew) -> bool:
        """Whether one of a crew is gone."""


class Alone(CrewMembership):
    """A run of one process, without a coordinator."""

    def assemble(self) -> Crew:
        """Just this one."""
        return Crew((0,), 0, 0)

    def share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        """Its own value."""
        return {0: value}

    def wait_with(self, crew: Crew, work: Future[None], seconds: float) -> None:
        """Nobody can be lost."""
        work.result(seconds)

    def has_lost(self, crew: Crew) -> bool:
        """Never."""
        return False


class Together(CrewMembership):
    """The members of a job, as the coordinator knows them."""

    def __init__(
        self,
        orchestrator: TrainingOrchestrator,
        recovery: Recovery,
        failures: Failures,
        notices: PreemptionNotices,
    ) -> None:
        self._orchestrator = orchestrator
        self._notices = notices
        self._recovery = recovery
        self._failures = failures
        world_size = orchestrator.config.world_size or 0
        self._roll_call = Rendezvous(world_size, recovery, time.monotonic())
        self._crew: Crew | None = None
        """Those who trained last."""

    def assemble(self) -> Crew:
        """Register if need be, and call the roll until it gives a crew."""
        waiting = WaitReporter(self._recovery.assemble_seconds)
        while True:
            self._notices.wait(io.submit(self._orchestrator.rejoin_async()))
            try:
                self._hear()
                crew = self._call_the_roll(waiting)
            except SyncError as exc:
                if exc.reason == "timeout":
                    waiting.say(_absent(exc), exc)
                else:
                    log.info("run.assembling", reason=str(exc))
                continue
            if crew is not None:
                return crew

    def begin(self, crew: Crew) -> None:
        """A crew begins to train: from now on the loss of one of its ranks is a failure."""
        self._crew = crew
        self._roll_call.begin(crew.size)

    def share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        """Give the others of the crew a value, and get theirs by rank."""
        waiting = WaitReporter(self._recovery.assemble_seconds)
        while True:
            try:
                return self._share(name, value, crew)
            except SyncError as exc:
                # One that restores much may take long: it is waited for as long as it lives.
                if exc.reason != "timeout":
                    raise
                waiting.say(_absent(exc), exc)

    def wait_with(self, crew: Crew, work: Future[None], seconds: float) -> None:
        """Wait for what needs all of the crew, and ask meanwhile whether they are there."""
        until = time.monotonic() + seconds
        while not wait([work], _pause(crew.size)).done:
            self._confirm(crew)
            if time.monotonic() > until:
                raise TimeoutError(f"not done within {seconds:g} s")
        work.result()

    def has_lost(self, crew: Crew) -> bool:
        """Whether one of a crew was lost or left, or this worker is not a member any more."""
        return has_lost(self._orchestrator, crew)

    def _hear(self) -> None:
        """Know of the losses up to now."""
        self._look()
        crew, worker = self._crew, self._orchestrator
        lost = worker.losses_since(0) if crew is None else lost_ranks(worker, crew)
        self._roll_call.hear(lost, time.monotonic())

    def _look(self) -> None:
        """Hear what the coordinator knows, as far as it can be reached."""
        with contextlib.suppress(ConnectionError):
            self._notices.wait(io.submit(self._orchestrator.heartbeat()))

    def _confirm(self, crew: Crew) -> None:
        """``SyncError`` when one of a crew is gone."""
        self._notices.check()
        self._look()
        if self.has_lost(crew):
            raise SyncError(
                "a worker was lost, or left, before all had come together",
                reason="membership_changed",
                generation=self._orchestrator.generation,
            )

    def _call_the_roll(self, waiting: WaitReporter) -> Crew | None:
        worker, roll = self._orchestrator, self._roll_call
        brought = roll.bring(time.monotonic(), self._failures.ages())
        timeout_ms = round(1000 * waiting.seconds_to_next())
        met = self._notices.wait(
            io.submit(worker.meet_async(RENDEZVOUS, brought, timeout_ms=timeout_ms))
        )
        concluded = roll.conclude(Called(met.values, met.generation, met.left_out))
        if isinstance(concluded, Waits):
            self._wait(concluded, waiting)
        if not isinstance(concluded, Formed):
            return None
        ranks = concluded.ranks
        if len(ranks) < concluded.wanted:
            log.warning("run.goes_on_smaller", workers=len(ranks), before=concluded.wanted)
        self._failures.adopt(concluded.failures)
        return Crew(ranks, worker.rank, concluded.generation)

    def _wait(self, wanted: Waits, waiting: WaitReporter) -> None:
        """Wait until so many workers are there, time is up, or somebody else is lost."""
        worker, lost = self._orchestrator, self._orchestrator.lost_generation
        until = math.inf if wanted.seconds is None else time.monotonic() + wanted.seconds
        while time.monotonic() < until and worker.lost_generation == lost:
            live = self._notices.wait(io.submit(worker.live_workers_async()))
            if live >= wanted.workers:
                return
            absent = f"{wanted.workers - live} of {wanted.workers} workers"
            waiting.say(absent, None, at_most=wanted.seconds)
            self._notices.pause(_pause(live))

    def _share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        call = self._orchestrator.exchange_async(
            f"run:{crew.generation}:{name}", value, timeout_ms=ROUND_MS, ranks=crew.ranks
        )
        told = io.submit(call)
        try:
            # A loss ends this call, but not where the lost one was last heard before this worker
            # registered: it may have been at the roll call all the same, and died after it.
            while not wait([told], POLL_MOST).done:
                self._confirm(crew)
            return told.result()
        except BaseException:
            told.cancel()
            raise


class WaitReporter:
    """Says who is waited for: soon after the wait began, then at growing intervals."""

    def __init__(self, most_seconds: float) -> None:
        """The wait fails after ``most_seconds``."""
        self._most = most_seconds
        self._began = time.monotonic()
        self._next = FIRST_WORD_SECONDS

    def seconds_to_next(self) -> float:
        """How long to wait until there is something to say."""
        return min(ROUND_MS / 1000, max(POLL_SECONDS, self._next - self._waited))

    def say(self, absent: str, why: SyncError | None, at_most: float | None = None) -> None:
        """Name those who are absent, if it is time to; raises when it has taken too long."""
        waited = self._waited
        if waited > self._most:
            raise SyncError(
                f"{absent} did not come within {self._most:g} s: start what is missing, look why "
                "it hangs ('strata status'), or give Recovery a larger assemble_seconds",
                reason="timeout",
                missing=None if why is None else why.missing,
                missing_count=None if why is None else why.missing_count,
            )
        if waited >= self._next:
            self._next = max(2 * self._next, waited)
            bound = {} if at_most is None else {"at_most_seconds": round(at_most)}
            log.warning(
                "run.waits_for_workers", missing=absent, since_seconds=round(waited), **bound
            )

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._began


def _pause(workers: int) -> float:
    """How long each of so many waits before it asks again."""
    return min(POLL_MOST, POLL_SECONDS + workers * POLL_PER_WORKER)


def _absent(error: SyncError) -> str:
    """Who has not come, by name."""
    names = list(error.missing)[:NAMES_SHOWN]
    more = error.missing_count - len(names)
    return f"{', '.join(names)}{f' and {more} more' if more > 0 else ''}"


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
