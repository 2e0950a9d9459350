"""Workers in snapshots: captured at once, encoded in slices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, cast

from msgspec import Struct

from ....rpc.gen import coordinator_pb2 as pb
from ....types import WorkerState
from ...state import Job
from ...state.commands import Heartbeat
from ...state.members import Member
from ...state.records import WorkerRecord
from ...state.stragglers import slowness
from ..views import Gpu, Sort, Worker

Membership = Literal["live", "dead", "left"]


class SeenWorker(Struct, frozen=True, gc=False):
    """A member at one moment. Its record and its pulse are replaced, never changed."""

    record: WorkerRecord
    pulse: Heartbeat | None
    last_seen: float
    is_straggler: bool

    @property
    def state(self) -> WorkerState:
        """What it said it does."""
        return self.pulse.state if self.pulse else WorkerState.IDLE


class WorkersSnapshot(NamedTuple):
    """All members of a job at one moment."""

    members: list[SeenWorker]
    median: float
    """Median step time; 0: nobody reports any."""
    now: float

    def show(self, members: Iterable[SeenWorker]) -> list[Worker]:
        """Some of them, as API objects."""
        return [_show(seen, self.median, self.now) for seen in members]


def read_workers(job: Job, now: float) -> WorkersSnapshot:
    """Capture all members of a job."""
    roster, slow = job.roster, job.stragglers.slow
    by_id = roster.by_id
    members = [
        SeenWorker(m.record, m.pulse, m.last_seen, m.live and m.incarnation in slow)
        for m in roster.slots.held()
    ]
    if len(members) > len(by_id):
        # A rank's last holder may hold another rank by now.
        members = [m for m in members if by_id[m.record.worker_id].record is m.record]
    return WorkersSnapshot(members, job.stragglers.median, now)


def see(job: Job, member: Member) -> SeenWorker:
    """Capture one member."""
    straggles = job.stragglers.is_straggler(member)
    return SeenWorker(member.record, member.pulse, member.last_seen, straggles)


def select(workers: WorkersSnapshot, state: str, search: str, sort: Sort) -> list[SeenWorker]:
    """The matching members, sorted; ``state`` is a worker state, or live, dead or left."""
    text = search.casefold()
    matches = [
        seen
        for seen in workers.members
        if (not state or state in (seen.state, seen.record.membership))
        and (not text or _mentions(seen.record, text))
    ]
    if sort != "rank":
        name = sort.removeprefix("-")
        matches.sort(key=lambda seen: _order(seen, name, workers.now), reverse=sort.startswith("-"))
    return matches


def _mentions(record: WorkerRecord, text: str) -> bool:
    texts = (record.worker_id, record.hostname, record.process, record.detail)
    return any(text in value.casefold() for value in texts)


def _order(seen: SeenWorker, name: str, now: float) -> tuple[float, str]:
    pulse = seen.pulse
    match name:
        case "worker_id":
            return 0.0, seen.record.worker_id
        case "state":
            return 0.0, f"{seen.record.membership} {seen.state}"
        case "step":
            return float(pulse.step if pulse and pulse.step is not None else -1), ""
        case "heartbeat_age_seconds":
            return now - seen.last_seen, ""
        case "slowness":
            return pulse.step_seconds if pulse else 0.0, ""
        case _:
            return float(seen.record.rank), ""


_NOTHING = pb.HeartbeatRequest()


def _show(seen: SeenWorker, median: float, now: float) -> Worker:
    record, pulse = seen.record, seen.pulse
    report = pb.HeartbeatRequest.FromString(pulse.report) if pulse else _NOTHING
    used = report.resources if report.HasField("resources") else None
    step_seconds = (pulse.step_seconds if pulse else 0.0) or None
    live = record.membership == "live"
    return Worker(
        worker_id=record.worker_id,
        rank=record.rank,
        incarnation=record.incarnation,
        membership=cast("Membership", str(record.membership)),
        state=str(seen.state),
        step=pulse.step if pulse else None,
        epoch=pulse.epoch if pulse else 0,
        heartbeat_age_seconds=max(0.0, now - seen.last_seen),
        hostname=record.hostname,
        process=record.process,
        gpu_count=record.gpu_count,
        registered_at=record.registered_at,
        detail=record.detail,
        metrics=_finite(report.metrics),
        step_seconds=step_seconds,
        slowness=slowness(step_seconds, median, live=live),
        is_straggler=seen.is_straggler,
        cpu_percent=used.cpu_percent if used else None,
        memory_used_bytes=used.memory_used_bytes if used else None,
        memory_total_bytes=used.memory_total_bytes if used else None,
        gpus=[_gpu(gpu) for gpu in used.gpus] if used and used.gpus else [],
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON has neither infinity nor NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _gpu(gpu: pb.GpuUsage) -> Gpu:
    return Gpu(gpu.utilization_percent, gpu.memory_used_bytes, gpu.memory_total_bytes)
