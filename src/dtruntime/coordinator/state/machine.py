"""The coordinator's state as a pure state machine.

``apply(command, now)`` is the only way to change anything. It returns a reply and the effects
that the caller has to carry out: records to store before any reply leaves, events, and
answers to calls that were held. Time is an argument; there is no I/O and no clock here.
What is promised is written down in ``docs/state-machine.md``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...retention import FINISHED_KEY
from ...types import Membership
from . import commands as c
from .barriers import Barriers
from .checkpoints.commits import Checkpoints
from .commands import Lost, Refused, Reply
from .datasets import AssignmentCache, Datasets, Timer
from .effects import Effect, Journal, Outbox
from .epochs.epoch_coverage import Coverages
from .epochs.epochs import Epochs
from .members import Member
from .operator_requests import Actions
from .records import (
    ActionRecord,
    AskRecord,
    AttemptRecord,
    CheckpointRecord,
    CoverageRecord,
    DatasetRecord,
    EpochRecord,
    Event,
    JobRecord,
    PartRecord,
    PendingRecord,
    ReaderRecord,
    Record,
    RemovedRecord,
    RoundRecord,
    SegmentRecord,
    ShareRecord,
    WorkerRecord,
)
from .roster import MAX_WORKERS, SILENT, Roster
from .stragglers import Stragglers

JOBS_LIMIT = 10_000
JOBS_FORGOTTEN = 256
"""How many idle jobs one scan collects."""
JOBS_LOOKED_AT = 128
"""How many jobs each new job scans ahead of need, so that no call has to scan all of them."""
STALL = 1.0
"""A tick this late, in seconds, means that the coordinator itself stalled."""
STALLS_KEPT = 1024
MEASURE_SECONDS = 1.0
"""How often stragglers are measured."""
WAITS_SLACK = 512
"""How many ended waits may stay on the heap before it is rebuilt."""

Result = tuple[Reply, Sequence[Effect]]


class Job:
    """One job: its members and what they share."""

    def __init__(
        self,
        name: str,
        record: JobRecord | None = None,
        max_workers: int = MAX_WORKERS,
        timer: Timer = lambda: 0.0,
        cache: AssignmentCache | None = None,
    ) -> None:
        self.name = name
        self.heartbeats = 0
        """How many there were since the start."""
        self.roster = Roster(name, record, max_workers)
        self.barriers = Barriers(self.roster)
        self.checkpoints = Checkpoints(self.roster)
        self.datasets = Datasets(self.roster, timer, cache)
        self.epochs = Epochs(self.roster, self.datasets)
        self.coverages = Coverages(self.roster, self.datasets)
        self.actions = Actions(self.roster)
        self.stragglers = Stragglers(self.roster)
        self.waiting = (self.barriers, self.checkpoints.waiting, self.epochs)
        """The parts that hold calls."""

    @property
    def is_forgettable(self) -> bool:
        """Whether it has no live members, datasets or checkpoints."""
        checkpoints = self.checkpoints.history.present
        return not (self.roster.live_count or len(self.datasets) or checkpoints)

    @property
    def has_finished(self) -> bool:
        """Whether it has no live members, and its last ones said that they were done."""
        latest, held = self.checkpoints.latest, self.roster.slots.held()
        if self.roster.live_count:
            return False
        if latest is not None and FINISHED_KEY in latest.metadata:
            return True
        return bool(held) and all(member.has_finished for member in held)

    @property
    def completed_epochs(self) -> int:
        """How many epochs are complete: by coverage, by workers' reports, or by the last save."""
        reported, latest = self.roster.completed_epochs, self.checkpoints.latest
        saved = latest.epoch if latest is not None and self.has_finished else 0
        return max(reported, saved, self.coverages.completed_epochs(self.epochs.ledgers))

    @property
    def heard_at(self) -> float:
        """When any of its members was last heard from."""
        heard = (member.last_seen for member in self.roster.slots.held())
        return max(heard, default=self.roster.created_at)

    @property
    def held_calls(self) -> set[int]:
        """Calls that wait for an answer."""
        return set().union(*(part.held_calls for part in self.waiting))


Handler = Callable[[Any], Reply]
OfMember = Callable[[Job, Any, Member, Outbox], Reply]
OfAnybody = Callable[[Job, Any, Outbox], Reply]

