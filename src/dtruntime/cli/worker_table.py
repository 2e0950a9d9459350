"""The table of workers in ``strata status``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from rich.cells import cell_len
from rich.text import Text

from ..display import duration, size
from ..types import JobStatus, Membership, ResourceUsage, WorkerState, WorkerStatus

AWAITED_SECONDS = 5.0
"""Who keeps a barrier open for longer than this has a problem."""
_GAP = 2
_INDENT = 2
_STATE_STYLES = {
    WorkerState.WAITING: "yellow",
    WorkerState.RECOVERING: "yellow",
    WorkerState.IDLE: "",
}


class Severity(IntEnum):
    """What is wrong with a worker, the worst first."""

    DEAD = 0
    SILENT = 1
    AWAITED = 2
    SLOW = 3
    EXPECTED = 4
    FINE = 5
    LEFT = 6


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker and what is to be said about it."""

    worker: WorkerStatus
    severity: Severity
    note: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether somebody should look at it."""
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
    """A column, and how much it matters: the least important go first when room is short."""

    name: str
    importance: int
    cell: Callable[[WorkerRow], str]
    justify: Literal["left", "right"] = "left"


_COLUMNS = (
    _Column("rank", 10, lambda row: str(row.worker.rank), "right"),
    _Column("worker", 9, lambda row: row.worker.worker_id),
    _Column("state", 10, lambda row: _state(row)),
    _Column("step", 9, lambda row: _reported(row, row.worker.step), "right"),
    _Column("step time", 6, lambda row: _step_time(row.worker), "right"),
    _Column("epoch", 6, lambda row: _epoch(row), "right"),
    _Column("heartbeat", 8, lambda row: _age(row), "right"),
    _Column("CPU", 4, lambda row: _cpu(_used(row)), "right"),
    _Column("memory", 4, lambda row: _memory(_used(row)), "right"),
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
    """Columns that have something to say, the most important ones as far as there is room."""
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


def _state(row: WorkerRow) -> str:
    worker = row.worker
    return worker.state if worker.membership is Membership.LIVE else worker.membership


def _reported(row: WorkerRow, value: int | None) -> str:
    return "" if value is None or not row.worker.incarnation else f"{value:,}"


def _epoch(row: WorkerRow) -> str:
    """Where somebody is that has said so: without a word everybody is in epoch 0."""
    worker = row.worker
    return f"{worker.epoch:,}" if worker.epoch or worker.step is not None else ""


def _step_time(worker: WorkerStatus) -> str:
    known = worker.step_seconds is not None and worker.membership is Membership.LIVE
    return duration(worker.step_seconds or 0.0) if known else ""


def _used(row: WorkerRow) -> ResourceUsage:
    """What a worker uses; one that is not there uses nothing that anybody measures."""
    return row.worker.resources if row.worker.membership is Membership.LIVE else ResourceUsage()


def _age(row: WorkerRow) -> str:
    if not row.worker.incarnation:
        return ""
    age = row.worker.heartbeat_age
    return f"{age:.1f} s ago" if age < 60 else f"{duration(age)} ago"


def _cpu(usage: ResourceUsage) -> str:
    return f"{usage.cpu_percent:.0f}%" if usage.memory_used_bytes else ""


def _memory(usage: ResourceUsage) -> str:
    return size(usage.memory_used_bytes) if usage.memory_used_bytes else ""


def _gpus(worker: WorkerStatus) -> str:
    gpus = worker.resources.gpus
    if not gpus or worker.membership is not Membership.LIVE:
        return str(worker.gpu_count) if worker.gpu_count else ""
    busy = sum(gpu.utilization_percent for gpu in gpus) / len(gpus)
    used = sum(gpu.memory_used_bytes for gpu in gpus)
    total = sum(gpu.memory_total_bytes for gpu in gpus)
    memory = f", memory {used / total:.0%}" if total else ""
    return f"{len(gpus)} × {busy:.0f}%{memory}"
