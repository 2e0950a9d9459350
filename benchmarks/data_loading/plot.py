"""The results as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .contenders import Kind
from .results import Contest, Results

COLOURS = {
    Kind.STRATA: "#1f6feb",
    Kind.LIMIT: "#6e7781",
    Kind.PEER: "#b8b8b8",
    Kind.REFERENCE: "#e1e1e1",
}
SLOTS, RING, CLAIM = "#1f6feb", "#9ec5fe", "#b8b8b8"


def draw(results: Results, path: Path) -> None:
    """Draw the rates of parquet loaders, the assignment times, and the resume times."""
    figure, axes = plt.subplots(
        1, 3, figsize=(16, 5.6), width_ratios=(5, 3, 3), layout="constrained"
    )
    parquet = next((c for c in results.contests if c.data.format == "parquet"), None)
    if parquet is not None and parquet.batch_sizes:
        _draw_rates(axes[0], parquet)
    else:
        axes[0].set_axis_off()
    _draw_assignment(axes[1], results) if results.assignments else axes[1].set_axis_off()
    _draw_resume(axes[2], results) if results.resumed else axes[2].set_axis_off()
    figure.suptitle("Strata data loading", x=0.01, ha="left", weight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_rates(axes: Axes, contest: Contest) -> None:
    size = contest.batch_sizes[0]
    found = [(r, r.summary(size)) for r in contest.runners]
    rows = sorted(
        [(runner, summary) for runner, summary in found if summary is not None],
        key=lambda pair: -pair[1].rate,
    )
    for row, (runner, summary) in enumerate(rows):
        ratio = contest.ratio(summary, size)
        note = "" if ratio is None else f"  {ratio:.0%} of the limit"
        label = f"{summary.rate:,.0f}/s{note}"
        _bar(axes, row, summary.rate, COLOURS[runner.entry.kind], label)
    _rows(axes, [runner.entry.name for runner, _ in rows])
    axes.set_xscale("log")
    axes.set_xlim(left=100, right=100 * max(summary.rate for _, summary in rows))
    axes.set_title(f"parquet, samples per second, batches of {size:,}", loc="left", fontsize=10)


def _draw_assignment(axes: Axes, results: Results) -> None:
    bars: list[tuple[str, float, str]] = []
    for found in results.assignments:
        name = f"{found.shape[0]:,} × {found.shape[1]:,}"
        colour = SLOTS if found.algorithm == "slot table" else RING
        bars.append((f"{name} {found.algorithm}", found.cold_ms.median, colour))
        if found.algorithm == "slot table":
            bars.append((f"{name} after a join", found.join_ms.median, SLOTS))
            if found.published is not None:
                bars.append((f"{name} reference", found.published[0], CLAIM))
    _milliseconds(axes, bars, "assignment, milliseconds")


def _draw_resume(axes: Axes, results: Results) -> None:
    bars = [
        (
            f"{found.who}, {found.order}, {found.samples:.0e}".replace("e+0", "e"),
            found.total_ms.median,
            SLOTS if found.who == "Strata" else CLAIM,
        )
        for found in results.resumed
    ]
    _milliseconds(axes, bars, "resume, milliseconds to the first batch")


def _milliseconds(axes: Axes, bars: list[tuple[str, float, str]], title: str) -> None:
    for row, (_, value, colour) in enumerate(bars):
        _bar(axes, row, value, colour, f"{value:,.{0 if value >= 100 else 2}f} ms")
    _rows(axes, [name for name, _, _ in bars])
    axes.set_xscale("log")
    axes.set_xlim(right=12 * max(value for _, value, _ in bars))
    axes.set_title(title, loc="left", fontsize=10)


def _bar(axes: Axes, row: int, value: float, colour: str, label: str) -> None:
    axes.barh(row, value, height=0.7, color=colour)
    axes.annotate(
        label, (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
    )


def _rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
