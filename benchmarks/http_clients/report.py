"""The results as tables, as JSON and as a picture."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from rich.console import Console

from ..tables import Row, Target, table, targets_table
from .session import SHAPES, STREAMS, Results

HEADINGS = (
    "load",
    "streams",
    "heartbeats/s",
    "ratio",
    "p50 ms",
    "p99 ms",
    "p99 ratio",
    "CPU µs/call",
    "events/s",
    "MB/s",
    "runs",
)
LEAST = 0.95
"""Of the rate without anybody who watches: what counts as not slowed down."""


def ratios(results: Results, shape: str, streams: int) -> tuple[float, float]:
    """Rate and 99th percentile against those without streams: the medians over rounds of both."""
    pairs = list(zip(results.measured[shape, streams], results.measured[shape, 0], strict=True))
    rate = statistics.median(a.sample.rate / b.sample.rate for a, b in pairs)
    p99 = statistics.median(a.sample.p99_ms / b.sample.p99_ms for a, b in pairs)
    return rate, p99


def targets(results: Results) -> list[Target]:
    """Watching costs nothing that can be seen."""
    return [
        Target(
            f"heartbeats with {STREAMS[-1]} streams, {shape}",
            f"≥ {LEAST:.0%}",
            f"{ratios(results, shape, STREAMS[-1])[0]:.1%}",
            ratios(results, shape, STREAMS[-1])[0] >= LEAST,
        )
        for shape in SHAPES
    ]


def show(results: Results, console: Console) -> None:
    """Print the tables."""
    rows = [_row(results, shape, streams) for shape in SHAPES for streams in STREAMS]
    console.print(table("Heartbeats while streams of events are read", HEADINGS, rows))
    console.print(targets_table(targets(results)))


def _row(results: Results, shape: str, streams: int) -> Row:
    summary = results.summary(shape, streams)
    rate, p99 = ratios(results, shape, streams)
    watched = results.measured[shape, streams]
    return [
        shape,
        str(streams),
        f"{summary.rate:,.0f}",
        f"{rate:.3f}",
        f"{summary.p50_ms:.2f}",
        f"{summary.p99_ms:.2f}",
        f"{p99:.2f}",
        f"{summary.server_cpu_us:.1f}",
        f"{statistics.median(one.events_per_second for one in watched):,.0f}",
        f"{statistics.median(one.bytes_per_second for one in watched) / 1e6:.2f}",
        str(summary.runs),
    ]


def save(results: Results, path: Path) -> None:
    """Write everything that was measured."""
    document: dict[str, Any] = {
        "environment": dict(results.environment),
        "measured": [
            {
                "load": shape,
                "streams": streams,
                "rate_ratio": ratios(results, shape, streams)[0],
                "p99_ratio": ratios(results, shape, streams)[1],
                "summary": asdict(results.summary(shape, streams)),
                "rounds": [asdict(one) for one in results.measured[shape, streams]],
            }
            for shape in SHAPES
            for streams in STREAMS
        ],
        "targets": [asdict(target) for target in targets(results)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def draw(results: Results, path: Path) -> None:
    """Draw rates and latencies by the number of streams."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, shape in zip(axes, SHAPES, strict=True):
        rates = [results.summary(shape, streams).rate for streams in STREAMS]
        labels = [str(streams) for streams in STREAMS]
        axis.bar(labels, rates, width=0.6, color=["#6e7781", "#9ec5fe", "#1f6feb"])
        for place, streams in enumerate(STREAMS):
            summary = results.summary(shape, streams)
            ratio = ratios(results, shape, streams)[0]
            text = f"{summary.rate:,.0f}/s\n{ratio:.1%}\np99 {summary.p99_ms:.1f} ms"
            axis.annotate(text, (place, summary.rate), ha="center", va="bottom", fontsize=8)
        axis.set_ylim(0, 1.3 * max(rates))
        axis.set_title(f"heartbeats per second, {shape}", loc="left", fontsize=10)
        axis.set_xlabel("streams of events that are read")
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
