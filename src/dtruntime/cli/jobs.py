"""``strata jobs``, ``strata actions`` and ``strata outcome``: the jobs of a coordinator."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..client import Observer
from ..display import count, duration, open_console, plain
from ..errors import ConfigError, StrataError
from ..retention import FINISHED_KEY
from ..types import ACTION_KINDS, JobStatus, Membership, WorkerStatus
from .invocation import (
    add_action,
    add_command,
    add_url,
    coordinator_url,
    listing,
    observing,
    whole_between,
    write,
)
from .status_report import read_status, status_view

SCHEMA = 1
JOBS_NAMED = 8
FINISHED = "finished"
"""The reason that a worker gives when it leaves a run that has finished."""
ONE_JOB = "the job (default: STRATA_JOB, else the only one, or the only one with live workers)"


class JobEntry(msgspec.Struct, frozen=True):
    """A job in a few words."""

    job: str
    live_workers: int
    world_size: int
    """0: elastic."""
    generation: int
    dataset_count: int
    checkpoint_count: int
    created_at: float | None
    """Seconds since 1970; null: not known."""


class JobsReport(msgspec.Struct, frozen=True):
    """What ``strata jobs ls --json`` prints."""

    url: str
    jobs: tuple[JobEntry, ...]
    schema: int = SCHEMA


class RemovalReport(msgspec.Struct, frozen=True):
    """What ``rm --json`` prints, of a job or of a dataset."""

    url: str
    job: str
    dataset_id: str | None
    """Null: the whole job was removed."""
    live_workers: int
    datasets: int
    checkpoints: int
    """How many records of them; the stored files stay."""
    epochs: int
    schema: int = SCHEMA


class ActionEntry(msgspec.Struct, frozen=True):
    """A request to a job that is not done yet."""

    job: str
    action_id: str
    kind: str
    worker_id: str
    reason: str
    requested_at: float
    requested_by: str


class ActionsReport(msgspec.Struct, frozen=True):
    """What ``strata actions --json`` prints."""

    url: str
    actions: tuple[ActionEntry, ...]
    schema: int = SCHEMA


def add_parser(subparsers: Any) -> None:
    """Declare ``strata jobs``."""
    actions = add_command(
        subparsers,
        "jobs",
        help="list jobs, show one, or remove one",
        description="List the jobs that a coordinator knows, show one, or remove one. Exit code "
        "3: the coordinator cannot be reached, 1: the named job does not exist, or has live "
        "workers.",
    )
    show = add_action(actions, "show", "show one job with its workers", observing(_show))
    remove = add_action(actions, "rm", "forget a job: ranks, datasets, records", observing(_remove))
    remove.add_argument(
        "--force", action="store_true", help="even with live workers, which are declared dead"
    )
    for parser in (show, remove):
        parser.add_argument("job", metavar="JOB")
    for parser in (add_action(actions, "ls", "list all jobs", observing(_list)), show, remove):
        add_url(parser)


def add_actions_parser(subparsers: Any) -> None:
    """Declare ``strata actions``."""
    actions = add_command(
        subparsers,
        "actions",
        help="ask a running job to save, to stop, or to let a worker go",
        description="Send a request to a running job; its workers receive it with their next "
        "heartbeat. Exit code 3: the coordinator cannot be reached, 1: the named job, worker or "
        "action does not exist.",
    )
    pending = add_action(
        actions, "ls", "list requests that are not done yet", observing(_list_actions)
    )
    pending.add_argument("--job", help="only this job")
    request = add_action(actions, "request", "send a request to a job", observing(_request))
    request.add_argument(
        "kind",
        choices=ACTION_KINDS,
        help="save at the next step; save and end the run; save and let a worker leave",
    )
    request.add_argument("--worker", default="", metavar="W", help="with drain: the worker")
    request.add_argument("--reason", default="", metavar="TEXT", help="for people and the journal")
    cancel = add_action(actions, "cancel", "withdraw a request", observing(_cancel))
    cancel.add_argument("action_id", metavar="ID")
    for parser in (request, cancel):
        parser.add_argument("--job", help=ONE_JOB)
    for parser in (pending, request, cancel):
        add_url(parser)


def add_outcome_parser(subparsers: Any) -> None:
    """Declare ``strata outcome``."""
    parser = subparsers.add_parser(
        "outcome",
        help="give the exit status that a launcher should end with",
        description="After all workers have ended: exit with 0 when the run finished although "
        "workers were lost, otherwise with the given status. Also with that status when the "
        "coordinator cannot be reached or does not know the job.",
    )
    add_url(parser)
    parser.add_argument("--job", help="the job (default: STRATA_JOB, else the only one)")
    parser.add_argument(
        "--status",
        type=whole_between(0, 255),
        required=True,
        help="the worst exit status of the workers, such as that of srun",
    )
    parser.set_defaults(run=_outcome)


def one_job(observer: Observer, url: str, named: str | None) -> str:
    """The job that a command is about: the one named, the only one, or the only active one."""
    named = named or os.environ.get("STRATA_JOB")
    if named:
        return named
    jobs = observer.job_summaries()
    active = [job for job in jobs if job.live_workers]
    for candidates in (jobs, active):
        if len(candidates) == 1:
            return candidates[0].job
    names = ", ".join(job.job for job in (active or jobs)[:JOBS_NAMED]) or "none"
    what = f"{len(active)} jobs with live workers" if active else f"{len(jobs)} jobs"
    raise StrataError(f"{url} has {what} ({names}): name one with --job or STRATA_JOB")


def _list(observer: Observer, url: str, options: argparse.Namespace) -> int:
    entries = []
    for job in observer.job_summaries():
        entry = msgspec.convert(job, JobEntry, from_attributes=True)
        entries.append(msgspec.structs.replace(entry, created_at=job.created_at or None))
    report = JobsReport(url, tuple(entries))
    return write(report, lambda: _list_view(report), options)


def _show(observer: Observer, url: str, options: argparse.Namespace) -> int:
    report = read_status(observer, url, options.job)
    return write(report, lambda: status_view(report, open_console().width, None), options)


def _remove(observer: Observer, url: str, options: argparse.Namespace) -> int:
    removed = observer.remove_job(options.job, force=options.force)
    report = RemovalReport(
        url, options.job, None, removed.live_workers, removed.datasets, removed.checkpoints, 0
    )
    return print_removal(report, options)


def print_removal(report: RemovalReport, options: argparse.Namespace) -> int:
    """Say what was removed."""
    if report.dataset_id is not None:
        text = (
            f"dataset {report.dataset_id} of job {report.job} is removed, with the record of "
            f"{count(report.epochs, 'epoch')}; its files stay where they are"
        )
    else:
        live = count(report.live_workers, "live worker")
        text = (
            f"job {report.job} is removed: {count(report.datasets, 'dataset')}, the records of "
            f"{count(report.checkpoints, 'checkpoint')}, {live}. Stored checkpoints and data stay "
            "where they are; 'strata checkpoints rm' removes the first"
        )
    return write(report, lambda: Text(text), options)


def _list_view(report: JobsReport) -> RenderableType:
    if not report.jobs:
        return Text(f"{report.url} has no jobs", "dim")
    table = listing(("job", "live", "world", "datasets", "checkpoints", "begun"), {"job"})
    for job in report.jobs:
        table.add_row(
            Text(job.job),
            Text(f"{job.live_workers:,}", "green" if job.live_workers else "dim"),
            f"{job.world_size:,}" if job.world_size else "elastic",
            f"{job.dataset_count:,}",
            f"{job.checkpoint_count:,}",
            _age(job.created_at) if job.created_at else "",
        )
    return table


def _age(at: float) -> str:
    return f"{duration(max(0.0, time.time() - at))} ago"


def _list_actions(observer: Observer, url: str, options: argparse.Namespace) -> int:
    jobs = observer.jobs() if options.job is None else [options.job]
    return _write_actions(url, [e for job in jobs for e in _entries(observer, job)], options)


def _request(observer: Observer, url: str, options: argparse.Namespace) -> int:
    if options.kind == "drain" and not options.worker:
        raise ConfigError("name the worker that is to leave: --worker W ('strata status')")
    if options.kind != "drain" and options.worker:
        raise ConfigError(f"{options.kind} is for the whole job: leave --worker out")
    job = one_job(observer, url, options.job)
    key = observer.request_action(job, options.kind, options.worker, options.reason)
    return _write_actions(url, [e for e in _entries(observer, job) if e.action_id == key], options)


def _cancel(observer: Observer, url: str, options: argparse.Namespace) -> int:
    job = one_job(observer, url, options.job)
    observer.complete_action(job, options.action_id, "cancelled")
    return _write_actions(url, _entries(observer, job), options)


def _entries(observer: Observer, job: str) -> list[ActionEntry]:
    names = ActionEntry.__struct_fields__[1:]
    actions = observer.actions(job)
    return [ActionEntry(job, *(getattr(action, name) for name in names)) for action in actions]


def _write_actions(url: str, entries: list[ActionEntry], options: argparse.Namespace) -> int:
    report = ActionsReport(url, tuple(entries))
    return write(report, lambda: _actions_view(report), options)


def _actions_view(report: ActionsReport) -> RenderableType:
    if not report.actions:
        return Text("no job has requests that are not done", "dim")
    names = ("job", "action", "what", "worker", "asked", "by", "reason")
    rows = [
        (
            entry.job,
            entry.action_id,
            entry.kind,
            entry.worker_id,
            _age(entry.requested_at),
            entry.requested_by or "operator",
            entry.reason,
        )
        for entry in report.actions
    ]
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name, *texts in zip(names, *rows, strict=True):
        # Where there is little room, names of jobs and reasons are cut, and nothing else.
        width = 0 if name in ("job", "reason") else max(map(cell_len, texts))
        table.add_column(name, no_wrap=True, min_width=width or None)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _outcome(options: argparse.Namespace) -> int:
    """Print how the run ended, and return the exit status."""
    status = int(options.status)
    url = coordinator_url(options)
    try:
        with Observer(url) as observer:
            job = observer.status(one_job(observer, url, options.job))
    except StrataError as exc:
        print(f"strata: cannot tell how the run ended: {plain(str(exc))}", file=sys.stderr)
        return status
    latest = job.latest_checkpoint
    saved = "nothing was saved" if latest is None else f"the last save is of step {latest.step}"
    reasons = ", ".join(f"{w.worker_id} ({w.detail or w.membership})" for w in _lost_workers(job))
    if not _has_finished(job):
        text = f"has not finished: {saved}"
    else:
        text = f"has finished: {saved}{f'; without {reasons}' if reasons else ''}"
    print(plain(f"job {job.job} {text}; exit status {status_of(job, status)}"))
    return status_of(job, status)


def status_of(job: JobStatus, status: int) -> int:
    """0 when the run finished and the loss of workers explains the status, otherwise the status.

    A worker that has failed after the run, while it exported the model for example, is not
    explained by a loss: to the coordinator it is one that has finished.
    """
    return 0 if _has_finished(job) and (_lost_workers(job) or job.loss_ages) else status


def _has_finished(job: JobStatus) -> bool:
    """Whether the run saved its end, and a worker left because of that."""
    latest = job.latest_checkpoint
    if latest is None or FINISHED_KEY not in latest.metadata:
        return False
    return any(w.membership is Membership.LEFT and w.detail == FINISHED for w in job.workers)


def _lost_workers(job: JobStatus) -> list[WorkerStatus]:
    """Workers that did not reach the end: dead, failed, or silent since all have ended."""
    expected = [w for w in job.workers if w.membership is not Membership.EXPECTED]
    return [w for w in expected if w.membership is not Membership.LEFT or w.detail != FINISHED]
