"""The results for people, in the terminal, and for programs, as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..tables import Row, table, targets_table
from .contenders.base import Kind
from .profiles import GIB, MIB
from .results import (
    READ_NEW,
    STRATA_TENSORS,
    Increment,
    Results,
    Runner,
    Times,
)

MEGABYTE = 1e6
SAVES = (
    "save",
    "first\nstall ms",
    "stall\nms",
    "\nspread",
    "durable\nms",
    "\nspread",
    "\nMB/s",
    "of the\ndisk",
    "Strata:\nstall",
    "\ndurable",
)
LOADS = (
    "load",
    "warm\nms",
    "\nspread",
    "\nMB/s",
    "of the\nread",
    "cold\nms",
    "\nMB/s",
    "Strata:\nwarm",
)
OBJECTS = (
    "S3",
    "save\nms",
    "\nspread",
    "\nMB/s",
    "of\nraw",
    "load\nms",
    "\nspread",
    "\nMB/s",
    "of\nraw",
)
WRITERS = ("writers", "durable\nms", "\nspread", "total\nMB/s", "of the\ndisk")
INCREMENTS = ("trained and saved", "state\nMB", "full\nms", "stored\nMB", "of the\nstate", "\nms")
MEMORY = ("first save", "more memory\nMB", "of the\nstate")


def show(results: Results, console: Console) -> None:
    """Print the tables."""
    for size in _sizes(results, "local"):
        rows = [_saved(results, r) for r in results.of("local") if r.size == size]
        console.print(table(f"Saves of {title_of(size)} to the disk", SAVES, rows))
    if results.of("writers"):
        rows = [_wrote(results, r) for r in results.of("writers")]
        console.print(table("Several processes at a time", WRITERS, rows))
    for size in _sizes(results, "load"):
        rows = [_loaded(results, r) for r in results.of("load") if r.size == size]
        console.print(table(f"Loads of {title_of(size)} from the disk", LOADS, rows))
    for size in _sizes(results, "s3"):
        rows = [_object(results, r) for r in results.of("s3") if r.size == size]
        console.print(table(f"{title_of(size)} to and from an S3 server", OBJECTS, rows))
    if results.increments:
        console.print(table("While training", INCREMENTS, map(_increment, results.increments)))
    for size in _sizes(results, "memory"):
        rows = [_peak(r) for r in results.of("memory")]
        console.print(table(f"Memory while {title_of(size)} are saved", MEMORY, rows))
    console.print(targets_table(results.targets()))
    console.print(_notes(results))
    for name, error in results.failures():
        console.print(f"NOT MEASURED: {name}: {error}", style="bold red", markup=False)


def save(results: Results, path: Path) -> None:
    """Write everything that was measured."""
    document: dict[str, Any] = {
        "environment": dict(results.environment),
        "measured": [_document(results, runner) for runner in results.runners],
        "incremental": [asdict(increment) for increment in results.increments],
        "targets": [asdict(target) for target in results.targets()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def title_of(size: int) -> str:
    """A size in words."""
    return f"{size // GIB} GiB" if size >= GIB else f"{size // MIB} MiB"


def _document(results: Results, runner: Runner) -> dict[str, Any]:
    figures = ("first_stalls", "stalls", "durables", "warm_loads", "cold_loads")
    medians = {name: runner.median(name) for name in figures}
    limit = results.disk_limit(runner) if runner.part in ("local", "writers") else None
    shares = {what: results.of_raw(runner, what) for what in ("durables", "warm_loads")}
    return {
        **asdict(runner),
        "medians": {name: median for name, median in medians.items() if median is not None},
        "durable_of_disk": results.ratio(limit, runner, "durables"),
        "of_raw_obstore": {
            what: asdict(share)
            for what, share in shares.items()
            if share is not None and runner.part == "s3"
        },
    }


def _saved(results: Results, runner: Runner) -> Row:
    ours = results.find("local", STRATA_TENSORS, runner.size)
    peer = runner.kind is Kind.PEER
    limit = results.disk_limit(runner)
    durable = [] if runner.name == "memcpy" else runner.durables
    stalls = runner.stalls if runner.kind is not Kind.LIMIT or not durable else []
    return [
        _name(runner),
        _ms(runner.first_stalls if stalls else []),
        _ms(stalls),
        _spread(stalls),
        _ms(durable),
        _spread(durable),
        _rate(runner, "durables") if durable else "",
        _share(results.ratio(limit, runner, "durables")) if durable else "",
        _times(results.ratio(runner, ours, "stalls")) if peer else "",
        _times(results.ratio(runner, ours, "durables")) if peer else "",
    ]


def _wrote(results: Results, runner: Runner) -> Row:
    limit = results.disk_limit(runner)
    name = _name(runner)
    name.append(f", {runner.writers} × {title_of(runner.size // runner.writers)}")
    return [
        name,
        _ms(runner.durables),
        _spread(runner.durables),
        _rate(runner, "durables"),
        _share(results.ratio(limit, runner, "durables")),
    ]


def _loaded(results: Results, runner: Runner) -> Row:
    limit = results.find("load", READ_NEW, runner.size)
    ours = results.find("load", STRATA_TENSORS, runner.size)
    peer = runner.kind is Kind.PEER
    return [
        _name(runner),
        _ms(runner.warm_loads),
        _spread(runner.warm_loads),
        _rate(runner, "warm_loads"),
        _share(results.ratio(limit, runner, "warm_loads")),
        _ms(runner.cold_loads),
        _rate(runner, "cold_loads"),
        _times(results.ratio(runner, ours, "warm_loads")) if peer else "",
    ]


def _object(results: Results, runner: Runner) -> Row:
    cells: Row = [_name(runner)]
    for what in ("durables", "warm_loads"):
        times: Sequence[float] = getattr(runner, what)
        mean = runner.mean(what)
        share = results.of_raw(runner, what)
        cells += [
            "" if mean is None else f"{1000 * mean:,.0f}",
            _spread(times),
            "" if mean is None else f"{runner.size / mean / MEGABYTE:,.0f}",
            "" if share is None else str(share),
        ]
    return cells


def _increment(found: Increment) -> Row:
    if found.error:
        return [found.name, Text("FAILED", style="red"), *[""] * (len(INCREMENTS) - 2)]
    return [
        found.name,
        f"{found.full_bytes / MEGABYTE:.1f}",
        f"{found.full_seconds * 1000:.0f}",
        f"{statistics.median(found.written) / MEGABYTE:.2f}",
        f"{found.share:.1%}",
        _ms(found.seconds),
    ]


def _peak(runner: Runner) -> Row:
    if not runner.peaks:
        return [_name(runner), "", ""]
    peak = statistics.median(runner.peaks)
    return [_name(runner), f"{peak / MEGABYTE:,.0f}", f"{peak / runner.size:.2f}×"]


def _sizes(results: Results, part: str) -> list[int]:
    return sorted({runner.size for runner in results.of(part)})


def _name(runner: Runner) -> Text:
    if runner.error:
        return Text(runner.name, style="red")
    return Text(runner.name, style="bold" if runner.kind is Kind.STRATA else "")


def _ms(seconds: Sequence[float]) -> str:
    times = Times.of(seconds)
    if times is None:
        return ""
    value = times.median * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _spread(seconds: Sequence[float]) -> str:
    times = Times.of(seconds)
    return f"{times.spread:.0%}" if times is not None and len(seconds) > 1 else ""


def _rate(runner: Runner, what: str) -> str:
    rate = runner.rate(what)
    return "" if rate is None else f"{rate / MEGABYTE:,.0f}"


def _share(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f}×"


def _notes(results: Results) -> Text:
    return Text("\n".join(_note_lines(results)), style="dim")


def _note_lines(results: Results) -> Iterable[str]:
    yield (
        "Medians of interleaved rounds, each contender in a process of its own. Spread is worst "
        "minus best, of the median. First is the first save of a process; the others use its "
        "memory again. The stall ends when the state may be changed, durable when it is committed "
        "and flushed. The last columns say how many times as long as Strata, tensors, others take."
    )
    if results.of("local") or results.of("writers"):
        version = results.environment["fio"]
        yield (
            f"The disk is {version}, direct, with Strata's blocks and depth; below 64 MiB, which "
            "fio cannot time, the benchmark's own loop."
            if version
            else "NO FIO: the disk is the benchmark's own loop of direct writes."
        )
    if results.of("load"):
        yield (
            "Cold: the page cache was told to forget the files. Strata checks what it reads; "
            "safetensors maps the file and copies nothing."
        )
    if results.of("s3"):
        yield (
            "S3: means of rounds in which each saves or loads once, in another order each time. Of "
            "raw: of both raw obstores together, with the standard error of the rounds. Those two "
            "are the same program: what they differ by is chance."
        )
    busy = results.environment["load_average"]
    if isinstance(busy, float) and busy > 0.5:
        yield f"The machine was busy at the start (load {busy:.1f}): trust ratios."
