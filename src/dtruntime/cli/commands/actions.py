"""``strata actions``: ask something of a running job, and see what was asked."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...client import Observer
from ...display import duration
from ...errors import ConfigError
from ...types import ACTION_KINDS, Action
from ..invocation import add_url, observing, write
from .jobs import one_job

SCHEMA = 1


class ActionEntry(msgspec.Struct, frozen=True):
    """Something that is asked of a job and not done yet."""

    job: str
    action_id: str
    kind: str
    worker_id: str
    reason: str
    requested_at: float
    requested_by: str


class ActionsReport(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    url: str
    actions: tuple[ActionEntry, ...]
    schema: int = SCHEMA


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "actions",
        help="ask a running job to save, to stop, or to let a worker go",
        description="Ask something of a running job; its workers hear of it with their next "
        "heartbeat. Exit code 3: the coordinator cannot be reached, 1: the named job, worker or "
        "action does not exist.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_action(actions, "ls", "list what is asked and not done yet", _list)
    request = _add_action(actions, "request", "ask something of a job", _request)
    request.add_argument(
        "kind",
        choices=ACTION_KINDS,
        help="save at the next step; save and end the run; save and let a worker leave",
    )
    request.add_argument("--worker", default="", metavar="W", help="with drain: who is to leave")
    request.add_argument("--reason", default="", metavar="TEXT", help="for people and the journal")
    cancel = _add_action(actions, "cancel", "withdraw what was asked", _cancel)
    cancel.add_argument("action_id", metavar="ID")


def _add_action(
    actions: Any, name: str, text: str, run: Callable[[Observer, str, argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    add_url(parser)
    one = "the job (default: STRATA_JOB, else the only one, or the only one with live workers)"
    parser.add_argument("--job", help="only this job" if name == "ls" else one)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=observing(run))
    return parser


def _list(observer: Observer, url: str, options: argparse.Namespace) -> int:
    jobs = observer.jobs() if options.job is None else [options.job]
    entries = [entry for job in jobs for entry in _entries(job, observer.actions(job))]
    return _write(ActionsReport(url, tuple(entries)), options)


def _request(observer: Observer, url: str, options: argparse.Namespace) -> int:
    if options.kind == "drain" and not options.worker:
        raise ConfigError("name the worker that is to leave: --worker W ('strata status')")
    if options.kind != "drain" and options.worker:
        raise ConfigError(f"{options.kind} is for the whole job: leave --worker out")
    job = one_job(observer, url, options.job)
    key = observer.request_action(job, options.kind, options.worker, options.reason)
    found = [entry for entry in _entries(job, observer.actions(job)) if entry.action_id == key]
    return _write(ActionsReport(url, tuple(found)), options)


def _cancel(observer: Observer, url: str, options: argparse.Namespace) -> int:
    job = one_job(observer, url, options.job)
    observer.complete_action(job, options.action_id, "cancelled")
    return _write(ActionsReport(url, tuple(_entries(job, observer.actions(job)))), options)


def _entries(job: str, actions: Sequence[Action]) -> list[ActionEntry]:
    return [
        ActionEntry(
            job,
            action.action_id,
            action.kind,
            action.worker_id,
            action.reason,
            action.requested_at,
            action.requested_by,
        )
        for action in actions
    ]


def _write(report: ActionsReport, options: argparse.Namespace) -> int:
    return write(report, lambda: _view(report), options)


def _view(report: ActionsReport) -> RenderableType:
    if not report.actions:
        return Text("nothing is asked of any job that is not done", "dim")
    names = ("job", "action", "what", "worker", "asked", "by", "reason")
    rows = [_row(entry) for entry in report.actions]
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name, *texts in zip(names, *rows, strict=True):
        # Where there is little room, names of jobs and reasons are cut, and nothing else.
        width = 0 if name in ("job", "reason") else max(map(cell_len, texts))
        table.add_column(name, no_wrap=True, min_width=width or None)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _row(entry: ActionEntry) -> tuple[str, ...]:
    return (
        entry.job,
        entry.action_id,
        entry.kind,
        entry.worker_id,
        f"{duration(max(0.0, time.time() - entry.requested_at))} ago",
        entry.requested_by or "operator",
        entry.reason,
    )
