"""The results as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from .results import LIGHT_SUFFIX, Measured, Results
from .servers import Kind

STRATA, STRATA_AIO, REFERENCE, ECHO = "#1f6feb", "#9ec5fe", "#b8b8b8", "#6e7781"
BAR_HEIGHT = 0.26


def draw(results: Results, path: Path) -> None:
    """Draw rates per operation, and the heartbeat against its ceilings."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5.2), width_ratios=(3, 2), layout="constrained"
    )
    _draw_operations(left, [m for m in results.operations if not m.name.endswith(LIGHT_SUFFIX)])
    heartbeat = results.find("heartbeat")
    if heartbeat is not None:
        _draw_ceilings(right, heartbeat)
    else:
        right.set_axis_off()
    cores = results.environment["server_cores"]
    figure.suptitle(f"Strata coordinator on core {cores}", x=0.01, ha="left", weight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_operations(axes: Axes, operations: list[Measured]) -> None:
    for row, measured in enumerate(operations):
        ours = measured.strata.rate
        bars = [(STRATA, ours, f"{_rate(ours)}  p99 {measured.strata.p99_ms:.1f} ms")]
        aio, ratio = measured.summaries.get(Kind.STRATA_AIO), measured.ratio_to(Kind.STRATA_AIO)
        if aio is not None and ratio is not None:
            bars.append((STRATA_AIO, aio.rate, f"{_rate(aio.rate)}  Strata is {ratio:.1f}×"))
        if (claim := measured.published) is not None:
            bars.append(
                (REFERENCE, claim.rate, f"{_rate(claim.rate)}  Strata is {ours / claim.rate:.1f}×")
            )
        for offset, (colour, rate, label) in enumerate(bars):
            _bar(axes, row + (offset - 1) * BAR_HEIGHT, rate, colour, label)
    axes.set_yticks(range(len(operations)), [measured.name for measured in operations])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(1, 12 * max(measured.strata.rate for measured in operations))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title("operations per second (log scale)", loc="left", fontsize=10)
    _legend(axes)
    _clean(axes)


def _draw_ceilings(axes: Axes, heartbeat: Measured) -> None:
    found = {kind: summary.rate for kind, summary in heartbeat.summaries.items()}
    rates = sorted(found.items(), key=lambda item: -item[1])
    for row, (kind, rate) in enumerate(rates):
        colour = ECHO if kind.is_echo else STRATA if kind is Kind.STRATA_NATIVE else STRATA_AIO
        note = "" if kind is Kind.STRATA_NATIVE else f"  Strata is {heartbeat.ratio_to(kind):.2g}×"
        _bar(axes, row, rate, colour, _rate(rate) + note, height=0.55)
    axes.set_yticks(range(len(rates)), [kind.value for kind, _ in rates])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(rate for _, rate in rates))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title("heartbeats per second, same run", loc="left", fontsize=10)
    _clean(axes)


def _bar(
    axes: Axes, y: float, rate: float, colour: str, label: str, height: float = BAR_HEIGHT * 0.92
) -> None:
    axes.barh(y, rate, height=height, color=colour)
    axes.annotate(
        label, (rate, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
    )


def _rate(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"


def _legend(axes: Axes) -> None:
    labels = {
        "Strata on pygrpc-native": STRATA,
        "Strata on grpc.aio": STRATA_AIO,
        "reference's claim, 64 cores": REFERENCE,
    }
    handles = [Patch(color=colour) for colour in labels.values()]
    axes.legend(handles, list(labels), loc="lower right", fontsize=8, frameon=False)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
