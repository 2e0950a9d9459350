"""Metrics of one job, measured once a second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, cast

import msgspec
import numpy as np

from ....rpc.gen import coordinator_pb2 as pb
from ....types import WorkerState
from ...state import Event, Job
from ...state.checkpoints.history import seconds_taken
from ...state.commands import Heartbeat
from ...state.members import Member
from ...state.records import CheckpointRecord, copied
from ..read_model import in_slices
from ..views import Metrics, Point, Recovery
from .time_series import (
    Quantiles,
    RankRates,
    Rate,
    RecentQuantiles,
    ReportAge,
    Rings,
    StoredHistory,
    TimeShare,
)

SLICE = 1000
REPORTERS = 32
"""Reported metrics are averaged over this many live workers, evenly chosen."""
HOUR = 3600.0
RECENT = 600.0
RATE_SECONDS = 10.0
SAMPLES_RATE_SECONDS = 60.0

_NOTHING: dict[str, Any] = {
    one.name: 0 if one.type is int else None for one in msgspec.structs.fields(Metrics)
}
NO_METRICS = Metrics(**_NOTHING)
"""The metrics of a job that was not measured."""
_GOOD = frozenset({WorkerState.TRAINING, WorkerState.CHECKPOINTING})
_LOST = frozenset({WorkerState.RECOVERING, WorkerState.LOADING})


class JobMetrics:
    """The metrics of one job."""

    def __init__(self, job: str, stored: StoredHistory | None, heartbeat_seconds: float) -> None:
        self.job = job
        self.rings = Rings(stored.fine, stored.coarse) if stored else Rings()
        self.recoveries = Recoveries(stored.recoveries if stored else ())
        self.states: Counter[WorkerState] = Counter()
        """How many live workers are in each state."""
        self.reported: dict[str, float] = {}
        """Means of what workers reported last with their heartbeats."""
        self.metrics: Metrics | None = None
        """None while no worker is live."""
        self.step: int | None = None
        """The highest step of a live worker, or of one that was live last."""
        self.started_at: float | None = None
        """When the first of the present members registered; None: there were never any."""
        self.is_stored = True
        """Whether its file has all points."""
        self.heard_at = 0.0
        """When the newest heartbeat came."""
        self._consumed = Rate(SAMPLES_RATE_SECONDS)
        self._consumed_first: int | None = None
        self._consumed_more = False
        """Whether anything was consumed since the first reading; there is no rate before."""
        self._heartbeats = Rate(RATE_SECONDS)
        self._goodput = TimeShare()
        self._trained: set[int] = set()
        """Incarnations of live workers that have trained."""
        self._spent: Counter[str] = Counter()
        """How many workers spend their time well, and how many do not."""
        self._ended_in: int | None = None
        """The generation in which the last reports of ended workers were read."""
        self._report_ages: dict[int, ReportAge] = {}
        """By incarnation."""
        self._checkpoint = ""
        """The checkpoint whose rate was last added to the points."""
        self._barriers = RecentQuantiles()
        self._seconds = max(10, math.ceil(3 * heartbeat_seconds))
        """The window of the rates of ranks, in seconds."""
        self._steps, self._samples = RankRates(self._seconds), RankRates(self._seconds)

    def to_store(self) -> StoredHistory:
        """What its file keeps."""
        rings, self.is_stored = self.rings, True
        return StoredHistory(self.job, list(rings.fine), list(rings.coarse), self.recoveries.known)

    def note_loss(self, event: Event) -> None:
        """A worker was lost; it was last heard from before that was detected."""
        silent = float(event.fields.get("silent_seconds", 0.0))
        self.recoveries.lost(event.fields.get("worker", ""), event.at - silent, event.at)

    def note_consumed(self, at: float, samples: int) -> None:
        """Note how many samples of all epochs were consumed so far."""
        if self._consumed_first is None:
            self._consumed_first = samples
        self._consumed_more |= samples > self._consumed_first
        self._consumed.add(at, samples)

    @property
    def samples_per_second(self) -> float | None:
        """By heartbeats, or else by what loaders commit; None before the first measurement."""
        reported = self._samples.total
        return self._consumed.value if reported is None and self._consumed_more else reported

    async def measure(
        self,
        job: Job,
        now: float,
        requests_per_second: float | None,
        durations: dict[str, float],
        assignment_seconds: float | None,
    ) -> None:
        """Measure everything once; ``durations`` are those of checkpoints, by id."""
        members = job.roster.slots.held()
        oldest = await self._look_at(members, now)
        self._heartbeats.add(now, job.heartbeats)
        self._count_good(job, now)
        fresh = self._average(members, now)
        self.recoveries.look(members)
        steps, samples = self._steps.median, self.samples_per_second
        self.metrics = msgspec.structs.replace(
            NO_METRICS,
            heartbeats_per_second=self._heartbeats.value,
            steps_per_second=steps if self._works else None,
            samples_per_second=samples if self._works else None,
            goodput=self._goodput.value if self._works else None,
            checkpoint_bytes_per_second=checkpoint_rate(job.checkpoints.latest, durations, now),
            heartbeat_age_max_seconds=None if oldest is None else max(0.0, now - oldest),
            stragglers=sum(member.live for member in job.stragglers.slow.values()),
            loss=self.reported.get("loss") if fresh else None,
        )
        current = self.current(job, now, requests_per_second, assignment_seconds)
        self._add(self._point(now, current, job.checkpoints.latest))

    def current(
        self,
        job: Job,
        now: float,
        requests_per_second: float | None,
        assignment_seconds: float | None,
    ) -> Metrics:
        """The current figures: rates as they were last measured, if anybody works."""
        live, barriers = job.roster.live_count, self.barriers(job, now)
        return msgspec.structs.replace(
            (self.metrics if live else None) or NO_METRICS,
            workers_live=live,
            workers_dead=job.roster.dead_count,
            requests_per_second=requests_per_second,
            checkpoints_committed=job.checkpoints.history.present,
            barrier_p50_ms=milliseconds(barriers.p50),
            barrier_p99_ms=milliseconds(barriers.p99),
            barriers_measured=barriers.values,
            assignment_ms=milliseconds(assignment_seconds),
            losses_last_hour=sum(at >= now - HOUR for at in job.roster.losses.times),
            recoveries_last_hour=self.recoveries.done_since(now - HOUR),
            last_recovery_seconds=self.recoveries.last_seconds,
        )

    def rest(self, now: float) -> None:
        """No worker is live: reset what was measured."""
        if self.metrics is None:
            return
        self._steps, self._samples = RankRates(self._seconds), RankRates(self._seconds)
        self._consumed, self._heartbeats = Rate(SAMPLES_RATE_SECONDS), Rate(RATE_SECONDS)
        self._consumed_first, self._consumed_more = None, False
        self._goodput, self._trained, self._report_ages = TimeShare(), set(), {}
        self.states, self.metrics = Counter(), None
        # A gap, so that the curves are not drawn across the pause.
        self._add(Point(now, 0, None, None, None, None, None, None, None, 0, None))

    def take_last_reports(self, job: Job) -> None:
        """For a job without live workers, read the last reports of those it had.

        They may be newer than the last sample, or from before the coordinator started.
        """
        roster = job.roster
        if roster.live_count or self._ended_in == roster.generation:
            return
        self._ended_in = roster.generation
        ended = roster.slots.held()
        since = max((m.last_seen for m in ended), default=0.0) - self._seconds
        last = [m for m in ended if m.pulse is not None and m.last_seen >= since]
        steps = [m.last_step for m in last if m.last_step is not None]
        self.step = max(steps, default=self.step)
        self._take_means(_reports(last))

    def barriers(self, job: Job, now: float) -> Quantiles:
        """Quantiles of the barriers of the last minutes, in seconds."""
        return self._barriers.add(now, job.barriers.latency)

    def _add(self, point: Point) -> None:
        self.rings.add(point)
        self.is_stored = False

    @property
    def _works(self) -> bool:
        """Whether some live worker has not finished."""
        return self.states.total() > self.states[WorkerState.FINISHED]

    async def _look_at(self, members: Sequence[Member], now: float) -> float | None:
        """Count states and read steps; returns when the most silent live worker was heard."""
        incarnations: list[int] = []
        steps: list[int] = []
        samples: list[int] = []
        beats: list[float] = []
        states: Counter[WorkerState] = Counter()
        heard: list[float] = []
        trained: set[int] = set()
        self._spent.clear()
        async for part in in_slices(members, SLICE):
            for member in part:
                if not member.live:
                    continue
                heard.append(member.last_seen)
                pulse = member.pulse
                if pulse is None:
                    continue
                states[pulse.state] += 1
                if pulse.state == WorkerState.TRAINING or member.incarnation in self._trained:
                    trained.add(member.incarnation)
                if now - member.beat_at <= self._seconds:
                    self._spent[self._kind(member.incarnation in trained, pulse.state)] += 1
                incarnations.append(member.incarnation)
                beats.append(member.beat_at)
                steps.append(-1 if pulse.step is None else pulse.step)
                samples.append(pulse.samples or -1)
        of, at = np.array(incarnations, dtype=np.int64), np.array(beats)
        self._steps.add(of, np.array(steps, dtype=np.int64), at)
        self._samples.add(of, np.array(samples, dtype=np.int64), at)
        self.states, self._trained = states, trained
        self.heard_at = max(beats, default=self.heard_at)
        if members:
            self.started_at = min(member.record.registered_at for member in members)
        highest = max(steps, default=-1)
        self.step = highest if highest >= 0 else self.step
        return min(heard, default=None)

    def _count_good(self, job: Job, now: float) -> None:
        counted = self._spent["good"] + self._spent["lost"]
        absent = max(0, job.roster.world_size - job.roster.live_count) if counted else 0
        self._goodput.add(now, self._spent["good"], counted + absent)

    @staticmethod
    def _kind(trains: bool, state: WorkerState) -> str:
        """What a worker's time counts as: good, lost, or neither."""
        if state in _GOOD:
            return "good"
        return "lost" if state in _LOST or (trains and state == WorkerState.WAITING) else ""

    def _average(self, members: Sequence[Member], now: float) -> bool:
        """Average what workers report; returns whether any report is recent."""
        reports = _reports([m for m in members if m.live and m.pulse is not None])
        ages: dict[int, ReportAge] = {}
        for member, metrics in reports:
            pulse = cast("Heartbeat", member.pulse)
            if pulse.state != WorkerState.FINISHED:
                before = self._report_ages.get(member.incarnation)
                ages[member.incarnation] = ReportAge.after(
                    before, (pulse.step, metrics), member.beat_at
                )
        self._take_means(reports)
        self._report_ages = ages
        return any(one.is_new(now, self._seconds) for one in ages.values())

    def _take_means(self, reports: Sequence[tuple[Member, dict[str, float]]]) -> None:
        values_of: dict[str, list[float]] = {}
        for _, metrics in reports:
            for name, value in metrics.items():
                if math.isfinite(value):
                    values_of.setdefault(name, []).append(value)
        if values_of:
            self.reported = {name: fmean(values) for name, values in sorted(values_of.items())}

    def _point(self, now: float, metrics: Metrics, latest: CheckpointRecord | None) -> Point:
        """A point of the curves; the rate of a checkpoint is in the first one after it only."""
        before, self._checkpoint = self._checkpoint, latest.checkpoint_id if latest else ""
        rate = metrics.checkpoint_bytes_per_second if self._checkpoint != before else None
        return copied(metrics, Point, at=now, checkpoint_bytes_per_second=rate)


