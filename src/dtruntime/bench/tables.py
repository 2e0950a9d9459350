"""What was measured, as a person reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..display import count, duration, size
from .report import MachineInfo, Measure, Section


def machine_view(machine: MachineInfo) -> RenderableType:
    """The machine in a line, and a warning when it is busy."""
    cores = count(machine.cores, "core")
    if machine.usable_cores < machine.cores:
        cores += f", {machine.usable_cores} usable"
    head = Text.assemble(
        ("machine ", "bold"),
        machine.processor or machine.system,
        (
            f"   {cores}   {size(machine.memory_bytes)}   {machine.system}   "
            f"Python {machine.python}   strata {machine.strata}",
            "dim",
        ),
    )
    if not machine.busy:
        return head
    warning = (
        f"the machine is busy (load average {machine.load_average[0]:g}, "
        f"{count(machine.cores, 'core')}): numbers may be lower, and differ from run to run"
    )
    return Group(head, Text(warning, "yellow"))


def section_view(section: Section) -> RenderableType:
    """One part: a heading, its table, and what has to be known to read it."""
    head = Text.assemble(
        (f"{section.name} ", "bold"), section.place, (f"   {_facts(section)}", "dim")
    )
    return Group(Text(), head, _table(section), *_notes(section))


def skipped_view(name: str, reason: str) -> RenderableType:
    """A part that could not be measured."""
    return Group(Text(), Text.assemble((f"{name} ", "bold"), (f"not measured: {reason}", "yellow")))


def _facts(section: Section) -> str:
    facts = section.facts
    rounds = count(int(facts["rounds"]), "round")
    if section.name == "checkpoints":
        return f"{size(int(facts['size_bytes']))}   {rounds}"
    if section.name == "coordinator":
        return f"{count(int(facts['workers']), 'worker')}   {rounds}"
    return (
        f"{count(int(facts['files']), 'file')}   {size(int(facts['file_bytes']))}   "
        f"{count(int(facts['samples']), 'sample')}   {count(int(facts['columns']), 'column')}   "
        f"batches of {facts['batch_size']}   {rounds}"
    )


def _notes(section: Section) -> Iterable[Text]:
    if section.name == "checkpoints":
        yield Text(f"  write raw: {section.facts['raw_write']}", "dim")
        yield Text(f"  read raw: {section.facts['raw_read']}", "dim")
    for note in section.notes:
        yield Text(f"  {note}", "dim")
    if int(section.facts["rounds"]) > 1:
        yield Text("  of limit: the median of what each round reached of its own limit", "dim")


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
"""The columns of each part, and what they say about a measure."""


def _table(section: Section) -> Table:
    """Limits, each followed by what is compared with it."""
    columns, cells = _TABLES[section.name]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    limits = {one.limit for one in section.measures}
    for one in section.measures:
        is_limit = one.name in limits
        title = Text(one.name if is_limit else f"  {one.name}")
        table.add_row(title, *cells(one), style="dim" if is_limit else "")
    return table


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
