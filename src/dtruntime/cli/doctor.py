"""``strata doctor``: checks this machine and the coordinator, with a remedy for each problem."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import Config, CoordinatorConfig
from ..display import count, json_text, open_console
from ..errors import ConfigError
from .doctor_checks import (
    Finding,
    check_coordinator,
    check_machine,
    check_packages,
    check_variables,
)
from .invocation import add_url, coordinator_url

SCHEMA = 1
_MARKS = {
    "ok": ("✓", "green"),
    "note": ("·", "dim"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}


class Diagnosis(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    url: str
    healthy: bool
    """Whether no check failed; warnings do not count."""
    findings: list[Finding]
    schema: int = SCHEMA


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and the way to the coordinator",
        description="Check software, environment, coordinator and machine, and say what to do "
        "about each finding. Exit code 1: a check failed.",
    )
    add_url(parser)
    parser.add_argument(
        "--data-dir", help="where a coordinator here keeps its state (default strata-data)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check everything; 1 when something failed."""
    url = coordinator_url(options)
    findings = _findings(url, options.data_dir)
    if options.json:
        results = list(findings)
        print(json_text(Diagnosis(url, _healthy(results), results)))
    else:
        results = _show(findings, url, open_console())
    return 0 if _healthy(results) else 1


def _healthy(findings: list[Finding]) -> bool:
    return all(finding.verdict != "fail" for finding in findings)


def _findings(url: str, data_dir: str | None) -> Iterator[Finding]:
    yield from check_packages()
    yield from check_variables(os.environ, url)
    live = yield from check_coordinator(url)
    world_size = os.environ.get("WORLD_SIZE", "")
    workers = max(live, int(world_size) if world_size.isdigit() else 0)
    yield from check_machine(Path(data_dir or _configured_data_dir()), workers)


def _configured_data_dir() -> str:
    try:
        return Config.load().coordinator.data_dir
    except ConfigError:
        return CoordinatorConfig().data_dir


def _show(findings: Iterator[Finding], url: str, console: Console) -> list[Finding]:
    """Write each finding as soon as it is there."""
    shown: list[Finding] = []
    for finding in findings:
        if not shown or shown[-1].group != finding.group:
            title = f"{finding.group} {url}" if finding.group == "coordinator" else finding.group
            console.print(Text(f"{'' if not shown else chr(10)}{title}", "bold"))
        console.print(_line(finding))
        shown.append(finding)
    console.print(_summary(shown))
    return shown


def _line(finding: Finding) -> Table:
    mark, style = _MARKS[finding.verdict]
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3, justify="right")
    table.add_column(width=17, no_wrap=True)
    table.add_column()
    dim = "dim" if finding.verdict == "note" else ""
    table.add_row(Text(mark, style), Text(finding.name, dim), Text(finding.text, dim))
    if finding.remedy:
        table.add_row("", "", Text.assemble(("→ ", style), finding.remedy))
    return table


def _summary(findings: list[Finding]) -> Text:
    tally = Counter(finding.verdict for finding in findings)
    parts = [(f"\n{count(len(findings), 'check')}: {tally['ok'] + tally['note']} fine", "")]
    if tally["warn"]:
        parts.append((f", {count(tally['warn'], 'warning')}", "yellow"))
    if tally["fail"]:
        parts.append((f", {count(tally['fail'], 'failure')}", "bold red"))
    return Text.assemble(*parts)
