"""What ``strata status`` shows: as JSON, and as a view cut to the terminal, problems first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import msgspec
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from ..client import Observer
from ..display import count, duration, size
from ..errors import StrataError
from ..types import (
    Action,
    BarrierStatus,
    CheckpointInfo,
    JobStatus,
    Membership,
    WorkerState,
    WorkerStatus,
)
from .invocation import listing

SCHEMA = 1
"""Increased when a JSON field changes its meaning or is removed; new fields may appear."""


class MethodReport(msgspec.Struct, frozen=True):
    """Calls of one remote method since the coordinator started."""

    method: str
    calls: int
    errors: int
    p50_seconds: float | None
    """Of the newest calls, up to 1,024; None: there were none."""
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
    """Read everything; raises when the coordinator or the named job does not exist."""
    info = observer.server_info()
    names = observer.jobs()
    if job is not None and job not in names:
        known = ", ".join(names[:8]) or "none"
        raise StrataError(f"job {job!r} does not exist at {url} (known: {known})")
    methods = []
    for m in info.methods:
        p50, p99 = (m.p50_seconds, m.p99_seconds) if m.calls else (None, None)
        methods.append(MethodReport(m.method, m.calls, m.errors, p50, p99))
    coordinator = CoordinatorReport(
        url,
        info.version,
        info.transport,
        info.term,
        info.now - info.started_at,
        info.heartbeat_interval_ms,
        info.heartbeat_timeout_ms,
        tuple(methods),
    )
    shown = names if job is None else [job]
    return StatusReport(coordinator, tuple(observer.status(name) for name in shown))


NAMES_SHOWN = 6
"""Workers that a barrier's line names."""
BARRIERS_SHOWN = 4
RECENT_SECONDS = 3600.0
"""How long ago a loss is still mentioned."""
LEAST_ROWS = 4
"""With less room than this for the workers of each job, each job gets one line."""


def status_view(
    report: StatusReport, width: int, height: int | None, stale_since: float | None = None
) -> RenderableType:
    """Everything, in ``height`` lines; ``None``: in as many as it takes.

    ``stale_since`` is when the coordinator last answered, by the monotonic clock, if it does not
    answer now.
    """
    head = [headline(report.coordinator), *staleness(stale_since)]
    if not report.jobs:
        return Group(*head, hint(report.coordinator))
    summaries = [job_lines(job) for job in report.jobs]
    if height is None:
        rows = None
    else:
        # Each job also takes an empty line, the table's head and the line on what is not shown;
        # the last line stays free for the prompt.
        taken = len(head) + sum(len(lines) + 3 for lines in summaries) + 1
        rows = (height - taken) // len(report.jobs)
        if rows < LEAST_ROWS and len(report.jobs) > 1:
            return Group(*head, Text(), _overview(report, height - len(head) - 4))
    parts: list[RenderableType] = [*head]
    for job, lines in zip(report.jobs, summaries, strict=True):
        timeout = report.coordinator.heartbeat_timeout_ms / 1000
        limit = None if rows is None else max(1, rows)
        parts += [Text(), *lines, *_workers(rows_of(job, timeout), width, limit)]
    return Group(*parts)


