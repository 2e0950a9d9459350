"""The results for people, in the terminal, and for programs, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..tables import Row, table, targets_table
from .results import MEGABYTE, Measured, Results
from .servers import Kind

NOISE_WORTH_A_WARNING = 0.15

RATES = (
    "operation",
    "in\nflight",
    "\n/s",
    "p50\nms",
    "p99\nms",
    "CPU µs\n/call",
    "k6\nchecked",
    "\nfailed",
    "load\ncore",
)
RATIOS = (
    "Strata against",
    "itself on\ngrpc.aio",
    "echo on\ngrpc.aio",
    "echo on\nnative",
    "reference\n64 cores",
    "which is\n/s",
    "p99\nms",
)


def show(results: Results, console: Console) -> None:
    """Print the tables."""
    console.print(table("Coordinator under load", RATES, map(_rates, results.operations)))
    console.print(table("Ratios of rates", RATIOS, map(_ratios, results.operations)))
    console.print(targets_table(results.targets()))
    console.print(_notes(results))


def save(results: Results, path: Path) -> None:
    """Write everything that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_document(results), indent=2) + "\n")


def as_document(results: Results) -> dict[str, Any]:
    """The results as plain data."""
    return {
        "environment": dict(results.environment),
        "operations": [_operation_document(measured) for measured in results.operations],
        "memory": asdict(results.memory) if results.memory else None,
        "survivors_of_a_kill": asdict(results.survivors) if results.survivors else None,
        "targets": [asdict(target) for target in results.targets()],
    }


def _operation_document(measured: Measured) -> dict[str, Any]:
    published = measured.published
    return {
        "name": measured.name,
        "unit": measured.unit,
        "in_flight": measured.in_flight,
        "servers": {kind.value: asdict(s) for kind, s in measured.summaries.items()},
        "ratio_to": {
            kind.value: measured.ratio_to(kind)
            for kind in measured.samples
            if kind is not Kind.STRATA_NATIVE
        },
        "reference_on_64_cores": asdict(published) if published else None,
        "verified": asdict(measured.verdict),
    }


def _rates(measured: Measured) -> Row:
    ours, failed = measured.strata, measured.failed()
    return [
        measured.name,
        f"{measured.in_flight:,}",
        _number(ours.rate),
        _milliseconds(ours.p50_ms),
        _milliseconds(ours.p99_ms),
        f"{ours.server_cpu_us:.0f}",
        f"{measured.verdict.verified:,}",
        Text(f"{failed:,}", style="red" if failed else ""),
        f"{ours.load_share:.0%}",
    ]


def _ratios(measured: Measured) -> Row:
    published = measured.published
    return [
        measured.name,
        _times(measured.ratio_to(Kind.STRATA_AIO)),
        _times(measured.ratio_to(Kind.ECHO_AIO)),
        _times(measured.ratio_to(Kind.ECHO_NATIVE)),
        _times(measured.strata.rate / published.rate if published else None),
        f"{published.rate:,.0f}" if published else "",
        f"{published.p99_ms:g}" if published and published.p99_ms else "",
    ]


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"


def _notes(results: Results) -> Text:
    lines = [
        "Medians of interleaved rounds; servers on "
        f"core {results.environment['server_cores']}, load on "
        f"core {results.environment['load_cores']}. "
        "An echo server does nothing but answer, one bare call for each of Strata's. "
        "k6 checked status and fields of as many replies as shown. "
        "A load core near 100% means that the generator is the limit, not the server."
    ]
    if results.memory:
        idle, loaded = results.memory.idle_bytes, results.memory.loaded_bytes
        lines.append(
            f"Memory: {idle / MEGABYTE:.0f} MB idle, {loaded / MEGABYTE:.0f} MB with "
            f"{results.memory.workers:,} workers that report resources."
        )
    if results.survivors:
        kept, lost = results.survivors.verified, results.survivors.failed
        lines.append(f"After kill -9: {kept:,} registered workers still known, {lost:,} not.")
    if results.environment["data_on_tmpfs"]:
        lines.append("The data directory is on tmpfs: registration did not wait for a disk.")
    shares = [s.foreign_share for m in results.operations for s in m.summaries.values()]
    noise = max(shares, default=0.0)
    if noise > NOISE_WORTH_A_WARNING:
        lines.append(
            f"Other processes took up to {noise:.0%} of a core in spite of second attempts: "
            "rates are too low, ratios hold better."
        )
    return Text("\n".join(lines), style="dim")
