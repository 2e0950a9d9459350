"""``strata datasets``: what is registered, where it lies, and what a change would move."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ...client import DatasetRegistry, Observer
from ...display import open_console
from ...sharding.coverage_digest import Counted
from ...types import FORMATS
from ..datasets_report import find_job, read_dataset, read_list, read_plan
from ..datasets_view import dataset_view, list_view, plan_view
from ..invocation import add_url, coordinator_url, log_only_when_asked, progress_bar, write
from .jobs import RemovalReport, print_removal

if TYPE_CHECKING:
    from ...data.index import IndexProgress

FILES_SHOWN = 10
"""Files listed on a terminal; elsewhere all are."""
BAR_FROM = 50_000_000
"""Samples from which on checking the coverage takes long enough to show a bar."""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "datasets",
        help="show datasets and what a change of workers would move",
        description="Show registered datasets. Exit code 3: the coordinator cannot be reached, 1: "
        "the named job or dataset does not exist.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_action(actions, "ls", "list datasets", _list)
    show = _add_action(actions, "show", "show a dataset: files, shards, coverage of epochs", _show)
    show.add_argument("dataset_id", metavar="ID")
    _add_register(actions)
    _add_remove(actions)
    plan = _add_action(actions, "plan", "say what moves when workers join or leave", _plan)
    plan.add_argument("dataset_id", metavar="ID")
    plan.add_argument(
        "--join", type=_whole, default=0, metavar="N", help="so many newcomers (default 0)"
    )
    plan.add_argument(
        "--leave", type=_ranks, default=(), metavar="RANK[,RANK]", help="ranks that leave"
    )
    plan.add_argument(
        "--world-size",
        type=_whole,
        metavar="N",
        help="ranks to assume while no worker is registered (default: WORLD_SIZE, else 1)",
    )


def _add_remove(actions: Any) -> None:
    remove = _add_action(actions, "rm", "forget a dataset; its files stay", _remove)
    remove.add_argument("dataset_id", metavar="ID")
    remove.add_argument("--force", action="store_true", help="also while workers are live")


def _add_register(actions: Any) -> None:
    register = _add_action(actions, "register", "index files and register them", _register)
    register.add_argument("dataset_id", metavar="ID")
    register.add_argument("path", help="a file, a folder, a glob or a URL")
    register.add_argument("--format", required=True, choices=FORMATS)
    register.add_argument("--shard-size", type=_whole, metavar="N", help="samples in a shard")
    register.add_argument("--exact", action="store_true", help="shards of exactly that size")
    register.add_argument("--shuffle", action="store_true", help="shuffle every epoch")
    register.add_argument("--seed", type=_whole, default=0, metavar="N")


def _add_action(actions: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    add_url(parser, "--coordinator")
    jobs = {"ls": "only this job", "register": "its job (default: STRATA_JOB, else default)"}
    one = "the dataset's job (default: STRATA_JOB, else the only one that has it)"
    parser.add_argument("--job", help=jobs.get(name, one))
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=_with_url(run))
    return parser


def _with_url(run: Any) -> Any:
    """A command that is given the URL of its coordinator."""

    def run_with_url(options: argparse.Namespace) -> int:
        log_only_when_asked()
        url = coordinator_url(options)
        return int(run(url, options))

    return run_with_url


def _list(url: str, options: argparse.Namespace) -> int:
    report = read_list(url, options.job)
    return write(report, lambda: list_view(report), options)


def _show(url: str, options: argparse.Namespace) -> int:
    job = find_job(url, options.job, options.dataset_id)
    with _bar() as progress:
        report = read_dataset(url, job, options.dataset_id, progress)
    limit = FILES_SHOWN if open_console().is_terminal else None
    return write(report, lambda: dataset_view(report, limit), options)


def _register(url: str, options: argparse.Namespace) -> int:
    job = options.job or os.environ.get("STRATA_JOB")
    with DatasetRegistry(url, job=job, patience=5.0) as registry, _index_bar() as progress:
        registry.register(
            options.dataset_id,
            options.path,
            options.format,
            shard_size=options.shard_size,
            shuffle=options.shuffle,
            seed=options.seed,
            exact=options.exact,
            progress=progress,
        )
        job = registry.job
    report = read_dataset(url, job, options.dataset_id, lambda done, total: None)
    limit = FILES_SHOWN if open_console().is_terminal else None
    return write(report, lambda: dataset_view(report, limit), options)


def _remove(url: str, options: argparse.Namespace) -> int:
    job = find_job(url, options.job, options.dataset_id)
    with Observer(url) as observer:
        removed = observer.remove_dataset(job, options.dataset_id, force=options.force)
    report = RemovalReport(url, job, options.dataset_id, 0, 1, 0, removed.epochs)
    return print_removal(report, options)


def _plan(url: str, options: argparse.Namespace) -> int:
    job = find_job(url, options.job, options.dataset_id)
    report = read_plan(
        url, job, options.dataset_id, options.join, options.leave, options.world_size
    )
    return write(report, lambda: plan_view(report), options)


@contextmanager
def _index_bar() -> Iterator[Callable[[IndexProgress], None]]:
    """A bar on the terminal while files are indexed."""
    columns = (
        TextColumn("indexing {task.fields[files]} files"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with progress_bar(*columns) as bar:
        task = bar.add_task("index", files="", total=None)

        def advance(state: IndexProgress) -> None:
            bar.update(
                task,
                completed=state.bytes_done,
                total=state.bytes_total,
                files=f"{state.files_done} of {state.files_total}",
            )

        yield advance


@contextmanager
def _bar() -> Iterator[Counted]:
    """A bar on the terminal while many samples are counted."""
    columns = (
        TextColumn("checking the coverage"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with progress_bar(*columns) as bar:
        task = bar.add_task("coverage", visible=False)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total > BAR_FROM)

        yield advance


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(_whole(part.strip()) for part in text.split(","))