def one_line(*parts: str | tuple[str, str]) -> Text:
    """Text that is cut at the edge of the terminal."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def headline(coordinator: CoordinatorReport) -> Text:
    """The coordinator in one line."""
    return one_line(
        ("coordinator ", "bold"),
        coordinator.url,
        (
            f"   strata {coordinator.version}   up {duration(coordinator.uptime_seconds)}   "
            f"{coordinator.transport}   term {coordinator.term}",
            "dim",
        ),
    )


def staleness(stale_since: float | None) -> list[Text]:
    """A warning, if the coordinator does not answer: since when, by the monotonic clock."""
    if stale_since is None:
        return []
    age = time.monotonic() - stale_since
    warning = f"the coordinator has not answered for {age:.0f} s; this is its last status"
    return [one_line((warning, "bold red"))]


def hint(coordinator: CoordinatorReport) -> Text:
    """What to do with a coordinator that has no jobs."""
    return Text(
        "\nno jobs yet: a job begins when its first worker registers. In a training process:\n\n"
        "  from dtruntime import TrainingOrchestrator\n"
        f'  TrainingOrchestrator(coordinator_url="{coordinator.url}").register()\n\n'
        "or watch one run on this machine: strata demo"
    )


def job_lines(job: JobStatus) -> list[Text]:
    """A job in a few lines: its membership, checkpoints, requests and open barriers."""
    lines = [_job_headline(job), *_incomplete_epochs(job), _newest_checkpoint(job)]
    lines += [_action_line(action) for action in job.actions]
    lines += [_barrier_line(barrier) for barrier in job.barriers[:BARRIERS_SHOWN]]
    if len(job.barriers) > BARRIERS_SHOWN:
        more = count(len(job.barriers) - BARRIERS_SHOWN, "more open barrier")
        lines.append(Text(f"  {more}", "dim"))
    return lines


def _job_headline(job: JobStatus) -> Text:
    world = f"world of {job.world_size}" if job.world_size else "elastic world"
    expected = sum(worker.membership is Membership.EXPECTED for worker in job.workers)
    lost = job.recent_losses(RECENT_SECONDS)
    return one_line(
        ("job ", "bold"),
        (job.job, "bold"),
        f"   generation {job.generation}   {world}   ",
        (f"{job.live_workers:,} live", "green" if job.live_workers else "dim"),
        "   ",
        (f"{job.dead_workers:,} dead", "red" if job.dead_workers else "dim"),
        (f"   {lost:,} lost in the last hour" if lost else "", "yellow"),
        (f"   {expected:,} not registered" if expected else "", "yellow"),
        f"   epoch {job.epoch}" if _has_epochs(job) else "",
        (f"   {count(job.completed_epochs, 'epoch')} completed" if _has_epochs(job) else "", "dim"),
    )


def _has_epochs(job: JobStatus) -> bool:
    """Whether a worker has reported its epoch: without a report everybody is in epoch 0."""
    steps = any(worker.step is not None for worker in job.workers)
    return bool(job.epoch or job.completed_epochs or steps)


def _incomplete_epochs(job: JobStatus) -> list[Text]:
    """A line for the newest epoch that ended with missing samples."""
    if not job.incomplete_epochs:
        return []
    newest, more = job.incomplete_epochs[0], len(job.incomplete_epochs) - 1
    text = (
        f"epoch {newest.epoch} of {newest.dataset_id} ended with {newest.missing:,} of "
        f"{count(newest.expected, 'sample')} missing"
    )
    text += f", and {count(more, 'epoch')} before it" if more else ""
    return [one_line((f"  SAMPLES     {text}", "bold red"))]


def _newest_checkpoint(job: JobStatus) -> Text:
    latest = job.latest_checkpoint
    if latest is None:
        return Text(f"  checkpoint  none committed{' yet' if job.live_workers else ''}", "dim")
    shown = next(iter(job.checkpoints), latest)
    return checkpoint_line(shown, "checkpoint", f", latest of {job.checkpoint_count:,}")


def checkpoint_line(one: CheckpointInfo, title: str = "", note: str = "") -> Text:
    """A checkpoint in one line: how old and large it is, whether it is good, whether it stays."""
    age = duration(max(0.0, time.time() - one.committed_at))
    said = {None: ("", ""), True: ("   verified", "green"), False: ("   DAMAGED", "bold red")}
    return one_line(
        (f"  {title:<12}", "dim"),
        f"step {one.step:,}, epoch {one.epoch}, {size(one.size_bytes)}, {age} ago",
        said[one.verified],
        ("   dropped next" if one.will_be_dropped else "", "yellow"),
        (f"   {one.checkpoint_id}{note}", "dim"),
    )


def _action_line(action: Action) -> Text:
    age = duration(max(0.0, time.time() - action.requested_at))
    return one_line(
        ("  asked       ", "dim"),
        (f"{action.kind} {action.worker_id}".rstrip(), "yellow"),
        f", {age} ago by {action.requested_by or 'an operator'}",
        (f"   {action.action_id}", "dim"),
        f"   {action.reason}" if action.reason else "",
    )


def _barrier_line(barrier: BarrierStatus) -> Text:
    named = [
        f"{worker} ({'no step' if step is None else f'step {step:,}'})"
        for worker, step in list(barrier.missing.items())[:NAMES_SHOWN]
    ]
    missing = barrier.expected - barrier.arrived
    more = f" and {missing - len(named):,} more" if missing > len(named) else ""
    return one_line(
        ("  barrier     ", "dim"),
        f"{barrier.barrier_id}: {barrier.arrived:,} of {barrier.expected:,} arrived, open for "
        f"{duration(barrier.open_seconds)}; missing ",
        (f"{', '.join(named)}{more}", "yellow"),
    )


def _workers(rows: list[WorkerRow], width: int, limit: int | None) -> list[RenderableType]:
    shown = rows if limit is None or len(rows) <= limit + 1 else rows[:limit]
    parts: list[RenderableType] = [*worker_lines(shown, width)]
    if len(shown) < len(rows):
        hidden = rows[len(shown) :]
        problems = sum(row.is_problem for row in hidden)
        text = f"  {count(len(hidden), 'worker')} not shown"
        text += f", {problems:,} of them with a problem" if problems else ", all without a problem"
        parts.append(Text(f"{text}; see all: strata status | less", "dim"))
    return parts


def _overview(report: StatusReport, limit: int) -> Group:
    """One line per job."""
    names = ("job", "generation", "live", "dead", "epoch", "barriers open", "checkpoints")
    table = listing(names, {"job"})
    jobs = sorted(report.jobs, key=lambda job: (-job.dead_workers, job.job))
    shown = jobs[: max(1, limit)]
    for job in shown:
        table.add_row(
            job.job,
            str(job.generation),
            f"{job.live_workers:,}",
            Text(f"{job.dead_workers:,}", "red" if job.dead_workers else "dim"),
            str(job.epoch),
            str(len(job.barriers)),
            f"{job.checkpoint_count:,}",
        )
    hidden = len(jobs) - len(shown)
    note = f"{count(hidden, 'job')} not shown; " if hidden else ""
    text = f"{note}see one with its workers: strata status --job NAME"
    return Group(table, one_line((text, "dim")))


AWAITED_SECONDS = 5.0
"""A worker that keeps a barrier open for longer has a problem."""
_GAP = 2
_INDENT = 2
_STATE_STYLES = {
    WorkerState.WAITING: "yellow",
    WorkerState.RECOVERING: "yellow",
    WorkerState.IDLE: "",
}


class Severity(IntEnum):
    """The state of a worker, the worst first."""

    DEAD = 0
    SILENT = 1
    AWAITED = 2
    SLOW = 3
    EXPECTED = 4
    FINE = 5
    LEFT = 6


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker, how bad its state is, and a note."""

    worker: WorkerStatus
    severity: Severity
    note: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether it needs attention."""
        return self.severity < Severity.FINE


def rows_of(job: JobStatus, heartbeat_timeout: float) -> list[WorkerRow]:
    """A job's workers, those with a problem first."""
    awaited = {
        worker: barrier.barrier_id
        for barrier in job.barriers
        if barrier.open_seconds > AWAITED_SECONDS
        for worker in barrier.missing
    }
    rows = [_row(worker, heartbeat_timeout, awaited) for worker in job.workers]
    return sorted(rows, key=lambda row: (row.severity, row.worker.rank))


