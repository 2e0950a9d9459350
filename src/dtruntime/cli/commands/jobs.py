"""``strata jobs``: which jobs a coordinator knows, one of them in full, and how to remove one."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...client import Observer
from ...display import count, duration, open_console
from ...errors import StrataError
from ..invocation import add_url, observing, write
from ..status_report import read_status
from ..status_view import status_view

SCHEMA = 1
JOBS_NAMED = 8


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
    """What ``ls --json`` prints."""

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


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "jobs",
        help="list jobs, show one, or remove one",
        description="List the jobs that a coordinator knows, show one, or remove one. Exit code "
        "3: the coordinator cannot be reached, 1: the named job does not exist, or has live "
        "workers.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_action(actions, "ls", "list all jobs", _list)
    _add_action(actions, "show", "show one job with its workers", _show).add_argument(
        "job", metavar="JOB"
    )
    remove = _add_action(actions, "rm", "forget a job: ranks, datasets, records", _remove)
    remove.add_argument("job", metavar="JOB")
    remove.add_argument(
        "--force", action="store_true", help="also while workers are live, which are declared dead"
    )


def _add_action(
    actions: Any, name: str, text: str, run: Callable[[Observer, str, argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=observing(run))
    return parser


def one_job(observer: Observer, url: str, named: str | None) -> str:
    """The job that a command is about: the one named, the only one, or the only one at work."""
    named = named or os.environ.get("STRATA_JOB")
    if named:
        return named
    jobs = observer.job_summaries()
    at_work = [job for job in jobs if job.live_workers]
    for candidates in (jobs, at_work):
        if len(candidates) == 1:
            return candidates[0].job
    names = ", ".join(job.job for job in (at_work or jobs)[:JOBS_NAMED]) or "none"
    what = f"{len(at_work)} jobs with live workers" if at_work else f"{len(jobs)} jobs"
    raise StrataError(f"{url} has {what} ({names}): name one with --job or STRATA_JOB")


def print_removal(report: RemovalReport, options: argparse.Namespace) -> int:
    """Say what was removed."""
    return write(report, lambda: _removal_view(report), options)


def _list(observer: Observer, url: str, options: argparse.Namespace) -> int:
    entries = tuple(
        JobEntry(
            job.job,
            job.live_workers,
            job.world_size,
            job.generation,
            job.dataset_count,
            job.checkpoint_count,
            job.created_at or None,
        )
        for job in observer.job_summaries()
    )
    report = JobsReport(url, entries)
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


def _list_view(report: JobsReport) -> RenderableType:
    if not report.jobs:
        return Text(f"{report.url} has no jobs", "dim")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("job", "live", "world", "datasets", "checkpoints", "begun"):
        table.add_column(name, justify="left" if name == "job" else "right", no_wrap=True)
    for job in report.jobs:
        age = "" if job.created_at is None else duration(max(0.0, time.time() - job.created_at))
        table.add_row(
            Text(job.job),
            Text(f"{job.live_workers:,}", "green" if job.live_workers else "dim"),
            f"{job.world_size:,}" if job.world_size else "elastic",
            f"{job.dataset_count:,}",
            f"{job.checkpoint_count:,}",
            f"{age} ago" if age else "",
        )
    return table


def _removal_view(report: RemovalReport) -> Text:
    if report.dataset_id is not None:
        return Text(
            f"dataset {report.dataset_id} of job {report.job} is removed, with the record of "
            f"{count(report.epochs, 'epoch')}; its files stay where they are"
        )
    return Text(
        f"job {report.job} is removed: {count(report.datasets, 'dataset')}, the records of "
        f"{count(report.checkpoints, 'checkpoint')}, {count(report.live_workers, 'live worker')}. "
        "Stored checkpoints and data stay where they are; 'strata checkpoints rm' removes the first"
    )
