"""What a demonstration looks like: live in a terminal, plain lines anywhere else."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..display import count, duration
from .demonstration import Outcome
from .picture import describe, picture
from .processes import DemoFailed
from .progress import LogLine, RunSnapshot
from .scenario import Plan

NEXT = "next: strata demo --kill coordinator; or --kill none, and kill what you like"
PLAIN_SECONDS = 2.0
"""How often plain output says how far it is."""


class View:
    """Shows a demonstration; leaving the ``with`` block gives the terminal back."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console = console
        self._live = None if plain else Live(console=console, auto_refresh=False, transient=True)
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.stop()

    # While it runs

    def began(self, plan: Plan) -> None:
        """The first words."""
        text = f": {count(plan.workers, 'worker')} train a digit classifier together, "
        text += f"{plan.total_steps:,} steps"
        self._console.print(Text.assemble(("strata demo", "bold"), text))

    def happened(self, happening: LogLine) -> None:
        """One line that stays."""
        self._console.print(
            Text.assemble(
                (f"{happening.elapsed:6.1f} s  ", "dim"),
                (f"{happening.topic:<11} ", happening.style),
                happening.text,
            ),
            soft_wrap=True,
        )

    def advanced(self, scene: RunSnapshot) -> None:
        """How far everybody is."""
        if self._live is not None:
            self._live.update(picture(scene), refresh=True)
        elif scene.tally.step and not scene.is_held and scene.elapsed >= self._next_line:
            self._next_line = scene.elapsed + PLAIN_SECONDS
            text = f"step {scene.tally.step:,} of {scene.plan.total_steps:,}  {describe(scene)}"
            self.happened(LogLine(scene.elapsed, "progress", text))

    # At the end

    def failed(self, failure: DemoFailed, kept_at: str | None) -> None:
        """Why there is no result."""
        self._console.print(Text.assemble(("\n✗ ", "bold red"), str(failure)), soft_wrap=True)
        if failure.tail:
            self._console.print(Text("\n  the end of its log:", "dim"))
        for line in failure.tail:
            self._console.print(Text(f"  │ {line}", "dim"), soft_wrap=True)
        self._console.print(Text(f"\n  {_logs(kept_at)}", "dim"), soft_wrap=True)

    def interrupted(self) -> None:
        """Somebody stopped it."""
        self._console.print("\ninterrupted; all processes of the demo have ended")

    def ended(self, outcome: Outcome, kept_at: str | None) -> None:
        """What came out."""
        self._console.print()
        for incident in outcome.disturbed.incidents:
            for name, text in incident.facts().items():
                self._entry(("·", "dim"), name, text)
        self._entry(("·", "dim"), "time", _times(outcome))
        self._console.print()
        for check in outcome.checks:
            mark = ("✓", "green") if check.passed else ("✗", "bold red")
            self._entry(mark, check.name, check.text)
            if not check.passed and check.where is not None and kept_at is not None:
                self._entry(("", ""), "", f"see {check.where}")
        if outcome.passed:
            text = f"kept in {kept_at}; " if kept_at else ""
            self._console.print(Text(f"\n  {text}{NEXT}", "dim"), soft_wrap=True)
        else:
            failed = ", ".join(check.name for check in outcome.checks if not check.passed)
            self._console.print(
                Text.assemble(("\n✗ ", "bold red"), f"the proof does not hold: {failed}")
            )
            self._console.print(Text(f"  {_logs(kept_at)}", "dim"), soft_wrap=True)

    def stays(self, dashboard: str) -> None:
        """The dashboard can be looked at."""
        self._console.print(
            Text.assemble("\n  look at it: ", (dashboard, "bold"), "   Enter ends the demo"),
            soft_wrap=True,
        )

    def _entry(self, mark: tuple[str, str], name: str, text: str) -> None:
        line = Text.assemble("  ", mark, f" {name:<11} ", text)
        self._console.print(line, soft_wrap=True)


def _times(outcome: Outcome) -> str:
    disturbed = duration(outcome.disturbed.training_seconds)
    undisturbed = duration(outcome.undisturbed.training_seconds)
    text = f"{duration(outcome.seconds)} in all; training took {disturbed}"
    if outcome.disturbed.incidents:
        text += " with the kill"
    return f"{text}, {undisturbed} undisturbed"


def _logs(kept_at: str | None) -> str:
    if kept_at is None:
        return "to keep its data, checkpoints and logs, add --keep DIR"
    return f"data, checkpoints and logs are in {Path(kept_at).absolute()}"
