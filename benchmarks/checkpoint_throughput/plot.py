"""The results as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .contenders.base import Kind
from .report import title_of
from .results import Results, Runner

COLOURS = {Kind.STRATA: "#1f6feb", Kind.LIMIT: "#6e7781", Kind.PEER: "#b8b8b8"}
WHOLE = 2**30
Bar = tuple[str, float, str]


def draw(results: Results, path: Path) -> None:
    """Draw the stalls, the durable rates, the loads, and what increments store."""
    figure, axes = plt.subplots(2, 2, figsize=(14, 9), layout="constrained")
    drawn: list[tuple[Axes, str, list[Bar], Callable[[float], str]]] = [
        (*_panel(axes[0, 0], results, "local", "stalls", "stall, ms"), _milliseconds),
        (*_panel(axes[0, 1], results, "local", "durables", "durable, MB/s"), _rate),
        (*_panel(axes[1, 0], results, "load", "warm_loads", "load, warm, ms"), _milliseconds),
        (axes[1, 1], "stored while training, of the state", _increments(results), _share),
    ]
    for each, title, bars, label in drawn:
        _draw(each, title, bars, label)
    figure.suptitle("Strata checkpoints", x=0.01, ha="left", weight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(
    axes: Axes, results: Results, part: str, what: str, title: str
) -> tuple[Axes, str, list[Bar]]:
    sizes = {r.size for r in results.of(part) if getattr(r, what)}
    size = WHOLE if WHOLE in sizes else max(sizes, default=0)
    bars = []
    for runner in results.of(part):
        value = _value(runner, what)
        if runner.size == size and value is not None:
            bars.append((runner.name, value, COLOURS[runner.kind]))
    return axes, f"{title_of(size)}: {title}", bars


def _value(runner: Runner, what: str) -> float | None:
    if runner.name == "memcpy" and what != "stalls":
        return None
    if what == "durables":
        rate = runner.rate(what)
        return None if rate is None else rate / 1e6
    writes = runner.kind is Kind.LIMIT and runner.name != "memcpy" and what == "stalls"
    median = runner.median(what)
    return None if writes or median is None else 1000 * median


def _increments(results: Results) -> list[Bar]:
    return [(i.name, i.share, COLOURS[Kind.STRATA]) for i in results.increments if not i.error]


def _draw(axes: Axes, title: str, bars: list[Bar], label: Callable[[float], str]) -> None:
    if not bars:
        axes.set_axis_off()
        return
    for row, (_, value, colour) in enumerate(bars):
        axes.barh(row, value, height=0.7, color=colour)
        axes.annotate(
            label(value),
            (value, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    most = max(value for _, value, _ in bars)
    if label is _milliseconds:
        axes.set_xscale("log")
        axes.set_xlim(right=10 * most)
    else:
        axes.set_xlim(right=1.15 * most)
    axes.set_title(title, loc="left", fontsize=10)


def _milliseconds(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 2}f} ms"


def _rate(value: float) -> str:
    return f"{value:,.0f} MB/s"


def _share(value: float) -> str:
    return f"{value:.1%}"
