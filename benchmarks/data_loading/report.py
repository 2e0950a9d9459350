"""The results for people, in the terminal, and for programs, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..tables import Row, table, targets_table
from .assignment import Assigned
from .contenders import Kind
from .isolated import Times
from .results import MEGABYTE, Contest, Results, Runner, Summary
from .resume import RANKS, Resumed

_SHORT = {"slot table": "slots", "ring": "ring"}
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


def show(results: Results, console: Console) -> None:
    """Print the tables."""
    if results.assignments:
        console.print(table("Assignment", ASSIGNMENT, map(_assigned, results.assignments)))
    for contest in results.contests:
        for size in contest.batch_sizes:
            title = f"{contest.data.format}: {contest.data.rows:,} rows, batches of {size:,}"
            console.print(table(title, RATES, _rates(contest, size)))
    if results.resumed:
        title = f"Resume planning, {RANKS:,} ranks"
        console.print(table(title, RESUME, map(_resumed, results.resumed)))
    console.print(targets_table(results.targets()))
    console.print(_notes(results))
    _show_failures(results, console)


def save(results: Results, path: Path) -> None:
    """Write everything that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_document(results), indent=2) + "\n")


def as_document(results: Results) -> dict[str, Any]:
    """The results as plain data."""
    return {
        "environment": dict(results.environment),
        "assignment": [{**asdict(a), "published": a.published} for a in results.assignments],
        "loading": [_contest_document(contest) for contest in results.contests],
        "resume": [asdict(resumed) for resumed in results.resumed],
        "resume_problem": results.resume_problem,
        "targets": [asdict(target) for target in results.targets()],
    }


def _contest_document(contest: Contest) -> dict[str, Any]:
    return {
        "data": {**asdict(contest.data), "folder": contest.data.folder.name},
        "contenders": [_runner_document(contest, runner) for runner in contest.runners],
    }


def _runner_document(contest: Contest, runner: Runner) -> dict[str, Any]:
    summaries = {}
    for size in contest.batch_sizes:
        found = runner.summary(size)
        if found is not None:
            ratio = contest.ratio(found, size)
            summaries[size] = {**asdict(found), "of_plain_reading": ratio}
    return {**asdict(runner), "by_batch_size": summaries}


def _assigned(found: Assigned) -> Row:
    workers, shards = found.shape
    published = found.published if found.algorithm == "slot table" else None
    return [
        f"{_count(workers)} × {_count(shards)} {_SHORT[found.algorithm]}",
        _ms(found.cold_ms.median),
        _ms(found.cold_ms.best),
        _ms(found.join_ms.median),
        _ms(found.death_ms.median),
        f"{found.peak_bytes / MEGABYTE:.1f}",
        f"{found.max_over_mean:.3f}",
        f"{found.moves_on_join:.2f}×",
        f"{published[0]:g}" if published else "",
        f"{published[1]}" if published else "",
    ]


def _rates(contest: Contest, batch_size: int) -> Iterable[Row]:
    for runner in contest.runners:
        found = runner.summary(batch_size)
        style = "bold" if runner.entry.kind is Kind.STRATA else ""
        name = Text(runner.entry.name, style=style)
        if found is None:
            yield [name, Text("FAILED", style="red"), *[""] * (len(RATES) - 2)]
        else:
            yield [name, *_figures(contest, batch_size, runner, found)]


def _figures(contest: Contest, batch_size: int, runner: Runner, found: Summary) -> Row:
    ratio = contest.ratio(found, batch_size)
    return [
        _count(found.rate),
        _count(found.best_rate),
        f"{found.spread:.0%}",
        _ms(found.megabytes),
        f"{ratio:.0%}" if ratio is not None else "",
        _count(found.cpu_us * 1000),
        f"{runner.prepare_seconds:.2f}" if runner.prepare_seconds > 0.005 else "",
    ]


def _resumed(found: Resumed) -> Row:
    where = "" if found.live else " (measured before)"
    return [
        f"{found.who}, {found.order}{where}",
        _count(found.samples),
        _ms(found.load_ms.median) if found.who == "Strata" else "",
        _ms(found.total_ms.median),
        _best(found.total_ms) if found.live else "",
        f"{found.peak_bytes / MEGABYTE:,.1f}" if found.peak_bytes is not None else "",
    ]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def _best(times: Times) -> str:
    return _ms(times.best)


def _notes(results: Results) -> Text:
    lines = [
        "Medians of interleaved rounds, each contender in a process of its own, files in the page "
        "cache. Spread is best minus worst round, of the median. "
        "The reference's figures are its own claims, on 64 cores.",
    ]
    if results.contests:
        lines.append(
            "The limit is the fastest way to decode the same rows without a loader. MB/s are "
            "of decoded columns. Prepare is indexing for Strata, conversion for the others; "
            "Streaming and LitData converted a part of the rows only. "
            "CPU of loader processes counts where they have ended."
        )
    busy = results.environment["load_average"]
    if isinstance(busy, float) and busy > 0.5:
        lines.append(f"The machine was busy at the start (load {busy:.1f}): trust ratios.")
    return Text("\n".join(lines), style="dim")


def _show_failures(results: Results, console: Console) -> None:
    for runner in results.failures():
        needed = f" ({runner.entry.package})" if runner.entry.package else ""
        _shout(console, f"NOT MEASURED: {runner.entry.name}{needed}: {runner.error}")
    if results.resume_problem:
        _shout(console, f"NOT MEASURED: resuming with Streaming: {results.resume_problem}")


def _shout(console: Console, message: str) -> None:
    console.print(message, style="bold red", markup=False, highlight=False)
