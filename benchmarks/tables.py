"""Tables for the terminal, and targets that were met or missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

Row = list[str | Text]


@dataclass(frozen=True, slots=True)
class Target:
    """A number to reach."""

    name: str
    wanted: str
    measured: str
    met: bool


def table(title: str, headings: Sequence[str], rows: Iterable[Row]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    made.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def targets_table(targets: Iterable[Target]) -> Table:
    """Every target, and whether it was met."""
    rows: list[Row] = []
    for target in targets:
        verdict = Text("met", style="green") if target.met else Text("missed", style="red")
        rows.append([target.name, target.wanted, target.measured, verdict])
    return table("Targets", ("target", "wanted", "measured", ""), rows)
