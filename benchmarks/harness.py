"""The frame of every benchmark: its command line, scratch folder, tables, JSON and picture."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from dtruntime.bench.report import Announce, describe
from dtruntime.bench.tables import table

from .plots import Panel, draw

RESULTS = Path(__file__).parent / "results"
MEGABYTE = 1e6
Row = list[str | Text]


class BenchmarkError(Exception):
    """The benchmark cannot go on; the message says why, and names the remedy if there is one."""


class Kind(StrEnum):
    """What a contender stands for."""

    STRATA = "strata"
    PEER = "peer"
    LIMIT = "limit"
    """The least that has to be done."""
    REFERENCE = "reference"
    """Shown for comparison; it does other work, so no target refers to it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender by name; its libraries are imported when it is made."""

    name: str
    kind: Kind
    home: str
    """Its module in the package ``contenders``, and its class."""
    parts: tuple[str, ...]
    """Where it takes part."""
    package: str = ""
    """What has to be installed."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor."""

    def make(self, package: str, *arguments: Any) -> Any:
        """Import and make it."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(f"{package}.contenders.{module}"), name)(
            *arguments, **self.options
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A number to reach."""

    name: str
    wanted: str
    measured: str
    met: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a benchmark measured, ready to be shown."""

    tables: Sequence[RenderableType]
    document: dict[str, Any]
    """Everything, for programs."""
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()
    problems: Sequence[str] = ()
    """What could not be measured, and why."""
    panels: Sequence[Panel] = ()
    failed: bool = False
    """Whether Strata gave wrong answers, or could not be measured."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A program that measures, shows and saves."""

    name: str
    """Of its module, and of the files with its results."""
    description: str
    quick: str
    """How long ``--quick`` takes."""
    measure: Callable[[argparse.Namespace, Path, Announce], Outcome]
    """Is given the options, a folder for files, and what is called with each step."""
    parts: Sequence[str] = ()
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    """Declares further ones."""

    def main(self) -> int:
        """Run; the exit status is 1 when it could not, or when Strata failed."""
        chosen = self._arguments()
        # As Ctrl-C does: leave through the context managers, which stop what is running.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        progress = Console(stderr=True)
        if chosen.data_dir:
            chosen.data_dir.mkdir(parents=True, exist_ok=True)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="strata-bench-", dir=chosen.data_dir) as scratch,
                progress.status("starting") as status,
            ):
                outcome = self.measure(chosen, Path(scratch), status.update)
        except BenchmarkError as exc:
            progress.print(f"error: {exc}", style="red", markup=False, highlight=False)
            return 1
        self._show(outcome, Console())
        save_results(outcome.document | {"targets": outcome.targets}, self.name, chosen.results)
        try:
            draw(f"Strata: {self.description}", outcome.panels, chosen.results / f"{self.name}.png")
        except ImportError:
            progress.print("no picture: matplotlib is not installed")
        return int(outcome.failed)

    def _arguments(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}", description=f"Measure {self.description}."
        )
        parser.add_argument(
            "--quick", action="store_true", help=f"{self.quick}, with noisier numbers"
        )
        if self.parts:
            parser.add_argument(
                "--only", action="append", choices=self.parts, help="measure this; repeatable"
            )
        parser.add_argument(
            "--data-dir", type=Path, help="where files are written (default: a temporary folder)"
        )
        parser.add_argument(
            "--results", type=Path, default=RESULTS, help="folder for the JSON and the picture"
        )
        self.options(parser)
        chosen = parser.parse_args()
        chosen.only = getattr(chosen, "only", None) or self.parts
        return chosen

    def _show(self, outcome: Outcome, console: Console) -> None:
        for each in outcome.tables:
            console.print(each)
        if outcome.targets:
            rows: list[Row] = []
            for target in outcome.targets:
                verdict = Text("met", "green") if target.met else Text("missed", "red")
                rows.append([target.name, target.wanted, target.measured, verdict])
            console.print(table(("target", "wanted", "measured", ""), rows, "Targets"))
        console.print(Text("\n".join(outcome.notes), "dim"))
        for problem in outcome.problems:
            message = f"NOT MEASURED: {problem}"
            console.print(message, style="bold red", markup=False, highlight=False)


def save_results(document: dict[str, Any], name: str, folder: Path = RESULTS) -> None:
    """Write everything that was measured to ``NAME.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode(document, enc_hook=str)
    (folder / f"{name}.json").write_bytes(msgspec.json.format(encoded) + b"\n")


def environment(packages: Iterable[str], **more: object) -> dict[str, object]:
    """The machine, versions, and how busy it was at the start."""
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"started_at": started_at, **msgspec.to_builtins(describe(packages)), **more}


def busy_note(environment: dict[str, Any]) -> list[str]:
    """A warning, if the machine had other work."""
    if not environment["busy"]:
        return []
    load = environment["load_average"][0]
    return [f"The machine was busy at the start (load {load:.1f}): trust ratios."]


def three_digits(value: float) -> str:
    """A number in a cell of a table."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(ratio: float | None) -> str:
    """A ratio in a cell; empty where there is none."""
    return "" if ratio is None else f"{ratio:.0%}"


def times_as_much(ratio: float | None) -> str:
    """A factor in a cell; empty where there is none."""
    return "" if ratio is None else f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"