OF_MEMBERS: dict[type[c.Command], OfMember] = {
    c.Arrive: lambda job, x, member, out: job.barriers.arrive(x, member, out),
    c.BeginCheckpoint: lambda job, x, _, out: job.checkpoints.begin(x, out),
    c.AbandonCheckpoints: lambda job, x, _, out: job.checkpoints.abandon(x, out),
    c.NotifyCheckpoint: lambda job, x, member, out: job.checkpoints.notify(x, member, out),
    c.Claim: lambda job, x, member, out: job.epochs.claim(x, member, out),
    c.Commit: lambda job, x, member, out: job.epochs.commit(x, member, out),
    c.ReportCoverage: lambda job, x, member, out: job.coverages.report(x, member, out),
}
"""Commands that only live members send, and their handlers."""
OF_ANYBODY: dict[type[c.Command], tuple[str, OfAnybody]] = {
    c.ReportCheckpoints: (
        "reported_by",
        lambda job, x, out: job.checkpoints.history.report(x, out),
    ),
    c.RequestAction: ("requested_by", lambda job, x, out: job.actions.request(x, out)),
    c.CompleteAction: ("completed_by", lambda job, x, out: job.actions.complete(x, out)),
}
"""Commands that outsiders may send too: the field that names the member, and the handler."""


