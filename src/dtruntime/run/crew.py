"""The crew: the ranks that train together, and how workers come to be one.

Every worker that wants to train comes to a *roll call*, a barrier at which each hands round what it
knows. All who were there draw the same conclusion from the same values: they form a crew, or wait
for more workers, or call the roll again because a live member was not there. `Rendezvous` draws it,
and knows neither a coordinator nor a clock; `Together` makes the calls.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec

from .._sync_bridge import io
from ..client import TrainingOrchestrator
from ..client.membership import ANYBODY
from ..client.orchestrator import Meeting
from ..errors import ConnectionError, StrataError, SyncError
from ..telemetry import EventLog
from .preemption import PreemptionNotices
from .recovery import Failures, Recovery

log = EventLog("run")

POLL_SECONDS = 0.1
POLL_PER_WORKER = 0.001
POLL_MOST = 1.0
"""The more workers there are, the less often each asks how many there are."""
ROUND_MS = 30_000
RENDEZVOUS = "run:assemble"
FIRST_WARNING_SECONDS = 2.0
"""When a wait for other workers is first logged."""
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks of one formation, in order."""

    ranks: tuple[int, ...]
    rank: int
    """This worker's rank."""
    generation: int
    """The generation of the membership that formed it."""

    @property
    def index(self) -> int:
        """This worker's position among the ranks."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
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
    """Whether one of a crew is gone, or this worker itself is no longer a member."""
    return not worker.is_registered or bool(lost_ranks(worker, crew))


class Attendance(msgspec.Struct, frozen=True, array_like=True):
    """What a worker hands round at a roll call."""

    formed: bool
    """Whether it has been in a crew; those who have decide how long to wait."""
    wanted: int
    """How many workers the run had, or is to have."""
    least: int
    """The fewest workers that it trains with."""
    seconds: float
    """How much longer it would wait for replacements of those who were lost."""
    failures: tuple[int, ...] = ()
    """How many seconds ago the crews that it knows of had to recover."""


@dataclass(frozen=True, slots=True)
class Formed:
    """Conclusion of a roll call: these ranks train together."""

    ranks: tuple[int, ...]
    generation: int
    wanted: int
    """If there are fewer ranks, the crew goes on smaller."""
    failures: tuple[int, ...] = ()
    """The longest list of failures that somebody knows of."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Conclusion of a roll call: there are too few, wait for more and call the roll again."""

    workers: int
    seconds: float | None
    """The limit of the wait; None: no limit."""


class Rendezvous:
    """One worker's part in forming crews, over the whole run."""

    def __init__(self, world_size: int, recovery: Recovery, now: float) -> None:
        """``world_size`` is 0 in an elastic job."""
        self._world_size = world_size
        self._recovery = recovery
        self.wanted = world_size or recovery.min_workers
        """How many workers the run had, or is to have."""
        self._formed = False
        self._lost: frozenset[int] = frozenset()
        self._until = now + recovery.wait_seconds

    def hear(self, lost: Set[int], now: float) -> None:
        """Note which ranks of the crew were lost; a replacement of each is waited for once."""
        if not lost <= self._lost:
            self._until = now + self._recovery.wait_seconds
        self._lost = frozenset(lost)

    def bring(self, now: float, failures: Sequence[int] = ()) -> bytes:
        """What this worker hands round."""
        seconds, least = round(max(0.0, self._until - now), 3), self._recovery.min_workers
        attendance = Attendance(self._formed, self.wanted, least, seconds, tuple(failures))
        return msgspec.json.encode(attendance)

    def conclude(self, meeting: Meeting) -> Formed | Waits | None:
        """What all who were there do next; None: call the roll again, for a member was missing."""
        if meeting.left_out:
            return None
        present = [_attendance(rank, value) for rank, value in meeting.values.items()]
        wanted, least = max(one.wanted for one in present), max(one.least for one in present)
        deciding = [one for one in present if one.formed] or present
        seconds = max(one.seconds for one in deciding)
        if len(present) < wanted and seconds > 0:
            return Waits(wanted, seconds)
        if len(present) < least:
            return Waits(least, None)
        failures = max((one.failures for one in present), key=len)
        return Formed(tuple(sorted(meeting.values)), meeting.generation, wanted, failures)

    def begin(self, workers: int) -> None:
        """A crew of so many workers begins to train; until then it was only formed."""
        self._formed = True
        self.wanted = max(workers, self._world_size)
        self._lost = frozenset()
        self._until = 0.0


