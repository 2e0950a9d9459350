"""Results as pictures: panels of horizontal bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRATA, STRATA_SECOND, LIMIT, PEER, REFERENCE = (
    "#1f6feb",
    "#9ec5fe",
    "#6e7781",
    "#b8b8b8",
    "#e1e1e1",
)
COLOURS = {"strata": STRATA, "limit": LIMIT, "peer": PEER, "reference": REFERENCE}
ROOM = 1.5
LOG_ROOM = 30
"""How much longer than the longest bar an axis is, so that labels have room."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, and what is written at its end."""

    name: str
    value: float
    label: str
    colour: str = STRATA


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars with a common axis."""

    title: str
    bars: Sequence[Bar]
    log: bool = False


def milliseconds(value: float) -> str:
    """A time in a label."""
    return f"{value:,.{0 if value >= 100 else 2}f} ms"


def draw(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Write a picture with two or three panels in a row; ``ImportError`` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [panel for panel in panels if panel.bars]
    if not panels:
        return
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (6.5 * columns, 4.8 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for panel, each in zip(panels, axes.flat, strict=False):
        _draw_panel(panel, each)
    for each in axes.flat[len(panels) :]:
        each.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_panel(panel: Panel, axes: Any) -> None:
    for row, bar in enumerate(panel.bars):
        axes.barh(row, bar.value, height=0.7, color=bar.colour)
        axes.annotate(
            bar.label,
            (bar.value, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars], fontsize=8)
    axes.invert_yaxis()
    most = max(bar.value for bar in panel.bars)
    if panel.log:
        axes.set_xscale("log")
    axes.set_xlim(right=most * (LOG_ROOM if panel.log else ROOM))
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
