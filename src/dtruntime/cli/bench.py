"""``strata bench``: how fast this machine is, and how much of that Strata delivers."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from ..display import json_text, open_console
from ..errors import StrataError
from ..rpc.channel import target_of
from .invocation import (
    confirm,
    ending_on_signals,
    progress_bar,
    whole_between,
)

if TYPE_CHECKING:
    from ..bench.report import Announce, Section

Part: TypeAlias = "Callable[[argparse.Namespace, Announce], Section]"
"""Measures what the options say."""

LEAST_BYTES = 2**20
SIZE = "1GiB"
SECONDS = 5.0
WORKERS = 64
DATA_SIZE = "100MB"
BATCH = 1024
CHECKPOINT_SECONDS = 30.0
"""Without ``--rounds``, no round of saves and loads begins later."""
QUICK = {
    "checkpoints": argparse.Namespace(
        place=".", size=256 * 2**20, rounds=None, checkpoint_seconds=10.0
    ),
    "coordinator": argparse.Namespace(url=None, seconds=3.0, workers=WORKERS),
    "data": argparse.Namespace(
        files=[], columns=None, format="parquet", size=50_000_000, batch_size=BATCH
    ),
}
"""What ``strata bench`` alone measures."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure this machine, and how much of its speed Strata delivers",
        description="Measure checkpoints, a coordinator and data loading beside what the machine, "
        "disk or bucket can do without Strata, in turns and in the same run. Without a PART: all "
        "of them, quickly.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with every value")
    parser.set_defaults(run=_run_all)
    parts = parser.add_subparsers(dest="part", metavar="PART")
    _add_checkpoints(parts)
    _add_coordinator(parts)
    _add_data(parts)


def _add_checkpoints(parts: Any) -> None:
    parser = _add_part(parts, "checkpoints", "saves and loads beside memory and disk", _checkpoints)
    parser.add_argument(
        "place",
        metavar="PLACE",
        nargs="?",
        default=".",
        help="folder, s3://, gs:// or az:// URL; everything is written to a new folder or prefix "
        "there, and is removed (default: the current folder)",
    )
    parser.add_argument(
        "--size", type=_size, default=_size(SIZE), help=f"size of the state (default {SIZE})"
    )
    parser.add_argument(
        "--rounds",
        type=whole_between(1, 1000),
        metavar="N",
        help=f"rounds (default: up to 5, as many as begin within {CHECKPOINT_SECONDS:.0f} s)",
    )
    parser.set_defaults(checkpoint_seconds=CHECKPOINT_SECONDS)


def _add_coordinator(parts: Any) -> None:
    parser = _add_part(parts, "coordinator", "registrations, heartbeats, barriers", _coordinator)
    parser.add_argument(
        "--url",
        help="coordinator (default: a temporary one on loopback; COORDINATOR_URL is ignored)",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before creating a job there")
    parser.set_defaults(ready=_may_make_job)
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        help=f"time of all calls (default {SECONDS:g})",
    )
    parser.add_argument(
        "--workers",
        type=whole_between(1, 1000),
        default=WORKERS,
        metavar="N",
        help=f"number of workers, all in this process (default {WORKERS})",
    )


def _add_data(parts: Any) -> None:
    parser = _add_part(parts, "data", "the loader beside a scan by pyarrow", _data)
    parser.add_argument(
        "files",
        metavar="FILES",
        nargs="*",
        help="local files, folders or globs (default: parquet files that are written for it)",
    )
    parser.add_argument("--columns", type=_names, metavar="A,B", help="default: all")
    parser.add_argument("--format", choices=["parquet", "csv"], default="parquet")
    parser.add_argument(
        "--batch-size",
        type=whole_between(1, 10**6),
        default=BATCH,
        metavar="N",
        help=f"default {BATCH}",
    )
    parser.add_argument(
        "--size",
        type=_size,
        default=_size(DATA_SIZE),
        help=f"size of the files that are written (default {DATA_SIZE})",
    )


def _add_part(parts: Any, name: str, text: str, part: Part) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parts.add_parser(name, help=text, description=text)
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object"
    )

    def run(options: argparse.Namespace) -> int:
        if "ready" in options:
            options.ready(options)
        return _run({name: (part, options)}, as_json=options.json)

    parser.set_defaults(run=run)
    return parser


def _run_all(options: argparse.Namespace) -> int:
    """All parts, with less of everything."""
    parts = {"checkpoints": _checkpoints, "coordinator": _coordinator, "data": _data}
    skipped = {} if _has_pyarrow() else {"data": _NO_PYARROW}
    chosen = {name: (part, QUICK[name]) for name, part in parts.items()}
    return _run(chosen, skipped, as_json=options.json)


def _run(
    parts: Mapping[str, tuple[Part, argparse.Namespace]],
    skipped: Mapping[str, str] = MappingProxyType({}),
    *,
    as_json: bool,
) -> int:
    """Measure parts one after the other, and show each as soon as it is there."""
    # Here, since no other command should pay for loading numpy and what is measured.
    from ..bench.report import BenchReport, describe
    from ..bench.tables import machine_view, section_view, skipped_view

    console = open_console()
    report = BenchReport(round(time.time(), 3), describe(), [], dict(skipped))
    if not as_json:
        console.print(machine_view(report.machine))
    for name, (part, options) in parts.items():
        if name in skipped:
            view = skipped_view(name, skipped[name])
        else:
            with ending_on_signals(), _progress(name) as tell:
                report.sections.append(part(options, tell))
            view = section_view(report.sections[-1])
        if not as_json:
            console.print(view)
    if as_json:
        print(json_text(report, indent=False), flush=True)
    return 0


def _checkpoints(options: argparse.Namespace, tell: Announce) -> Section:
    from ..bench.checkpoint_throughput import bench_checkpoints

    return bench_checkpoints(
        options.place, options.size, options.rounds, options.checkpoint_seconds, tell
    )


def _coordinator(options: argparse.Namespace, tell: Announce) -> Section:
    from ..bench.coordinator_throughput import bench_coordinator

    return bench_coordinator(options.url, options.seconds, options.workers, tell)


def _data(options: argparse.Namespace, tell: Announce) -> Section:
    if not _has_pyarrow():
        raise StrataError(_NO_PYARROW)
    from ..bench.loader_throughput import bench_data

    return bench_data(
        options.files,
        options.columns,
        format=options.format,
        size=options.size,
        batch_size=options.batch_size,
        tell=tell,
    )


_NO_PYARROW = "reading data needs pyarrow, which is not installed: pip install pyarrow"


def _has_pyarrow() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def _may_make_job(options: argparse.Namespace) -> None:
    """Ask before leaving a job at somebody else's coordinator."""
    if options.url is None:
        return
    target_of(options.url)
    if options.yes:
        return
    question = f"create a job at {options.url}? It stays there until 'strata jobs rm' removes it."
    confirm(question, StrataError("nothing was measured"))


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Announce]:
    """A line on the terminal that says what is being measured."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with progress_bar(*columns) as bar:
        task = bar.add_task(name, total=None)
        yield lambda text: bar.update(task, description=f"{name}: {text}")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?|)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 256MiB, 1GiB or 2GB")
    value = int(float(match[1]) * _UNITS[match[2]])
    if value < LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"must be at least 1MiB, not {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 3600, not {text}")
    return value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of columns: write A,B")
    return names