def _attendance(rank: int, value: bytes) -> Attendance:
    try:
        return msgspec.json.decode(value, type=Attendance)
    except msgspec.DecodeError:
        raise StrataError(
            f"rank {rank} brought something else than a run does to the roll call: all workers of "
            "a run need the same version of Strata"
        ) from None


class CrewMembership:
    """Membership in the crew of a run without a coordinator: one process."""

    def assemble(self) -> Crew:
        """Form a crew with everybody who is there."""
        return Crew((0,), 0, 0)

    def begin(self, crew: Crew) -> None:
        """The crew begins to train."""

    def share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        """Exchange values with the crew, by rank; ``SyncError`` if one is lost."""
        return {0: value}

    def wait_with(self, crew: Crew, work: Future[None], seconds: float) -> None:
        """Wait for work that needs all of a crew; ``SyncError`` as soon as one is lost.

        Raises what the work raises, and ``TimeoutError`` if it is not done after ``seconds``.
        """
        work.result(seconds)

    def has_lost(self, crew: Crew) -> bool:
        """Whether one of a crew is gone."""
        return False


class Together(CrewMembership):
    """Membership in the crew of a job, as the coordinator knows it."""

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
        self._rendezvous = Rendezvous(world_size, recovery, time.monotonic())
        self._crew: Crew | None = None
        """The crew that trained last."""

    def assemble(self) -> Crew:
        """Register if necessary, and call the roll until it gives a crew."""
        reporter = WaitReporter(self._recovery.assemble_seconds)
        while True:
            self._notices.wait(io.submit(self._orchestrator.rejoin_async()))
            try:
                self._hear()
                crew = self._call_the_roll(reporter)
            except SyncError as exc:
                if exc.reason == "timeout":
                    reporter.report(_missing(exc), exc)
                else:
                    log.info("run.assembling", reason=str(exc))
                continue
            if crew is not None:
                return crew

    def begin(self, crew: Crew) -> None:
        """The crew begins to train: from now on losing one of its ranks is a failure."""
        self._crew = crew
        self._rendezvous.begin(crew.size)

    def share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        """Exchange values with the crew; one that restores a lot is awaited as long as it lives."""
        reporter = WaitReporter(self._recovery.assemble_seconds)
        while True:
            try:
                return self._share(name, value, crew)
            except SyncError as exc:
                if exc.reason != "timeout":
                    raise
                reporter.report(_missing(exc), exc)

    def wait_with(self, crew: Crew, work: Future[None], seconds: float) -> None:
        """Wait for work that needs all of the crew, and check meanwhile that they are there."""
        deadline = time.monotonic() + seconds
        while not wait([work], _pause(crew.size)).done:
            self._confirm(crew)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done within {seconds:g} s")
        work.result()

    def has_lost(self, crew: Crew) -> bool:
        """Whether one of a crew is gone, or this worker itself is no longer a member."""
        return has_lost(self._orchestrator, crew)

    def _hear(self) -> None:
        self._beat()
        crew, worker = self._crew, self._orchestrator
        lost = worker.losses_since(0) if crew is None else lost_ranks(worker, crew)
        self._rendezvous.hear(lost, time.monotonic())

    def _beat(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._notices.wait(io.submit(self._orchestrator.heartbeat()))

    def _confirm(self, crew: Crew) -> None:
        """``SyncError`` if one of a crew is gone."""
        self._notices.check()
        self._beat()
        if self.has_lost(crew):
            raise SyncError(
                "a worker was lost, or left, before all had come together",
                reason="membership_changed",
                generation=self._orchestrator.generation,
            )

    def _call_the_roll(self, reporter: WaitReporter) -> Crew | None:
        worker = self._orchestrator
        value = self._rendezvous.bring(time.monotonic(), self._failures.ages())
        timeout_ms = round(1000 * reporter.seconds_to_next())
        call = worker.meet_async(RENDEZVOUS, value, timeout_ms=timeout_ms)
        conclusion = self._rendezvous.conclude(self._notices.wait(io.submit(call)))
        if isinstance(conclusion, Waits):
            self._wait(conclusion, reporter)
        if not isinstance(conclusion, Formed):
            return None
        ranks = conclusion.ranks
        if len(ranks) < conclusion.wanted:
            log.warning("run.goes_on_smaller", workers=len(ranks), before=conclusion.wanted)
        self._failures.adopt(conclusion.failures)
        return Crew(ranks, worker.rank, conclusion.generation)

    def _wait(self, goal: Waits, reporter: WaitReporter) -> None:
        """Wait until enough workers are there, the time is up, or another one is lost."""
        worker, lost = self._orchestrator, self._orchestrator.lost_generation
        until = math.inf if goal.seconds is None else time.monotonic() + goal.seconds
        while time.monotonic() < until and worker.lost_generation == lost:
            live = self._notices.wait(io.submit(worker.live_workers_async()))
            if live >= goal.workers:
                return
            missing = f"{goal.workers - live} of {goal.workers} workers"
            reporter.report(missing, None, at_most=goal.seconds)
            self._notices.pause(_pause(live))

    def _share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        call = self._orchestrator.exchange_async(
            f"run:{crew.generation}:{name}", value, timeout_ms=ROUND_MS, ranks=crew.ranks
        )
        exchange = io.submit(call)
        try:
            # A loss ends this call, unless the lost one was last heard before this worker
            # registered: it may have been at the roll call all the same, and died after it.
            while not wait([exchange], POLL_MOST).done:
                self._confirm(crew)
            return exchange.result()
        except BaseException:
            exchange.cancel()
            raise


class WaitReporter:
    """Logs which workers are missing: soon after the wait began, then at growing intervals."""

    def __init__(self, most_seconds: float) -> None:
        """The wait fails after ``most_seconds``."""
        self._most = most_seconds
        self._began = time.monotonic()
        self._next = FIRST_WARNING_SECONDS

    def seconds_to_next(self) -> float:
        """How long to wait until the next report."""
        waited = time.monotonic() - self._began
        return min(ROUND_MS / 1000, max(POLL_SECONDS, self._next - waited))

    def report(self, missing: str, error: SyncError | None, at_most: float | None = None) -> None:
        """Log who is missing, if it is time to; raises if the wait has taken too long."""
        waited = time.monotonic() - self._began
        if waited > self._most:
            raise SyncError(
                f"{missing} did not come within {self._most:g} s: start what is missing, find out "
                "why it hangs ('strata status'), or give Recovery a larger assemble_seconds",
                reason="timeout",
                missing=None if error is None else error.missing,
                missing_count=None if error is None else error.missing_count,
            )
        if waited >= self._next:
            self._next = max(2 * self._next, waited)
            limit = {} if at_most is None else {"at_most_seconds": round(at_most)}
            log.warning(
                "run.waits_for_workers", missing=missing, since_seconds=round(waited), **limit
            )


def _pause(workers: int) -> float:
    """How long each of so many workers waits before it asks again."""
    return min(POLL_MOST, POLL_SECONDS + workers * POLL_PER_WORKER)


def _missing(error: SyncError) -> str:
    names = list(error.missing)[:NAMES_SHOWN]
    more = error.missing_count - len(names)
    return f"{', '.join(names)}{f' and {more} more' if more > 0 else ''}"