def _reports(members: Sequence[Member]) -> list[tuple[Member, dict[str, float]]]:
    """The metrics of some of the members, evenly chosen; all of them have a pulse."""
    chosen = members[:: max(1, len(members) // REPORTERS)][:REPORTERS]
    pulses = [(member, cast("Heartbeat", member.pulse)) for member in chosen]
    return [(m, dict(pb.HeartbeatRequest.FromString(p.report).metrics)) for m, p in pulses]


def milliseconds(seconds: float | None) -> float | None:
    """Seconds in milliseconds, if known."""
    return None if seconds is None else seconds * 1000


def duration_of(record: CheckpointRecord, durations: Mapping[str, float]) -> float | None:
    """How long a checkpoint took: since all ranks began it, or as its single writer reports."""
    begun = durations.get(record.checkpoint_id)
    return seconds_taken(record) if begun is None else begun


def checkpoint_rate(
    latest: CheckpointRecord | None, durations: dict[str, float], now: float
) -> float | None:
    """Bytes per second of the newest checkpoint; None if it is old or its duration unknown."""
    if latest is None or now - latest.committed_at > RECENT:
        return None
    seconds = duration_of(latest, durations)
    return latest.size_bytes / seconds if seconds else None


KEPT = 256


class Recoveries:
    """The newest losses of one job.

    A job trains again when a live worker that is not recovering reports a higher step than in an
    earlier heartbeat after the loss was noticed.
    """

    def __init__(self, known: Iterable[Recovery] = ()) -> None:
        self.known: list[Recovery] = list(known)[-KEPT:]
        """Oldest first."""
        self._steps: dict[int, int] = {}
        """By incarnation, the step in its last heartbeat since the newest loss."""

    @property
    def open(self) -> bool:
        """Whether the job has not trained since a loss."""
        return bool(self.known) and self.known[-1].training_at is None

    def lost(self, worker_id: str, lost_at: float, detected_at: float) -> None:
        """A worker was lost."""
        self.known.append(Recovery(lost_at, detected_at, None, worker_id))
        del self.known[:-KEPT]
        self._steps.clear()

    def look(self, members: Iterable[Member]) -> None:
        """Check whether the members train again."""
        if not self.open:
            return
        since = self.known[-1].detected_at
        for member in members:
            pulse = member.pulse
            if not member.live or pulse is None or pulse.step is None or member.beat_at <= since:
                continue
            if pulse.state == WorkerState.RECOVERING:
                continue
            first = self._steps.setdefault(member.incarnation, pulse.step)
            if pulse.step > first:
                self._trains(member.beat_at)
                return
            self._steps[member.incarnation] = pulse.step

    def _trains(self, at: float) -> None:
        self.known = [
            msgspec.structs.replace(recovery, training_at=at)
            if recovery.training_at is None
            else recovery
            for recovery in self.known
        ]
        self._steps.clear()

    def done_since(self, at: float) -> int:
        """How many losses were recovered from since then."""
        return sum(r.training_at is not None and r.training_at >= at for r in self.known)

    @property
    def last_seconds(self) -> float | None:
        """How long the newest recovery took, from the last sign of life to training."""
        for recovery in reversed(self.known):
            if recovery.training_at is not None:
                return recovery.training_at - recovery.lost_at
        return None