def _row(worker: WorkerStatus, heartbeat_timeout: float, awaited: dict[str, str]) -> WorkerRow:
    match worker.membership:
        case Membership.DEAD:
            return WorkerRow(worker, Severity.DEAD, worker.detail)
        case Membership.LEFT:
            return WorkerRow(worker, Severity.LEFT, worker.detail)
        case Membership.EXPECTED:
            return WorkerRow(worker, Severity.EXPECTED, "not registered yet")
    if worker.heartbeat_age > heartbeat_timeout / 2:
        remaining = duration(max(0.0, heartbeat_timeout - worker.heartbeat_age))
        return WorkerRow(worker, Severity.SILENT, f"silent, declared dead in {remaining}")
    if worker.worker_id in awaited:
        note = f"barrier {awaited[worker.worker_id]} waits for it"
        return WorkerRow(worker, Severity.AWAITED, note)
    if worker.is_straggler:
        return WorkerRow(worker, Severity.SLOW, f"slow: {worker.slowness or 0:.1f} × the median")
    return WorkerRow(worker, Severity.FINE)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column, and how important it is: the least important go first when room is short."""

    name: str
    importance: int
    cell: Callable[[WorkerRow], str]
    justify: Literal["left", "right"] = "left"


_COLUMNS = (
    _Column("rank", 10, lambda row: str(row.worker.rank), "right"),
    _Column("worker", 9, lambda row: row.worker.worker_id),
    _Column("state", 10, lambda row: _state(row.worker)),
    _Column("step", 9, lambda row: _step(row.worker), "right"),
    _Column("step time", 6, lambda row: _step_time(row.worker), "right"),
    _Column("epoch", 6, lambda row: _epoch(row.worker), "right"),
    _Column("heartbeat", 8, lambda row: _heartbeat(row.worker), "right"),
    _Column("CPU", 4, lambda row: _usage(row.worker)[0], "right"),
    _Column("memory", 4, lambda row: _usage(row.worker)[1], "right"),
    _Column("GPUs", 5, lambda row: _gpus(row.worker)),
    _Column("host", 3, lambda row: row.worker.hostname),
    _Column("process", 2, lambda row: row.worker.process.partition("@")[0], "right"),
    _Column("note", 7, lambda row: row.note),
)
_ROW_STYLES = {
    Severity.DEAD: "red",
    Severity.SILENT: "yellow",
    Severity.AWAITED: "yellow",
    Severity.SLOW: "yellow",
    Severity.EXPECTED: "yellow",
    Severity.LEFT: "dim",
}


def worker_lines(rows: list[WorkerRow], width: int) -> list[Text]:
    """A heading and a line per worker, with as many columns as the width has room for."""
    cells = {column.name: [column.cell(row) for row in rows] for column in _COLUMNS}
    widths = {
        name: max(cell_len(text) for text in (name, *texts))
        for name, texts in cells.items()
        if any(texts)
    }
    columns = _fitting(widths, width)
    lines = [_line({c.name: c.name for c in columns}, columns, widths, "dim")]
    for index, row in enumerate(rows):
        texts = {column.name: cells[column.name][index] for column in columns}
        style = _ROW_STYLES.get(row.severity, "")
        state = _STATE_STYLES.get(row.worker.state, "green") if not style else ""
        lines.append(_line(texts, columns, widths, style, state))
    return lines


def _fitting(widths: dict[str, int], width: int) -> list[_Column]:
    """Columns that are not empty, the most important ones as far as there is room."""
    room = width - _INDENT + _GAP
    chosen = set()
    for column in sorted(_COLUMNS, key=lambda column: -column.importance):
        needed = widths.get(column.name, width) + _GAP
        if column.name in widths and needed <= room:
            room -= needed
            chosen.add(column.name)
    return [column for column in _COLUMNS if column.name in chosen]


def _line(
    texts: dict[str, str],
    columns: list[_Column],
    widths: dict[str, int],
    style: str,
    state_style: str = "",
) -> Text:
    """One line; laid out by hand, since a table of thousands of rows takes seconds."""
    line = Text(" " * _INDENT, style=style, no_wrap=True, overflow="ellipsis")
    for column in columns:
        text = texts[column.name]
        space = " " * (widths[column.name] - cell_len(text))
        padded = space + text if column.justify == "right" else text + space
        line.append(padded + " " * _GAP, state_style if column.name == "state" else "")
    line.rstrip()
    return line


def _state(worker: WorkerStatus) -> str:
    return worker.state if worker.membership is Membership.LIVE else worker.membership


def _step(worker: WorkerStatus) -> str:
    return f"{worker.step:,}" if worker.step is not None and worker.incarnation else ""


def _epoch(worker: WorkerStatus) -> str:
    """The epoch of a worker that has reported: without a report everybody is in epoch 0."""
    return f"{worker.epoch:,}" if worker.epoch or worker.step is not None else ""


def _step_time(worker: WorkerStatus) -> str:
    known = worker.step_seconds is not None and worker.membership is Membership.LIVE
    return duration(worker.step_seconds or 0.0) if known else ""


def _heartbeat(worker: WorkerStatus) -> str:
    age = worker.heartbeat_age
    if not worker.incarnation:
        return ""
    return f"{age:.1f} s ago" if age < 60 else f"{duration(age)} ago"


def _usage(worker: WorkerStatus) -> tuple[str, str]:
    """Processor and memory; empty where nothing was reported, or the worker is gone."""
    usage = worker.resources
    if worker.membership is not Membership.LIVE or not usage.memory_used_bytes:
        return "", ""
    return f"{usage.cpu_percent:.0f}%", size(usage.memory_used_bytes)


def _gpus(worker: WorkerStatus) -> str:
    gpus = worker.resources.gpus
    if not gpus or worker.membership is not Membership.LIVE:
        return str(worker.gpu_count) if worker.gpu_count else ""
    busy = sum(gpu.utilization_percent for gpu in gpus) / len(gpus)
    used = sum(gpu.memory_used_bytes for gpu in gpus)
    total = sum(gpu.memory_total_bytes for gpu in gpus)
    memory = f", memory {used / total:.0%}" if total else ""
    return f"{len(gpus)} × {busy:.0f}%{memory}"
