"""The tables, the targets and the picture of checkpoint throughput."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from dtruntime.bench.report import Times
from dtruntime.bench.tables import table

from ..harness import MEGABYTE, Kind, Row, Target, percent, three_digits
from ..plots import COLOURS, Bar, Panel, milliseconds
from .contenders.base import TINY
from .results import (
    GIB,
    MEMCPY,
    READ_NEW,
    STRATA_BYTES,
    STRATA_TENSORS,
    Increment,
    Results,
    Runner,
    title_of,
)

BYTES_STALL_MS = 1.0
STALL_OF_MEMCPY = 1.3
DURABLE_OF_DISK = 0.9
S3_OF_RAW = 0.95
PEAK_OF_STATE = 1.1
MOST_STORED = {"LoRA-like: adapters, optimizer": 0.05, "bf16, weights": 0.4}
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
SMALL = ("µs per tensor", "first\nstall", "\nstall", "\ndurable", "\nload")
INCREMENTS = ("trained and saved", "state\nMB", "full\nms", "stored\nMB", "of the\nstate", "\nms")
MEMORY = ("first save", "more memory\nMB", "of the\nstate")


def tables(results: Results) -> Iterable[Table]:
    """One for each part and size."""
    for part, title, headings, row in (
        ("local", "Saves of {} to the disk", SAVES, _saved),
        ("load", "Loads of {} from the disk", LOADS, _loaded),
        ("s3", "{} to and from an S3 server", OBJECTS, _object),
        ("memory", "Memory while {} are saved", MEMORY, _peak),
    ):
        for size in results.sizes(part):
            rows = [row(results, one) for one in results.of(part) if one.size == size]
            yield table(headings, rows, title.format(title_of(size)))
    if writers := results.of("writers"):
        rows = [_wrote(results, one) for one in writers]
        yield table(WRITERS, rows, "Several processes at a time")
    if small := results.of("small-tensors"):
        title = f"{small[0].size // (4 * TINY):,} tensors of {4 * TINY} bytes"
        yield table(SMALL, map(_small, small), title)
    if results.increments:
        yield table(INCREMENTS, map(_increment, results.increments), "While training")


def _saved(results: Results, runner: Runner) -> Row:
    ours = results.find("local", STRATA_TENSORS, runner.size)
    peer = runner.kind is Kind.PEER
    durable = [] if runner.name == MEMCPY else runner.durables
    stalls = runner.stalls if runner.kind is not Kind.LIMIT or not durable else []
    return [
        _name(runner),
        _ms(runner.first_stalls if stalls else []),
        _ms(stalls),
        _spread(stalls),
        _ms(durable),
        _spread(durable),
        _rate(runner, "durables") if durable else "",
        percent(results.of_disk(runner)) if durable else "",
        _factor(results.ratio(runner, ours, "stalls")) if peer else "",
        _factor(results.ratio(runner, ours, "durables")) if peer else "",
    ]


def _wrote(results: Results, runner: Runner) -> Row:
    name = _name(runner)
    name.append(f", {runner.writers} × {title_of(runner.size // runner.writers)}")
    times = runner.durables
    share = percent(results.of_disk(runner))
    return [name, _ms(times), _spread(times), _rate(runner, "durables"), share]


def _loaded(results: Results, runner: Runner) -> Row:
    limit = results.find("load", READ_NEW, runner.size)
    ours = results.find("load", STRATA_TENSORS, runner.size)
    return [
        _name(runner),
        _ms(runner.warm_loads),
        _spread(runner.warm_loads),
        _rate(runner, "warm_loads"),
        percent(results.ratio(limit, runner, "warm_loads")),
        _ms(runner.cold_loads),
        _rate(runner, "cold_loads"),
        _factor(results.ratio(runner, ours, "warm_loads")) if runner.kind is Kind.PEER else "",
    ]


def _object(results: Results, runner: Runner) -> Row:
    cells: Row = [_name(runner)]
    for what in ("durables", "warm_loads"):
        mean, share = runner.mean(what), results.of_raw(runner, what)
        cells += [
            "" if mean is None else f"{1000 * mean:,.0f}",
            _spread(getattr(runner, what)),
            "" if mean is None else f"{runner.size / mean / MEGABYTE:,.0f}",
            "" if share is None else str(share),
        ]
    return cells


def _small(runner: Runner) -> Row:
    medians = [runner.median(w) for w in ("first_stalls", "stalls", "durables", "warm_loads")]
    each = 1e6 * 4 * TINY / runner.size
    return [_name(runner), *("" if m is None else f"{m * each:.1f}" for m in medians)]


def _increment(one: Increment) -> Row:
    if one.error:
        return [one.name, Text("FAILED", style="red"), *[""] * (len(INCREMENTS) - 2)]
    return [
        one.name,
        f"{one.full_bytes / MEGABYTE:.1f}",
        f"{one.full_seconds * 1000:.0f}",
        f"{statistics.median(one.written) / MEGABYTE:.2f}",
        f"{one.share:.1%}",
        _ms(one.seconds),
    ]


def _peak(results: Results, runner: Runner) -> Row:
    if not runner.peaks:
        return [_name(runner), "", ""]
    peak = statistics.median(runner.peaks)
    return [_name(runner), f"{peak / MEGABYTE:,.0f}", f"{peak / runner.size:.2f}×"]


def _name(runner: Runner) -> Text:
    if runner.error:
        return Text(runner.name, style="red")
    return Text(runner.name, style="bold" if runner.kind is Kind.STRATA else "")


def _ms(seconds: Sequence[float]) -> str:
    return three_digits(statistics.median(seconds) * 1000) if seconds else ""


def _spread(seconds: Sequence[float]) -> str:
    return f"{Times.of(seconds).spread:.0%}" if len(seconds) > 1 else ""


def _rate(runner: Runner, what: str) -> str:
    rate = runner.rate(what)
    return "" if rate is None else f"{rate / MEGABYTE:,.0f}"


def _factor(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f}×"


def targets(results: Results) -> Iterable[Target]:
    """Every target whose measurement was made."""
    plain, tensors = (results.find("local", n, GIB) for n in (STRATA_BYTES, STRATA_TENSORS))
    if plain is not None and (stall := plain.median("stalls")) is not None:
        wanted, met = f"< {BYTES_STALL_MS:g} ms", stall * 1000 < BYTES_STALL_MS
        yield Target("stall, 1 GiB of bytes", wanted, f"{stall * 1000:.2f} ms", met)
    ratio = results.ratio(tensors, results.find("local", MEMCPY, GIB), "stalls")
    if ratio is not None:
        wanted, met = f"≤ {STALL_OF_MEMCPY:g}× memcpy", ratio <= STALL_OF_MEMCPY
        yield Target("stall, 1 GiB of tensors", wanted, f"{ratio:.2f}×", met)
    together = [runner for runner in results.of("writers") if runner.kind is Kind.STRATA]
    for runner in [plain, tensors, *together]:
        limit = results.disk_limit(runner) if runner is not None else None
        ratio = results.ratio(limit, runner, "durables")
        if runner is not None and limit is not None and ratio is not None:
            what = runner.name if runner.part == "local" else f"writers: {runner.writers}"
            wanted = f"≥ {DURABLE_OF_DISK:.0%} of {limit.name}"
            yield Target(f"durable, {what}", wanted, f"{ratio:.0%}", ratio >= DURABLE_OF_DISK)
    yield from _s3_targets(results)
    for one in results.increments:
        most = MOST_STORED.get(one.name)
        if most is not None and not one.error:
            wanted = f"≤ {most:.0%} of the state"
            yield Target(one.name, wanted, f"{one.share:.1%}", one.share <= most)
    for runner in results.of("memory"):
        if runner.kind is Kind.STRATA and runner.peaks:
            share = statistics.median(runner.peaks) / runner.size
            wanted, met = f"≤ {PEAK_OF_STATE:g}× the state", share <= PEAK_OF_STATE
            yield Target(f"peak memory, {runner.name}", wanted, f"{share:.2f}×", met)


def _s3_targets(results: Results) -> Iterable[Target]:
    for size in results.sizes("s3")[-1:]:
        for name in (STRATA_BYTES, STRATA_TENSORS):
            runner = results.find("s3", name, size)
            for what, title in (("durables", "save"), ("warm_loads", "load")):
                share = None if runner is None else results.of_raw(runner, what)
                if share is not None:
                    wanted, met = f"≥ {S3_OF_RAW:.0%} of raw obstore", share.value >= S3_OF_RAW
                    yield Target(f"S3 {title}, {name}", wanted, str(share), met)


def notes(results: Results, fio: str | None) -> Iterable[str]:
    """How to read the tables."""
    yield (
        "Medians of interleaved rounds, each contender in a process of its own. Spread is worst "
        "minus best, of the median. First is the first save of a process; the others use its "
        "memory again. The stall ends when the state may be changed, durable when it is committed "
        "and flushed. The last columns say how many times as long as Strata, tensors, others take."
    )
    if results.of("local") or results.of("writers"):
        yield (
            f"The disk is {fio}, direct, with Strata's blocks and depth; below 64 MiB, which "
            "fio cannot time, the benchmark's own loop."
            if fio
            else "NO FIO: the disk is the benchmark's own loop of direct writes."
        )
    if results.of("load"):
        yield (
            "Cold: the files were dropped from the page cache. Strata checks what it reads; "
            "safetensors maps the file and copies nothing."
        )
    if results.of("s3"):
        yield (
            "S3: means of rounds in which each saves or loads once, in another order each time. Of "
            "raw: of both raw obstores together, with the standard error of the rounds. Those two "
            "are the same program: what they differ by is chance."
        )


def panels(results: Results) -> Iterable[Panel]:
    """The stalls, the durable rates, the loads, and what increments store."""
    yield _panel(results, "local", "stalls", "stall")
    yield _panel(results, "local", "durables", "durable")
    yield _panel(results, "load", "warm_loads", "load, warm")
    increments = [one for one in results.increments if not one.error]
    bars = [Bar(one.name, one.share, f"{one.share:.1%}") for one in increments]
    yield Panel("stored while training, of the state", bars)


def _panel(results: Results, part: str, what: str, title: str) -> Panel:
    sizes = {runner.size for runner in results.of(part) if getattr(runner, what)}
    size = GIB if GIB in sizes else max(sizes, default=0)
    bars = []
    for runner in results.of(part):
        seconds = runner.median(what)
        # Memory is not durable, and a raw write has no stall.
        counts = (runner.name == MEMCPY) == (what == "stalls") or runner.kind is not Kind.LIMIT
        if runner.size != size or seconds is None or (part == "local" and not counts):
            continue
        if what == "durables":
            value = size / seconds / MEGABYTE
            bars.append(Bar(runner.name, value, f"{value:,.0f} MB/s", COLOURS[runner.kind]))
        else:
            value = 1000 * seconds
            bars.append(Bar(runner.name, value, milliseconds(value), COLOURS[runner.kind]))
    return Panel(f"{title_of(size)}: {title}", bars, log=what != "durables")
