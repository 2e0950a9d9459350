"""``strata datasets``: registered datasets, their coverage, and what a change would move."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..client import DatasetRegistry, Observer
from ..display import count, size
from ..sharding.coverage_digest import Counted
from ..types import FORMATS, DatasetSummary, EpochCoverage
from .datasets_report import (
    DatasetList,
    DatasetReport,
    PlanReport,
    find_job,
    read_dataset,
    read_list,
    read_plan,
)
from .invocation import (
    add_action,
    add_command,
    add_url,
    coordinator_url,
    cut,
    facts_table,
    limit_on_terminal,
    listing,
    progress_bar,
    write,
)
from .jobs import RemovalReport, print_removal

if TYPE_CHECKING:
    from ..data.index import IndexProgress

FILES_SHOWN = 10
"""Files listed on a terminal; elsewhere all are."""
BAR_FROM = 50_000_000
"""Samples from which on checking the coverage takes long enough to show a bar."""
COLUMNS_SHOWN = 20
RANGES_SHOWN = 6
RANKS_SHOWN = 12
_TEXT = {"job", "dataset", "format", "shuffle", "path", "file", "state", "suspect"}
"""Columns that are no numbers."""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    actions = add_command(
        subparsers,
        "datasets",
        help="show datasets and what a change of workers would move",
        description="Show registered datasets. Exit code 3: the coordinator cannot be reached, 1: "
        "the named job or dataset does not exist.",
    )
    _add_action(actions, "ls", "list datasets", _list, job="only this job")
    _add_action(actions, "show", "show a dataset: files, shards, coverage of epochs", _show)
    register = _add_action(
        actions,
        "register",
        "index files and register them",
        _register,
        job="its job (default: STRATA_JOB, else default)",
    )
    register.add_argument("path", help="a file, a folder, a glob or a URL")
    register.add_argument("--format", required=True, choices=FORMATS)
    register.add_argument("--shard-size", type=_whole, metavar="N", help="samples in a shard")
    register.add_argument("--exact", action="store_true", help="shards of exactly that size")
    register.add_argument("--shuffle", action="store_true", help="shuffle every epoch")
    register.add_argument("--seed", type=_whole, default=0, metavar="N")
    remove = _add_action(actions, "rm", "forget a dataset; its files stay", _remove)
    remove.add_argument("--force", action="store_true", help="even with live workers")
    plan = _add_action(actions, "plan", "show what moves when workers join or leave", _plan)
    plan.add_argument(
        "--join", type=_whole, default=0, metavar="N", help="number of new workers (default 0)"
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


def _add_action(
    actions: Any,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
    job: str = "the dataset's job (default: STRATA_JOB, else the only one that has it)",
) -> argparse.ArgumentParser:
    parser = add_action(actions, name, text, run)
    add_url(parser, "--coordinator")
    parser.add_argument("--job", help=job)
    if name != "ls":
        parser.add_argument("dataset_id", metavar="ID")
    return parser


def _list(options: argparse.Namespace) -> int:
    report = read_list(coordinator_url(options), options.job)
    return write(report, lambda: _list_view(report), options)


def _show(options: argparse.Namespace) -> int:
    url, job = _find(options)
    with _coverage_bar() as progress:
        report = read_dataset(url, job, options.dataset_id, progress)
    return write(report, lambda: _dataset_view(report), options)


def _register(options: argparse.Namespace) -> int:
    url, job = coordinator_url(options), options.job or os.environ.get("STRATA_JOB")
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
    return write(report, lambda: _dataset_view(report), options)


def _remove(options: argparse.Namespace) -> int:
    url, job = _find(options)
    with Observer(url) as observer:
        removed = observer.remove_dataset(job, options.dataset_id, force=options.force)
    report = RemovalReport(url, job, options.dataset_id, 0, 1, 0, removed.epochs)
    return print_removal(report, options)


def _plan(options: argparse.Namespace) -> int:
    url, job = _find(options)
    report = read_plan(
        url, job, options.dataset_id, options.join, options.leave, options.world_size
    )
    return write(report, lambda: _plan_view(report), options)


def _find(options: argparse.Namespace) -> tuple[str, str]:
    """The coordinator, and the job of the dataset."""
    url = coordinator_url(options)
    return url, find_job(url, options.job, options.dataset_id)


@contextmanager
def _index_bar() -> Iterator[Callable[[IndexProgress], None]]:
    """A bar on the terminal while files are indexed."""
    title = TextColumn("indexing {task.fields[files]} files")
    with progress_bar(title, BarColumn(), DownloadColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("index", files="", total=None)

        def advance(state: IndexProgress) -> None:
            files = f"{state.files_done} of {state.files_total}"
            bar.update(task, completed=state.bytes_done, total=state.bytes_total, files=files)

        yield advance


@contextmanager
def _coverage_bar() -> Iterator[Counted]:
    """A bar on the terminal while many samples are counted."""
    title = TextColumn("checking the coverage")
    with progress_bar(title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
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


def _list_view(report: DatasetList) -> RenderableType:
    if not report.datasets:
        return Text(
            f"no datasets at {report.url}. In a training process:\n\n"
            "  from dtruntime import DatasetRegistry\n"
            f'  DatasetRegistry("{report.url}").register("images", "/data/images", "parquet")'
        )
    names = ("job", "dataset", "format", "samples", "shards", "bytes", "shuffle", "path")
    table = listing(names, _TEXT)
    for item in report.datasets:
        dataset = item.dataset
        table.add_row(
            item.job,
            Text(dataset.dataset_id, "bold"),
            dataset.format or "–",
            f"{dataset.total_samples:,}",
            f"{dataset.shard_count:,}",
            size(dataset.total_bytes) if dataset.fingerprint else Text("?", "dim"),
            f"seed {dataset.seed}" if dataset.shuffle else "no",
            Text(dataset.path) if dataset.path else Text("no files", "dim"),
        )
    return table


def _dataset_view(report: DatasetReport) -> RenderableType:
    name = report.dataset.dataset_id
    head = Text.assemble(("dataset ", "bold"), (name, "bold"), f" of job {report.job}")
    parts: list[RenderableType] = [head, facts_table(_facts(report))]
    if report.files:
        files, hidden = cut(report.files, limit_on_terminal(FILES_SHOWN), "file")
        table = listing(("samples", "file"), _TEXT)
        for file in files:
            table.add_row(f"{file.samples:,}", Text(file.path))
        parts += [Text(), table, *hidden]
    return Group(*parts, Text(), _coverage(report))


def _plan_view(report: PlanReport) -> RenderableType:
    ranks = f"{count(report.present_before, 'rank')} now, {report.present_after:,} then"
    head = Text.assemble(
        ("plan ", "bold"), (report.dataset_id, "bold"), f" of job {report.job}: {ranks}"
    )
    moved = f"{report.shards_moved:,} of {count(report.shard_count, 'shard')}"
    amounts = []
    if report.samples_moved is not None:
        amounts.append(count(report.samples_moved, "sample"))
    if report.bytes_moved is not None:
        amounts.append(size(report.bytes_moved))
    moved += f" ({report.fraction_moved:.1%}){': ' if amounts else ''}{', '.join(amounts)}"
    lines = {
        "joining": _named_ranks(report.joining),
        "leaving": _named_ranks(report.leaving),
        "moves": moved,
        "fewest": f"{count(report.fewest_shards, 'shard')} would have to move in any case",
        "per rank": f"{_span(report.least_load, report.most_load, 'shard')} afterwards",
        "gained": _tally(report.gained),
        "given up": _tally(report.lost),
    }
    return Group(
        head, *(Text.assemble((f"  {name:<10}", "dim"), text) for name, text in lines.items())
    )


def _facts(report: DatasetReport) -> Iterator[tuple[str, RenderableType]]:
    dataset, share = report.dataset, report.share
    yield "path", dataset.path or "no files"
    if dataset.format:
        yield "format", dataset.format
    yield "samples", f"{dataset.total_samples:,}"
    exact = "exactly" if dataset.exact or not dataset.fingerprint else "about"
    yield "shards", f"{dataset.shard_count:,} of {exact} {count(dataset.shard_size, 'sample')}"
    yield "order", f"shuffled with seed {dataset.seed}" if dataset.shuffle else "not shuffled"
    if dataset.path:
        files = f"{count(len(report.files), 'file')}, {size(dataset.total_bytes)}, "
        files += f"fingerprint {dataset.fingerprint}"
        yield "files", files if dataset.fingerprint else Text("not indexed yet", "yellow")
        yield "columns", _some(dataset.columns, COLUMNS_SHOWN) or "unknown"
    yield "ranks", _members(dataset)
    if share is None:
        yield "per rank", "a part of every batch (global order), not shards of its own"
    else:
        shards = _span(share.least_shards, share.most_shards, "shard")
        samples = _span(share.least_samples, share.most_samples, "sample")
        yield "per rank", f"{shards}, {samples}"
    yield from dataset.metadata.items()


def _members(dataset: DatasetSummary) -> RenderableType:
    if not dataset.slot_count:
        return Text("no worker is registered; one rank is assumed", "dim")
    if not dataset.dead_slots:
        return f"{dataset.slot_count:,}"
    absent = f"{_named_ranks(dataset.dead_slots)} absent"
    return Text.assemble(f"{dataset.slot_count:,}, ", (absent, "yellow"))


def _coverage(report: DatasetReport) -> RenderableType:
    if report.coverage_unknown:
        return Text(f"coverage unknown: {report.coverage_unknown}", "yellow")
    if not report.coverage:
        return Text("no epoch has been consumed yet", "dim")
    names = ("epoch", "state", "covered", "missing", "repeated", "assumed", "dropped", "suspect")
    table = listing(names, _TEXT, wrapped="suspect")
    for epoch in report.coverage:
        ended = epoch.complete or epoch.ended_incomplete
        ranges = [f"{start:,}–{stop - 1:,}" for start, stop in _joined(epoch.suspect)]
        table.add_row(
            str(epoch.epoch),
            _state(epoch, being_read=report.live_workers > 0),
            f"{epoch.covered:,} of {epoch.total:,}",
            Text(f"{epoch.missing:,}", "red" if ended and epoch.missing else ""),
            Text(f"{epoch.repeated:,}", "red" if epoch.repeated else ""),
            Text(f"{epoch.assumed:,}", "yellow" if epoch.assumed else ""),
            f"{epoch.dropped:,}",
            _some(ranges, RANGES_SHOWN),
        )
    return table


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in rising order, with neighbours made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _state(epoch: EpochCoverage, *, being_read: bool) -> Text:
    if epoch.exact:
        return Text("exactly once", "green")
    if epoch.ended_incomplete:
        return Text("SAMPLES MISSING", "bold red")
    if not epoch.complete:
        return Text("running") if being_read else Text("left unfinished", "yellow")
    if epoch.missing or epoch.repeated:
        return Text("not exact", "bold red")
    return Text("assumed", "yellow")


def _span(least: int, most: int, noun: str) -> str:
    return count(least, noun) if least == most else f"{least:,} to {count(most, noun)}"


def _some(texts: Sequence[str], limit: int) -> str:
    """The first ones, and how many more there are."""
    more = f" and {len(texts) - limit:,} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def _named_ranks(ranks: Sequence[int]) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {_some([*map(str, ranks)], RANKS_SHOWN)}" if ranks else "none"


def _tally(shards: dict[int, int]) -> str:
    parts = [f"rank {rank}: {number:,}" for rank, number in sorted(shards.items())]
    return _some(parts, RANKS_SHOWN) or "nothing"
