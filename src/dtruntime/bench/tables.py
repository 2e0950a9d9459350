"""Benchmark results as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..display import count, duration, size
from .report import MachineInfo, Measure, Section


def table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str = "") -> Table:
    """A table whose first column is text and whose others are numbers; framed if titled."""
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD if title else None,
        padding=(0, 0, 0, 1) if title else (0, 2, 0, 0),
    )
    made.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        made.add_column(heading, justify="right", no_wrap=not title)
    for row in rows:
        made.add_row(*row)
    return made


def machine_view(machine: MachineInfo) -> RenderableType:
    """The machine in a line, and a warning when it is busy."""
    cores = count(machine.cores, "core")
    if machine.usable_cores < machine.cores:
        cores += f", {machine.usable_cores} usable"
    software = f"{machine.system}   Python {machine.python}   strata {machine.strata}"
    head = Text.assemble(
        ("machine ", "bold"),
        machine.processor or machine.system,
        (f"   {cores}   {size(machine.memory_bytes)}   {software}", "dim"),
    )
    if not machine.busy:
        return head
    load = f"load average {machine.load_average[0]:g}, {count(machine.cores, 'core')}"
    warning = f"the machine is busy ({load}): expect lower numbers that vary between runs"
    return Group(head, Text(warning, "yellow"))


def section_view(section: Section) -> RenderableType:
    """One part: a heading, its table, and how to read it."""
    head = Text.assemble(
        (f"{section.name} ", "bold"), section.place, (f"   {_facts(section)}", "dim")
    )
    columns, cells = _TABLES[section.name]
    limits = {one.limit for one in section.measures}
    rows = []
    for one in section.measures:
        # Limits, each followed by what is compared with it.
        name, style = (one.name, "dim") if one.name in limits else (f"  {one.name}", "")
        rows.append([Text(text, style) for text in (name, *cells(one))])
    return Group(Text(), head, table(("", *columns), rows), *_notes(section))


def skipped_view(name: str, reason: str) -> RenderableType:
    """A part that could not be measured."""
    return Group(Text(), Text.assemble((f"{name} ", "bold"), (f"not measured: {reason}", "yellow")))


def _facts(section: Section) -> str:
    facts = section.facts
    rounds = count(int(facts["rounds"]), "round")
    if section.name == "checkpoints":
        return f"{size(int(facts['size_bytes']))}   {rounds}"
    nouns = {"workers": "worker", "files": "file", "samples": "sample", "columns": "column"}
    parts = [count(int(facts[name]), noun) for name, noun in nouns.items() if name in facts]
    if section.name == "data":
        parts.insert(1, size(int(facts["file_bytes"])))
        parts.append(f"batches of {facts['batch_size']}")
    return "   ".join([*parts, rounds])


def _notes(section: Section) -> Iterable[Text]:
    notes = list(section.notes)
    if section.name == "checkpoints":
        facts = section.facts
        notes[:0] = [f"write raw: {facts['raw_write']}", f"read raw: {facts['raw_read']}"]
    if int(section.facts["rounds"]) > 1:
        notes.append("of limit: how much of its own limit each round reached, the median")
    return (Text(f"  {note}", "dim") for note in notes)


def _checkpoints(one: Measure) -> tuple[str, ...]:
    return *_times(one), _byte_rate(one), _share(one)


def _coordinator(one: Measure) -> tuple[str, ...]:
    calls = one.call_p50_seconds, one.call_p99_seconds
    return _rate(one), _share(one), *(duration(seconds or 0.0) for seconds in calls)


def _data(one: Measure) -> tuple[str, ...]:
    return _rate(one), _byte_rate(one), _share(one), *_times(one)[1:]


_TABLES: dict[str, tuple[tuple[str, ...], Callable[[Measure], tuple[str, ...]]]] = {
    "checkpoints": (("median", "from", "to", "rate", "of limit"), _checkpoints),
    "coordinator": (("rate", "of limit", "one call: p50", "p99"), _coordinator),
    "data": (("samples", "rate", "of limit", "from", "to"), _data),
}
"""The columns of each part, and their cells for one measure."""


def _times(one: Measure) -> tuple[str, ...]:
    times = one.median_seconds, one.least_seconds, one.longest_seconds
    return tuple(map(duration, times))


def _rate(one: Measure) -> str:
    return "" if one.per_second is None else f"{one.per_second:,.0f}/s"


def _byte_rate(one: Measure) -> str:
    if one.per_second is None:
        return ""
    return f"{size(round(one.per_second * one.bytes_each))}/s"


def _share(one: Measure) -> str:
    return "" if one.of_limit is None else f"{one.of_limit:.0%}"
