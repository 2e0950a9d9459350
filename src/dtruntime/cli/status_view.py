"""The status as a person reads it: cut to the terminal, problems first."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..display import count, duration, size
from ..types import Action, BarrierStatus, CheckpointInfo, JobStatus, Membership
from .status_report import CoordinatorReport, StatusReport
from .worker_table import WorkerRow, rows_of, worker_lines

NAMES_SHOWN = 6
"""Workers that a barrier's line names."""
BARRIERS_SHOWN = 4
RECENT_SECONDS = 3600.0
"""Losses of this long ago are still worth a word."""
LEAST_ROWS = 4
"""With less room than this for the workers of each job, jobs get one line each."""


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


def headline(coordinator: CoordinatorReport) -> Text:
    """The coordinator in one line."""
    return Text.assemble(
        ("coordinator ", "bold"),
        coordinator.url,
        (
            f"   strata {coordinator.version}   up {duration(coordinator.uptime_seconds)}   "
            f"{coordinator.transport}   term {coordinator.term}",
            "dim",
        ),
        no_wrap=True,
        overflow="ellipsis",
    )


def staleness(stale_since: float | None) -> list[Text]:
    """A warning, if the coordinator does not answer: since when, by the monotonic clock."""
    if stale_since is None:
        return []
    age = time.monotonic() - stale_since
    warning = f"the coordinator has not answered for {age:.0f} s; this is its last status"
    return [Text(warning, "bold red", no_wrap=True, overflow="ellipsis")]


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
    return Text.assemble(
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
        no_wrap=True,
        overflow="ellipsis",
    )


def _has_epochs(job: JobStatus) -> bool:
    """Whether anybody has said where it is: without a word everybody is in epoch 0."""
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
    return [Text(f"  SAMPLES     {text}", "bold red", no_wrap=True, overflow="ellipsis")]


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
    return Text.assemble(
        (f"  {title:<12}", "dim"),
        f"step {one.step:,}, epoch {one.epoch}, {size(one.size_bytes)}, {age} ago",
        said[one.verified],
        ("   dropped next" if one.will_be_dropped else "", "yellow"),
        (f"   {one.checkpoint_id}{note}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _action_line(action: Action) -> Text:
    age = duration(max(0.0, time.time() - action.requested_at))
    return Text.assemble(
        ("  asked       ", "dim"),
        (f"{action.kind} {action.worker_id}".rstrip(), "yellow"),
        f", {age} ago by {action.requested_by or 'an operator'}",
        (f"   {action.action_id}", "dim"),
        f"   {action.reason}" if action.reason else "",
        no_wrap=True,
        overflow="ellipsis",
    )


def _barrier_line(barrier: BarrierStatus) -> Text:
    named = [
        f"{worker} ({'no step' if step is None else f'step {step:,}'})"
        for worker, step in list(barrier.missing.items())[:NAMES_SHOWN]
    ]
    missing = barrier.expected - barrier.arrived
    more = f" and {missing - len(named):,} more" if missing > len(named) else ""
    return Text.assemble(
        ("  barrier     ", "dim"),
        f"{barrier.barrier_id}: {barrier.arrived:,} of {barrier.expected:,} arrived, open for "
        f"{duration(barrier.open_seconds)}; missing ",
        (f"{', '.join(named)}{more}", "yellow"),
        no_wrap=True,
        overflow="ellipsis",
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
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("job", "generation", "live", "dead", "epoch", "barriers open", "checkpoints"):
        table.add_column(name, justify="left" if name == "job" else "right", no_wrap=True)
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
    return Group(table, Text(text, "dim", no_wrap=True, overflow="ellipsis"))
