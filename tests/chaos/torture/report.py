"""What a torture came to: for people, and as JSON."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from .faults import Outage
from .rounds import TIMEOUT, Result

BEYOND_SECONDS = 2.0
"""After a plain kill, training should go on so soon after detection and the start of another."""


class Report:
    """Collects rounds."""

    def __init__(self, seed: int, left_out: list[str], machine: dict[str, Any]) -> None:
        self.seed = seed
        self.left_out = left_out
        self.machine = machine
        self.results: list[Result] = []

    @property
    def failures(self) -> list[str]:
        """What went wrong, with how to repeat it."""
        return [
            f"round {r.plan.number} ({r.plan.title}): {r.failure}\n"
            f"again: STRATA_CHAOS_SEED={self.seed} STRATA_CHAOS_ROUND={r.plan.number} make chaos"
            for r in self.results
            if r.failure
        ]

    @property
    def outages(self) -> list[Outage]:
        return [o for r in self.results for o in r.outages if o.seconds is not None]

    @property
    def faults(self) -> Counter[str]:
        return sum((r.faults for r in self.results), Counter())

    def data(self) -> dict[str, Any]:
        """Everything, for a machine."""
        simple = [o for o in self.outages if o.is_simple and o.startup is not None]
        beyond = [_beyond(o) for o in simple]
        return {
            "seed": self.seed,
            "machine": self.machine,
            "left_out": self.left_out,
            "detection_seconds": TIMEOUT,
            "rounds": len(self.results),
            "failed_rounds": [r.plan.number for r in self.results if r.failure],
            "seconds": sum(r.seconds for r in self.results),
            "faults": dict(self.faults.most_common()),
            "recoveries": len(self.outages),
            "restarts": sum(r.restarts for r in self.results),
            "steps": sum(r.plan.steps for r in self.results),
            "steps_repeated": sum(r.repeated for r in self.results),
            "seconds_lost": sum(_lost(r.outages) for r in self.results),
            "seconds_to_training": {
                kind: _quantiles([o.seconds or 0.0 for o in found])
                for kind, found in self._by_kind().items()
            },
            "seconds_after_the_cause_was_gone": {
                kind: _quantiles([o.after_seconds for o in found if o.after_seconds is not None])
                for kind, found in self._by_kind().items()
            },
            "simple_kills": {
                "total": _quantiles([o.seconds or 0.0 for o in simple]),
                "startup": _quantiles([o.startup or 0.0 for o in simple]),
                "beyond_detection_and_startup": _quantiles(beyond),
                "share_within_target": _share(beyond),
            },
            "ended_by_themselves": [error for r in self.results for error in r.errors],
            "each": [_round(r) for r in self.results],
        }

    def _by_kind(self) -> dict[str, list[Outage]]:
        kinds = sorted({outage.kind for outage in self.outages})
        return {kind: [o for o in self.outages if o.kind == kind] for kind in kinds}

    def write(self, path: Path) -> None:
        """Leave it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.data(), indent=2) + "\n")

    def show(self, console: Console) -> None:
        """Show it on a terminal."""
        data = self.data()
        rounds = len(self.results)
        console.print()
        console.print(
            f"[bold]{rounds - len(data['failed_rounds'])} of {rounds} rounds kept every "
            f"promise[/bold]; seed {self.seed}, {data['seconds'] / 60:.1f} minutes"
        )
        for what in self.left_out:
            console.print(f"[bold red]LEFT OUT, AND SO NOT TESTED:[/bold red] {what}")
        console.print(_faults_table(data))
        console.print(
            f"{data['recoveries']} recoveries, {data['restarts']} workers started again, "
            f"{data['steps_repeated']} of {data['steps']} steps done again, "
            f"{data['seconds_lost']:.0f} s without training"
        )
        simple = data["simple_kills"]
        if simple["total"]:
            total, beyond = simple["total"], simple["beyond_detection_and_startup"]
            console.print(
                f"one worker killed and replaced at once ({total['count']} times): training again "
                f"after p50 {total['p50']:.2f} s, p99 {total['p99']:.2f} s; a new process alone "
                f"takes p50 {simple['startup']['p50']:.2f} s to start, and a death is noticed "
                f"after {TIMEOUT:g} s; beyond the longer of both p50 {beyond['p50']:.2f} s, p99 "
                f"{beyond['p99']:.2f} s; {simple['share_within_target']:.0%} within "
                f"{BEYOND_SECONDS:g} s"
            )


def _faults_table(data: dict[str, Any]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, header_style="dim")
    made.add_column("fault")
    for heading in ("times", "training again: p50 s", "p99", "max", "after its cause: p50", "max"):
        made.add_column(heading, justify="right")
    for kind, times in data["faults"].items():
        total = data["seconds_to_training"].get(kind)
        after = data["seconds_after_the_cause_was_gone"].get(kind)
        cells = [*_cells(total, "p50", "p99", "max"), *_cells(after, "p50", "max")]
        made.add_row(kind, str(times), *cells)
    return made


def _cells(found: dict[str, float] | None, *names: str) -> list[str]:
    return [f"{found[name]:.2f}" if found else "–" for name in names]


def _round(result: Result) -> dict[str, Any]:
    return {
        "number": result.plan.number,
        "title": result.plan.title,
        "seconds": result.seconds,
        "faults": dict(result.faults),
        "repeated": result.repeated,
        "proof": result.proof,
        "failure": result.failure,
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return {"count": len(values), "p50": float(p50), "p99": float(p99), "max": max(values)}


def _beyond(outage: Outage) -> float:
    """What took longer than noticing the death and starting another process, side by side."""
    return (outage.seconds or 0.0) - max(TIMEOUT, outage.startup or 0.0)


def _share(beyond: list[float]) -> float:
    return sum(x < BEYOND_SECONDS for x in beyond) / len(beyond) if beyond else 0.0


def _lost(outages: Iterable[Outage]) -> float:
    """For how long a round did not train; what overlaps counts once."""
    total, until = 0.0, 0.0
    spans = [(o.at, o.at + o.seconds) for o in outages if o.seconds is not None]
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
