"""The figures of one job, measured once a second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from ...rpc.gen import coordinator_pb2 as pb
from ...types import Membership, WorkerState
from ..state import Event, Job
from ..state.member import Member
from ..state.records import CheckpointRecord
from .history import Rings, Stored
from .measures import RankRates, Rate, RecentQuantiles, Share
from .ports import in_slices
from .recoveries import Recoveries
from .views import Metrics, Point

SLICE = 1000
REPORTERS = 32
"""Of so many live workers, evenly chosen, the mean of what they report is taken."""
HOUR = 3600.0
RECENT = 600.0
RATE_SECONDS = 10.0
SAMPLES_RATE_SECONDS = 60.0

_GOOD = frozenset({WorkerState.TRAINING, WorkerState.CHECKPOINTING})
_COUNTED = _GOOD | {WorkerState.RECOVERING, WorkerState.WAITING, WorkerState.LOADING}


class JobFigures:
    """What is measured of one job."""

    def __init__(self, job: str, stored: Stored | None, heartbeat_seconds: float) -> None:
        self.job = job
        self.rings = Rings(stored.fine, stored.coarse) if stored else Rings()
        self.recoveries = Recoveries(stored.recoveries if stored else ())
        self.states: Counter[WorkerState] = Counter()
        """How many live workers are in each state."""
        self.reported: dict[str, float] = {}
        """Means of what workers report with their heartbeats."""
        self.metrics: Metrics | None = None
        """None before the first measurement."""
        self.step: int | None = None
        """The highest that a live worker reports."""
        self.started_at: float | None = None
        """When the first of the present members registered; none: there were never any."""
        self.heard_at = 0.0
        """When the newest heartbeat came."""
        self.dead = 0
        self._consumed = Rate(SAMPLES_RATE_SECONDS)
        self._consumed_first: int | None = None
        self._consumed_more = False
        """Whether more was consumed than when it was looked first: before, nothing is measured."""
        self._heartbeats = Rate(RATE_SECONDS)
        self._goodput = Share()
        self._barriers = RecentQuantiles()
        beats = max(10, math.ceil(3 * heartbeat_seconds))
        self._steps, self._samples = RankRates(beats), RankRates(beats)

    def to_store(self) -> Stored:
        """What its file keeps."""
        rings = self.rings
        return Stored(self.job, list(rings.fine), list(rings.coarse), self.recoveries.known)

    def note_loss(self, job: Job, event: Event) -> None:
        """A worker was lost; it was last heard earlier than that was noticed."""
        worker_id = event.fields.get("worker", "")
        member = job.roster.by_id.get(worker_id)
        known = member is not None and str(member.incarnation) == event.fields.get("incarnation")
        heard = member.last_seen if member is not None and known else event.at
        self.recoveries.lost(worker_id, min(heard, event.at), event.at)

    def note_consumed(self, at: float, samples: int) -> None:
        """So many samples of all epochs were committed, or reported as consumed."""
        if self._consumed_first is None:
            self._consumed_first = samples
        self._consumed_more |= samples > self._consumed_first
        self._consumed.add(at, samples)

    @property
    def samples_per_second(self) -> float | None:
        """As heartbeats say, or else what loaders commit; none before anything was measured."""
        told = self._samples.total
        return self._consumed.value if told is None and self._consumed_more else told

    async def measure(
        self,
        job: Job,
        now: float,
        requests_per_second: float | None,
        durations: dict[str, float],
        assignment_seconds: float | None,
    ) -> None:
        """Measure everything once; ``durations`` are those of checkpoints, by id."""
        members = [member for member in job.roster.slots if member is not None]
        oldest = await self._look_at(members, len(job.roster.slots))
        self._heartbeats.add(now, job.heartbeats)
        self._count_good(job)
        self._average(members)
        self.recoveries.look(members)
        p50, p99 = self._barriers.add(now, job.barriers.latency)
        self.metrics = Metrics(
            workers_live=job.roster.live_count,
            workers_dead=self.dead,
            heartbeats_per_second=self._heartbeats.value,
            requests_per_second=requests_per_second,
            steps_per_second=self._steps.median,
            samples_per_second=self.samples_per_second,
            goodput=self._goodput.value,
            checkpoint_bytes_per_second=checkpoint_rate(job.checkpoints.latest, durations, now),
            checkpoints_committed=job.checkpoints.history.present,
            barrier_p50_ms=p50,
            barrier_p99_ms=p99,
            assignment_ms=None if assignment_seconds is None else assignment_seconds * 1000,
            heartbeat_age_max_seconds=None if oldest is None else max(0.0, now - oldest),
            stragglers=sum(member.live for member in job.speeds.stragglers.values()),
            losses_last_hour=sum(at >= now - HOUR for at in job.roster.losses.times),
            recoveries_last_hour=self.recoveries.done_since(now - HOUR),
            last_recovery_seconds=self.recoveries.last_seconds,
        )
        self.rings.add(self._point(now, self.metrics))

    async def _look_at(self, members: Sequence[Member], slots: int) -> float | None:
        """Count states and take steps; returns when the most silent live worker was heard."""
        incarnations = np.zeros(slots, dtype=np.int64)
        steps, samples = np.full((2, slots), -1, dtype=np.int64)
        beats = np.zeros(slots)
        states: Counter[WorkerState] = Counter()
        heard: list[float] = []
        dead = 0
        async for part in in_slices(members, SLICE):
            for member in part:
                if not member.live:
                    dead += member.record.membership == Membership.DEAD
                    continue
                heard.append(member.last_seen)
                pulse = member.pulse
                if pulse is None:
                    continue
                states[pulse.state] += 1
                incarnations[member.rank] = member.incarnation
                beats[member.rank] = member.beat_at
                if pulse.step is not None:
                    steps[member.rank] = pulse.step
                if pulse.samples:
                    samples[member.rank] = pulse.samples
        self._steps.add(incarnations, steps, beats)
        self._samples.add(incarnations, samples, beats)
        self.states, self.dead = states, dead
        self.heard_at = float(beats.max(initial=self.heard_at))
        if members:
            self.started_at = min(member.record.registered_at for member in members)
        highest = int(steps.max(initial=-1))
        self.step = highest if highest >= 0 else self.step
        return min(heard, default=None)

    def _count_good(self, job: Job) -> None:
        if not job.roster.live_count:
            return
        counted = sum(self.states[state] for state in _COUNTED)
        absent = max(0, job.roster.world_size - job.roster.live_count) if counted else 0
        self._goodput.add(sum(self.states[state] for state in _GOOD), counted + absent)

    def _average(self, members: Sequence[Member]) -> None:
        live = [m.pulse for m in members if m.live and m.pulse is not None]
        if not live:
            return
        found: dict[str, list[float]] = {}
        for pulse in live[:: max(1, len(live) // REPORTERS)][:REPORTERS]:
            for name, value in pb.HeartbeatRequest.FromString(pulse.report).metrics.items():
                if math.isfinite(value):
                    found.setdefault(name, []).append(value)
        self.reported = {name: fmean(values) for name, values in sorted(found.items())}

    def _point(self, now: float, metrics: Metrics) -> Point:
        return Point(
            at=now,
            workers_live=metrics.workers_live,
            steps_per_second=metrics.steps_per_second,
            samples_per_second=metrics.samples_per_second,
            requests_per_second=metrics.requests_per_second,
            checkpoint_bytes_per_second=metrics.checkpoint_bytes_per_second,
            goodput=metrics.goodput,
            barrier_p50_ms=metrics.barrier_p50_ms,
            barrier_p99_ms=metrics.barrier_p99_ms,
            stragglers=metrics.stragglers,
            loss=self.reported.get("loss"),
        )


def checkpoint_rate(
    latest: CheckpointRecord | None, durations: dict[str, float], now: float
) -> float | None:
    """Bytes per second of the newest checkpoint; none if it is old, or nobody said it began."""
    if latest is None or now - latest.committed_at > RECENT:
        return None
    seconds = durations.get(latest.checkpoint_id)
    return latest.size_bytes / seconds if seconds else None