class Machine:
    """All jobs of one coordinator."""

    def __init__(
        self,
        heartbeat_timeout: float,
        events: Iterable[Event] = (),
        max_workers: int = MAX_WORKERS,
        timer: Timer = lambda: 0.0,
    ) -> None:
        self.heartbeat_timeout = heartbeat_timeout
        self._max_workers = max_workers
        self._timer = timer
        self._cache = AssignmentCache()
        self._forgettable: list[Job] = []
        """Idle jobs, the longest idle last."""
        self._idle: list[tuple[float, Job]] = []
        self._unseen: list[str] = []
        """The next scan: what it has found, and the names it has yet to look at."""
        self.jobs: dict[str, Job] = {}
        self.removed: RemovedRecord | None = None
        """The numbers that new jobs count on from; None: no job was ever removed."""
        self.journal = Journal(events)
        self._out = Outbox(self.journal)
        self._watch: list[tuple[float, int, Member, Job]] = []
        self._watched = 0
        self._waits: list[tuple[float, int, str]] = []
        self._waits_limit = WAITS_SLACK
        self._last_tick: float | None = None
        self._measured_at = 0.0
        self.stall = min(STALL, heartbeat_timeout / 4)
        """A tick later than this means that nobody could be heard or answered."""
        self._stalls: deque[tuple[float, float]] = deque(maxlen=STALLS_KEPT)
        """When each stall ended, and how long nobody could be heard."""
        self._handlers: dict[type[Any], Handler] = {
            c.Heartbeat: self._heartbeat,
            c.Hangup: self._hang_up,
            c.ReportLostState: self._report_lost_state,
            c.Register: self._register,
            c.Deregister: self._deregister,
            c.ReportEnded: self._report_ended,
            c.RegisterDataset: self._register_dataset,
            c.RemoveJob: self._remove_job,
            c.RemoveDataset: self._remove_dataset,
            c.Rebalance: lambda x: self.job(x.job).epochs.rebalance(x, self._out),
            c.Tick: self._tick,
            **{kind: self._of_member(carry_out) for kind, carry_out in OF_MEMBERS.items()},
            **{kind: self._of_anybody(*entry) for kind, entry in OF_ANYBODY.items()},
        }

    def apply(self, command: c.Command, now: float) -> Result:
        """Apply a command. Raises `Refused` with nothing changed."""
        out = self._out
        out.now = now
        try:
            reply = self._handlers[type(command)](command)
        except BaseException:
            out.effects = []
            raise
        effects = out.effects
        if not effects:
            return reply, ()
        out.effects = []
        return reply, effects

    # Queries

    def job(self, name: str) -> Job:
        """A job that exists, or a refusal."""
        job = self.jobs.get(name)
        if job is None:
            names = ", ".join(sorted(self.jobs)[:8]) or "none"
            names += f" and {len(self.jobs) - 8} more" if len(self.jobs) > 8 else ""
            raise Refused("unknown_job", f"job {name!r} does not exist (known: {names})")
        return job

    def member(self, job: str, worker_id: str, incarnation: int) -> tuple[Job, Member]:
        """The live member that a call names, or a refusal."""
        known = self.jobs.get(job)
        if known is None:
            raise Refused(
                "unknown_worker",
                f"worker {worker_id!r} of job {job!r} is unknown: the coordinator has no such "
                "job (another coordinator, or a new data directory?); call register() again",
            )
        return known, known.roster.find(worker_id, incarnation)

    # Restoring

    def restore(self, records: Iterable[tuple[str, str, str, Record]], now: float) -> list[str]:
        """Restore stored (kind, job, key, record) rows; returns what had to be left out.

        Every live member has a whole heartbeat timeout to report again.
        """
        self._out.now = now
        by_job: dict[str, list[Record]] = {}
        orphans: list[str] = []
        rows = list(records)
        for _, name, _, record in rows:
            if isinstance(record, RemovedRecord):
                self.removed = record
            elif isinstance(record, JobRecord):
                self.jobs[name] = Job(name, record, self._max_workers, self._timer, self._cache)
                by_job[name] = []
        for kind, name, key, record in rows:
            if name in by_job:
                by_job[name].append(record)
            elif not isinstance(record, RemovedRecord):
                orphans.append(f"{kind} {name}/{key}")
        for name, owned in by_job.items():
            left_out = self._restore_job(self.jobs[name], owned, now)
            orphans += [f"{what} of job {name}" for what in left_out]
        return orphans

    def _restore_job(self, job: Job, records: list[Record], now: float) -> list[str]:
        def of(kind: type[Any]) -> list[Any]:
            return [record for record in records if isinstance(record, kind)]

        for worker in sorted(of(WorkerRecord), key=lambda r: r.rank):
            member = job.roster.restore(worker, now)
            if member.live:
                self._watch_over(job, member)
        for dataset in of(DatasetRecord):
            job.datasets.restore(dataset)
        job.checkpoints.attempts.restore(of(AttemptRecord), of(AskRecord))
        job.checkpoints.restore(of(CheckpointRecord), of(PendingRecord), of(PartRecord))
        job.barriers.restore(of(RoundRecord))
        job.actions.restore(of(ActionRecord))
        left_out = job.epochs.restore(of(EpochRecord), of(SegmentRecord), of(ReaderRecord))
        return left_out + job.coverages.restore(of(CoverageRecord), of(ShareRecord))

    # Commands

    def _heartbeat(self, command: c.Heartbeat) -> Reply:
        job, member = self.member(command.job, command.worker_id, command.incarnation)
        job.roster.hear(member, self._out.now)
        member.pulse = command
        member.beat_at = self._out.now
        job.heartbeats += 1
        if command.step_seconds:
            job.stragglers.reported = True
        if command.epoch != member.epoch:
            job.roster.see_epoch(member, command.epoch, self._out)
        return job.roster.pulse()

    def _register(self, command: c.Register) -> Reply:
        job = self._job_or_new(command.job)
        incarnations = job.roster.next_incarnation
        registered, lost = job.roster.register(command, self._out)
        self._add_job(job)
        if registered.incarnation >= incarnations:
            self._watch_over(job, job.roster.by_id[registered.worker_id])
        self._propagate_losses(job, lost)
        job.epochs.membership_changed(self._out)
        return registered

    def _of_member(self, carry_out: OfMember) -> Handler:
        """The handler of a command that only live members may send."""

        def handle(command: Any) -> Reply:
            job, member = self.member(command.job, command.worker_id, command.incarnation)
            reply = carry_out(job, command, member, self._out)
            job.roster.hear(member, self._out.now)
            if reply is c.HELD:
                self._wait(command.timeout, command.call, command.job)
            return reply

        return handle

    def _of_anybody(self, field: str, carry_out: OfAnybody) -> Handler:
        """The handler of a command of anybody; ``field`` names the member, if it is one."""

        def handle(command: Any) -> Reply:
            worker_id = getattr(command, field)
            if not worker_id:
                return carry_out(self.job(command.job), command, self._out)
            job, member = self.member(command.job, worker_id, command.incarnation)
            reply = carry_out(job, command, self._out)
            job.roster.hear(member, self._out.now)
            return reply

        return handle

    def _deregister(self, command: c.Deregister) -> Reply:
        job, member = self.member(command.job, command.worker_id, command.incarnation)
        job.roster.hear(member, self._out.now)
        reason = command.reason or "deregistered"
        self._propagate_losses(job, [job.roster.lose(member, Membership.LEFT, reason, self._out)])
        if not job.roster.live_count:
            job.actions.job_ended(self._out)
        return c.Pulse(job.roster.generation, job.roster.live_count)

    def _report_ended(self, command: c.ReportEnded) -> Reply:
        job = self.jobs.get(command.job)
        if job is None:
            return c.Ended(0)
        gone, lost = set(command.incarnations), []
        for member in job.roster.on_machine(command.machine):
            if member.incarnation in gone:
                reason = f"its process {member.record.process or member.record.pid} has ended"
                lost.append(job.roster.lose(member, Membership.DEAD, reason, self._out))
        self._propagate_losses(job, lost)
        return c.Ended(len(lost))

    def _register_dataset(self, command: c.RegisterDataset) -> Reply:
        job = self._job_or_new(command.job)
        registered = job.datasets.register(command, self._out)
        if command.job not in self.jobs:
            self._add_job(job)
            self._out.put(command.job, job.roster.record())
        return registered

    def _remove_job(self, command: c.RemoveJob) -> Reply:
        job = self.job(command.job)
        roster = job.roster
        self._check_removable(job, command.force, f"'strata jobs rm {job.name} --force'")
        reply = c.JobRemoved(roster.live_count, len(job.datasets), job.checkpoints.history.present)
        members = [m for m in roster.slots.held() if m.live]
        reason = "its job was removed"
        lost = [roster.lose(m, Membership.DEAD, reason, self._out) for m in members]
        self._propagate_losses(job, lost)
        self._forget_job(job)
        self._out.emit(
            job.name,
            "job.removed",
            workers=reply.live_workers,
            datasets=reply.datasets,
            checkpoints=reply.checkpoints,
        )
        return reply

    def _forget_job(self, job: Job) -> None:
        removed, roster = self.removed or RemovedRecord(), job.roster
        self.removed = RemovedRecord(
            max(removed.next_incarnation, roster.next_incarnation),
            max(removed.attempts_begun, roster.attempts_begun),
            max(removed.actions_requested, roster.actions_requested),
        )
        del self.jobs[job.name]
        self._out.delete_job(job.name)
        self._out.put("", self.removed)

    def _remove_dataset(self, command: c.RemoveDataset) -> Reply:
        job = self.job(command.job)
        job.datasets.get(command.dataset_id)
        again = f"'strata datasets rm {command.dataset_id} --job {job.name} --force'"
        self._check_removable(job, command.force, again)
        epochs = job.epochs.forget(command.dataset_id, self._out)
        epochs += job.coverages.forget(command.dataset_id, self._out)
        job.datasets.remove(command.dataset_id, self._out)
        self._out.emit(job.name, "dataset.removed", dataset=command.dataset_id, epochs=epochs)
        return c.DatasetRemoved(epochs)

    def _check_removable(self, job: Job, force: bool, again: str) -> None:
        if job.roster.live_count and not force:
            live = [m.worker_id for m in job.roster.slots.held() if m.live]
            raise Refused(
                "job_is_live",
                f"job {job.name!r} has {len(live)} live workers ({', '.join(live[:4])}): end them "
                f"first ('strata actions request stop --job {job.name}'), or remove it all the "
                f"same ({again})",
            )

    def _hang_up(self, command: c.Hangup) -> Reply:
        job = self.jobs.get(command.job)
        if job is not None:
            for part in job.waiting:
                part.hang_up(command.call)
        return c.DONE

    def _report_lost_state(self, command: c.ReportLostState) -> Reply:
        self._out.emit(
            "",
            "coordinator.state_lost",
            worker=f"{command.job}/{command.worker_id}",
            state=command.state_id,
            restored=command.restored,
        )
        return c.DONE

    def _tick(self, _: c.Tick) -> Reply:
        now = self._out.now
        self._note_stall(now)
        self._end_waits(now)
        self._detect_deaths(now)
        self._measure_speeds(now)
        return c.DONE

    # Time

    def _note_stall(self, now: float) -> None:
        """Note a period in which no heartbeat could be received: it does not count as silence."""
        passed = now - self._last_tick if self._last_tick is not None else 0.0
        self._last_tick = now
        if passed > self.stall:
            self._stalls.append((now, passed - self.stall))
        if passed > STALL:
            self._out.emit("", "coordinator.stalled", seconds=round(passed, 3))

    def deadline(self, member: Member) -> float:
        """When a member that stays silent is declared dead."""
        heard = member.last_seen
        deaf = sum(min(seconds, at - heard) for at, seconds in self._stalls if at > heard)
        return heard + self.heartbeat_timeout + deaf

    def _watch_over(self, job: Job, member: Member) -> None:
        if self._last_tick is None:
            self._last_tick = self._out.now
        self._watched += 1
        heapq.heappush(self._watch, (self.deadline(member), self._watched, member, job))

    def _detect_deaths(self, now: float) -> None:
        dead: dict[str, list[Lost]] = {}
        while self._watch and self._watch[0][0] <= now:
            _, _, member, job = heapq.heappop(self._watch)
            if not member.live:
                continue
            if self.deadline(member) > now:
                self._watch_over(job, member)
                continue
            reason = f"{SILENT} {now - member.last_seen:.1f} s"
            loss = job.roster.lose(member, Membership.DEAD, reason, self._out)
            dead.setdefault(job.name, []).append(loss)
        for name, losses in dead.items():
            self._propagate_losses(self.jobs[name], losses)

    def _measure_speeds(self, now: float) -> None:
        if 0 <= now - self._measured_at < MEASURE_SECONDS:
            return
        self._measured_at = now
        for job in self.jobs.values():
            if job.stragglers.reported:
                job.stragglers.measure(now - self.heartbeat_timeout, self._out)

    def _wait(self, timeout: float, call: int, job: str) -> None:
        heapq.heappush(self._waits, (self._out.now + timeout, call, job))
        if len(self._waits) > self._waits_limit:
            held = {x for j in self.jobs.values() for x in j.held_calls}
            self._waits = sorted(wait for wait in self._waits if wait[1] in held)
            self._waits_limit = max(WAITS_SLACK, 2 * len(self._waits))

    def _end_waits(self, now: float) -> None:
        expired: dict[str, list[int]] = {}
        while self._waits and self._waits[0][0] <= now:
            _, call, name = heapq.heappop(self._waits)
            expired.setdefault(name, []).append(call)
        for name, calls in expired.items():
            job = self.jobs.get(name)
            if job is None:
                continue
            for part in job.waiting:
                part.time_out(calls, self._out)

    def _job_or_new(self, name: str) -> Job:
        job = self.jobs.get(name)
        if job is None and len(self.jobs) >= JOBS_LIMIT and self._longest_idle() is None:
            raise Refused(
                "too_many_jobs",
                f"this coordinator remembers {JOBS_LIMIT} jobs that have live workers, datasets or "
                "checkpoints, and takes no new name: use one of them again, or remove those that "
                "are over ('strata jobs rm JOB')",
            )
        if job is None:
            job = Job(name, None, self._max_workers, self._timer, self._cache)
            job.roster.begin(self._out.now, self.removed)
        return job

    def _add_job(self, job: Job) -> None:
        """Add a job; if there are too many, the one that was idle longest is forgotten."""
        if job.name not in self.jobs and len(self.jobs) >= JOBS_LIMIT:
            forgotten = self._longest_idle()
            if forgotten is not None:
                self._forget_job(forgotten)
                self._out.emit(forgotten.name, "job.forgotten", in_favour_of=job.name)
        if job.name not in self.jobs and len(self.jobs) >= JOBS_LIMIT - JOBS_FORGOTTEN:
            self._scan_ahead()
        self.jobs[job.name] = job

    def _longest_idle(self) -> Job | None:
        """The job that was idle longest, of those that have nothing worth keeping."""
        for _ in range(2):
            while self._forgettable:
                job = self._forgettable[-1]
                if self.jobs.get(job.name) is job and job.is_forgettable:
                    return job
                self._forgettable.pop()
            self._unseen, self._idle = list(self.jobs), []
            self._scan_for_idle(len(self._unseen))
        return None

    def _scan_ahead(self) -> None:
        """Scan some jobs; scanning all at once would take as long as hundreds of calls."""
        if self._unseen:
            self._scan_for_idle(JOBS_LOOKED_AT)
        elif len(self._forgettable) <= JOBS_FORGOTTEN // 2:
            self._unseen = list(self.jobs)

    def _scan_for_idle(self, count: int) -> None:
        jobs = (self.jobs.get(name) for name in self._unseen[-count:])
        self._idle += [(job.heard_at, job) for job in jobs if job and job.is_forgettable]
        del self._unseen[-count:]
        if not self._unseen:
            longest = heapq.nsmallest(JOBS_FORGOTTEN, self._idle, key=lambda idle: idle[0])
            self._forgettable = [job for _, job in reversed(longest)]
            self._idle = []

    def _propagate_losses(self, job: Job, lost: list[Lost]) -> None:
        if lost:
            job.barriers.lose(lost, self._out)
            job.checkpoints.waiting.lose(lost, self._out)
            job.actions.lose(lost, self._out)
            job.epochs.membership_changed(self._out)
            job.coverages.membership_changed(self._out)
