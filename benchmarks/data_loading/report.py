"""The tables and the picture of data loading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from dtruntime.bench.tables import table

from ..harness import MEGABYTE, Kind, Row, percent, three_digits
from ..plots import COLOURS, PEER, STRATA, STRATA_SECOND, Bar, Panel, milliseconds
from .assignment import Assigned
from .race import Contest
from .resume import RANKS, Resumed

ASSIGNMENT = (
    "workers × shards",
    "cold\nms",
    "\nbest",
    "join\nms",
    "death\nms",
    "peak\nMB",
    "max\n/mean",
    "join\nmoves",
    "claim\nms",
    "\nMB",
)
RATES = (
    "loader",
    "\n/s",
    "\nbest",
    "\nspread",
    "\nMB/s",
    "of\nlimit",
    "CPU ns\n/sample",
    "prep.\ns",
)
RESUME = ("resume in mid-epoch", "samples", "load\nms", "first\nbatch ms", "\nbest", "peak\nMB")


def tables(
    assigned: Sequence[Assigned], contests: Sequence[Contest], resumed: Sequence[Resumed]
) -> Iterable[Table]:
    """One for each part and batch size."""
    if assigned:
        yield table(ASSIGNMENT, map(_assigned, assigned), "Assignment")
    for contest in contests:
        for size in contest.batch_sizes:
            title = f"{contest.data.format}: {contest.data.rows:,} rows, batches of {size:,}"
            yield table(RATES, _rates(contest, size), title)
    if resumed:
        yield table(RESUME, map(_resumed, resumed), f"Resume planning, {RANKS:,} ranks")


def _assigned(one: Assigned) -> Row:
    workers, shards = one.shape
    published = one.published if one.algorithm == "slot table" else None
    times = one.cold_ms.median, one.cold_ms.best, one.join_ms.median, one.death_ms.median
    return [
        f"{_count(workers)} × {_count(shards)} {one.algorithm.removesuffix(' table')}",
        *map(three_digits, times),
        f"{one.peak_bytes / MEGABYTE:.1f}",
        f"{one.max_over_mean:.3f}",
        f"{one.moves_on_join:.2f}×",
        *((f"{published[0]:g}", str(published[1])) if published else ("", "")),
    ]


def _rates(contest: Contest, batch_size: int) -> Iterable[Row]:
    for runner in contest.runners:
        summary = runner.summary(batch_size)
        name = Text(runner.entry.name, "bold" if runner.entry.kind is Kind.STRATA else "")
        if summary is None:
            yield [name, Text("FAILED", style="red"), *[""] * (len(RATES) - 2)]
            continue
        yield [
            name,
            _count(summary.rate),
            _count(summary.best_rate),
            f"{summary.spread:.0%}",
            three_digits(summary.megabytes),
            percent(contest.ratio(summary, batch_size)),
            _count(summary.cpu_us * 1000),
            f"{runner.prepare_seconds:.2f}" if runner.prepare_seconds > 0.005 else "",
        ]


def _resumed(one: Resumed) -> Row:
    return [
        f"{one.who}, {one.order}{'' if one.live else ' (measured before)'}",
        _count(one.samples),
        three_digits(one.load_ms.median) if one.who == "Strata" else "",
        three_digits(one.total_ms.median),
        three_digits(one.total_ms.best) if one.live else "",
        f"{one.peak_bytes / MEGABYTE:,.1f}" if one.peak_bytes is not None else "",
    ]


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def panels(
    assigned: Sequence[Assigned], contests: Sequence[Contest], resumed: Sequence[Resumed]
) -> Iterable[Panel]:
    """The rates of parquet loaders, the assignment times, and the resume times."""
    for contest in contests:
        if contest.data.format == "parquet" and contest.batch_sizes:
            size = contest.batch_sizes[0]
            title = f"parquet, samples per second, batches of {size:,}"
            yield Panel(title, list(_rate_bars(contest, size)), log=True)
    yield Panel("assignment", list(_assignment_bars(assigned)), log=True)
    bars = [
        Bar(
            f"{one.who}, {one.order}, {one.samples:.0e}".replace("e+0", "e"),
            one.total_ms.median,
            milliseconds(one.total_ms.median),
            STRATA if one.who == "Strata" else PEER,
        )
        for one in resumed
    ]
    yield Panel("resume, until the first batch", bars, log=True)


def _rate_bars(contest: Contest, size: int) -> Iterable[Bar]:
    for runner, summary in sorted(contest.measured(size), key=lambda pair: -pair[1].rate):
        ratio = contest.ratio(summary, size)
        note = "" if ratio is None else f"  {ratio:.0%} of the limit"
        label = f"{summary.rate:,.0f}/s{note}"
        yield Bar(runner.entry.name, summary.rate, label, COLOURS[runner.entry.kind])


def _assignment_bars(assigned: Sequence[Assigned]) -> Iterable[Bar]:
    for one in assigned:
        name, cold = f"{one.shape[0]:,} × {one.shape[1]:,}", one.cold_ms.median
        is_ours = one.algorithm == "slot table"
        colour = STRATA if is_ours else STRATA_SECOND
        yield Bar(f"{name} {one.algorithm}", cold, milliseconds(cold), colour)
        if is_ours:
            join = one.join_ms.median
            yield Bar(f"{name} after a join", join, milliseconds(join))
            if one.published is not None:
                claim = one.published[0]
                yield Bar(f"{name} reference", claim, milliseconds(claim), PEER)
