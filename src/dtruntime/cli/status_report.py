"""What ``strata status`` knows, in the shape that ``--json`` prints."""

from __future__ import annotations

import msgspec

from ..client import Observer
from ..errors import StrataError
from ..types import JobStatus

SCHEMA = 1
"""Grows when a field of the JSON changes its meaning or goes away; new fields may appear."""


class MethodReport(msgspec.Struct, frozen=True):
    """What one remote method was asked since the coordinator started."""

    method: str
    calls: int
    errors: int
    p50_seconds: float | None
    """Of the newest calls, up to 1,024, as they took; None: there were none."""
    p99_seconds: float | None


class CoordinatorReport(msgspec.Struct, frozen=True):
    """The coordinator itself."""

    url: str
    version: str
    transport: str
    term: int
    """How often it has started on its data directory."""
    uptime_seconds: float
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    methods: tuple[MethodReport, ...]


class StatusReport(msgspec.Struct, frozen=True):
    """What ``--json`` prints; a job has the fields of `dtruntime.JobStatus`."""

    coordinator: CoordinatorReport
    jobs: tuple[JobStatus, ...]
    schema: int = SCHEMA


def read_status(observer: Observer, url: str, job: str | None) -> StatusReport:
    """Ask for everything; raises when the coordinator or the named job is not there."""
    info = observer.server_info()
    names = observer.jobs()
    if job is not None and job not in names:
        known = ", ".join(names[:8]) or "none"
        raise StrataError(f"job {job!r} does not exist at {url} (known: {known})")
    methods = tuple(
        MethodReport(
            m.method,
            m.calls,
            m.errors,
            m.p50_seconds if m.calls else None,
            m.p99_seconds if m.calls else None,
        )
        for m in info.methods
    )
    coordinator = CoordinatorReport(
        url,
        info.version,
        info.transport,
        info.term,
        info.now - info.started_at,
        info.heartbeat_interval_ms,
        info.heartbeat_timeout_ms,
        methods,
    )
    asked = names if job is None else [job]
    return StatusReport(coordinator, tuple(observer.status(name) for name in asked))
