"""Datasets as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..display import count, size
from ..types import DatasetSummary, EpochCoverage
from .datasets_report import DatasetList, DatasetReport, FileReport, PlanReport

COLUMNS_SHOWN = 20
RANGES_SHOWN = 6
RANKS_SHOWN = 12


def list_view(report: DatasetList) -> RenderableType:
    """One line for each dataset."""
    if not report.datasets:
        return Text(
            f"no datasets at {report.url}. In a training process:\n\n"
            "  from dtruntime import DatasetRegistry\n"
            f'  DatasetRegistry("{report.url}").register("images", "/data/images", "parquet")'
        )
    table = _table("job", "dataset", "format", "samples", "shards", "bytes", "shuffle", "path")
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


def dataset_view(report: DatasetReport, files_shown: int | None) -> RenderableType:
    """Everything about one dataset; ``files_shown`` limits the files, ``None`` shows all."""
    dataset = report.dataset
    head = Text.assemble(
        ("dataset ", "bold"), (dataset.dataset_id, "bold"), f" of job {report.job}"
    )
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(report):
        facts.add_row(Text(f"  {name}"), Text(value) if isinstance(value, str) else value)
    parts: list[RenderableType] = [head, facts]
    if report.files:
        parts += [Text(), *_files(report.files, files_shown)]
    return Group(*parts, Text(), _coverage(report))


def plan_view(report: PlanReport) -> RenderableType:
    """What moves, and from and to whom."""
    moved = f"{report.shards_moved:,} of {count(report.shard_count, 'shard')}"
    lines = [
        Text.assemble(
            ("plan ", "bold"),
            (report.dataset_id, "bold"),
            f" of job {report.job}: {count(report.present_before, 'rank')} now, "
            f"{report.present_after:,} then",
        ),
        _line("joining", _ranks(report.joining)),
        _line("leaving", _ranks(report.leaving)),
        _line("moves", f"{moved} ({report.fraction_moved:.1%}){_amounts(report)}"),
        _line("fewest", f"{count(report.fewest_shards, 'shard')} would have to move in any case"),
        _line("per rank", _span(report.least_load, report.most_load, "shard") + " afterwards"),
        _line("gained", _tally(report.gained)),
        _line("given up", _tally(report.lost)),
    ]
    return Group(*lines)


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
        yield "files", _seen(report)
        yield "columns", _columns(dataset)
    yield "ranks", _members(dataset)
    if share is None:
        yield "per rank", "a part of every batch (global order), not shards of its own"
    else:
        shards = _span(share.least_shards, share.most_shards, "shard")
        samples = _span(share.least_samples, share.most_samples, "sample")
        yield "per rank", f"{shards}, {samples}"
    yield from dataset.metadata.items()


def _seen(report: DatasetReport) -> RenderableType:
    dataset = report.dataset
    if not dataset.fingerprint:
        return Text("not seen by anybody", "yellow")
    return (
        f"{count(len(report.files), 'file')}, {size(dataset.total_bytes)}, "
        f"fingerprint {dataset.fingerprint}"
    )


def _columns(dataset: DatasetSummary) -> str:
    shown = ", ".join(dataset.columns[:COLUMNS_SHOWN])
    more = len(dataset.columns) - COLUMNS_SHOWN
    return (f"{shown} and {more:,} more" if more > 0 else shown) or "unknown"


def _members(dataset: DatasetSummary) -> RenderableType:
    if not dataset.slot_count:
        return Text("no worker is registered; one rank is assumed", "dim")
    if not dataset.dead_slots:
        return f"{dataset.slot_count:,}"
    absent = f"{_ranks(dataset.dead_slots)} absent"
    return Text.assemble(f"{dataset.slot_count:,}, ", (absent, "yellow"))


def _files(files: tuple[FileReport, ...], limit: int | None) -> Iterator[RenderableType]:
    shown = files if limit is None or len(files) <= limit + 1 else files[:limit]
    table = _table("samples", "file")
    for file in shown:
        table.add_row(f"{file.samples:,}", Text(file.path))
    yield table
    if len(shown) < len(files):
        yield Text(f"  {count(len(files) - len(shown), 'file')} not shown", "dim")


def _coverage(report: DatasetReport) -> RenderableType:
    if report.coverage_unknown:
        return Text(f"coverage unknown: {report.coverage_unknown}", "yellow")
    if not report.coverage:
        return Text("no epoch has been consumed yet", "dim")
    names = ("epoch", "state", "covered", "missing", "repeated", "assumed", "dropped", "suspect")
    table = _table(*names)
    for epoch in report.coverage:
        table.add_row(*_epoch(epoch, being_read=report.live_workers > 0))
    return table


def _epoch(epoch: EpochCoverage, *, being_read: bool) -> Iterator[RenderableType]:
    yield str(epoch.epoch)
    yield _state(epoch, being_read=being_read)
    yield f"{epoch.covered:,} of {epoch.total:,}"
    ended = epoch.complete or epoch.ended_incomplete
    yield Text(f"{epoch.missing:,}", "red" if ended and epoch.missing else "")
    yield Text(f"{epoch.repeated:,}", "red" if epoch.repeated else "")
    yield Text(f"{epoch.assumed:,}", "yellow" if epoch.assumed else "")
    yield f"{epoch.dropped:,}"
    ranges = [f"{start:,}–{stop - 1:,}" for start, stop in _joined(epoch.suspect)]
    more = len(ranges) - RANGES_SHOWN
    yield ", ".join(ranges[:RANGES_SHOWN]) + (f" and {more} more" if more > 0 else "")


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


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    words = {"job", "dataset", "format", "shuffle", "path", "file", "state", "suspect"}
    for name in names:
        left = name in words
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "suspect")
    return table


def _line(name: str, text: str) -> Text:
    return Text.assemble((f"  {name:<10}", "dim"), text)


def _amounts(report: PlanReport) -> str:
    parts = []
    if report.samples_moved is not None:
        parts.append(count(report.samples_moved, "sample"))
    if report.bytes_moved is not None:
        parts.append(size(report.bytes_moved))
    return f": {', '.join(parts)}" if parts else ""


def _span(least: int, most: int, noun: str) -> str:
    return count(least, noun) if least == most else f"{least:,} to {count(most, noun)}"


def _ranks(ranks: Iterable[int]) -> str:
    known = list(ranks)
    if not known:
        return "nobody"
    shown = ", ".join(str(rank) for rank in known[:RANKS_SHOWN])
    more = len(known) - RANKS_SHOWN
    return f"rank{'s' * (len(known) > 1)} {shown}{f' and {more:,} more' if more > 0 else ''}"


def _tally(shards: dict[int, int]) -> str:
    parts = [f"rank {rank}: {number:,}" for rank, number in sorted(shards.items())]
    more = len(parts) - RANKS_SHOWN
    return ", ".join(parts[:RANKS_SHOWN]) + (f" and {more:,} more" if more > 0 else "") or "nothing"
