"""What a demonstration looks like: live in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..display import count, duration
from ..types import Membership, WorkerState, WorkerStatus
from .launcher import DemoFailed
from .progress import RunSnapshot
from .scenario import Scenario

if TYPE_CHECKING:
    from .proof import Outcome

NEXT = "next: strata demo --kill coordinator; or --kill none, and kill what you like"
PLAIN_SECONDS = 2.0
"""How often plain output says how far it is."""


class TerminalView:
    """Shows a demonstration; leaving the ``with`` block gives the terminal back."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console = console
        self._live = None if plain else Live(console=console, auto_refresh=False, transient=True)
        self._next_line = 0.0
        self._began = time.time()

    @property
    def elapsed(self) -> float:
        """Seconds since the demonstration began."""
        return time.time() - self._began

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.stop()

    # While it runs

    def began(self, plan: Scenario) -> None:
        """The first words."""
        text = f": {count(plan.workers, 'worker')} train a digit classifier together, "
        text += f"{plan.total_steps:,} steps"
        self._console.print(Text.assemble(("strata demo", "bold"), text))

    def say(self, topic: str, text: str, style: str = "", *, at: float | None = None) -> None:
        """One line that stays, about what happened now or ``at`` a time in seconds since 1970."""
        elapsed = self.elapsed if at is None else at - self._began
        line = Text.assemble((f"{elapsed:6.1f} s  ", "dim"), (f"{topic:<11} ", style), text)
        self._console.print(line, soft_wrap=True)

    def show(self, run: RunSnapshot) -> None:
        """How far everybody is."""
        if self._live is not None:
            self._live.update(live_table(run), refresh=True)
        elif run.tally.step and not run.is_held and run.elapsed >= self._next_line:
            self._next_line = run.elapsed + PLAIN_SECONDS
            steps = f"step {run.tally.step:,} of {run.plan.total_steps:,}"
            self.say("progress", f"{steps}  {describe(run)}")

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


BAR_WIDTH = 24
_COLUMNS = ("rank", "worker", "process", "state", "step", "samples", "heartbeat")
_WIDTHS = (4, 10, 8, 12, 7, 8, 9)
_LEFT = frozenset({"worker", "state"})
_OLD_SECONDS = 0.8
"""A heartbeat of this age is late."""


def live_table(run: RunSnapshot) -> RenderableType:
    """As many lines as there are ranks, and four; no more than 80 columns."""
    table = Table.grid(padding=(0, 2))
    for name, width in zip(_COLUMNS, _WIDTHS, strict=True):
        table.add_column(
            min_width=width, justify="left" if name in _LEFT else "right", no_wrap=True
        )
    table.add_row(*(Text(name, "dim") for name in _COLUMNS))
    for rank in range(run.plan.workers):
        table.add_row(*_row(run, rank, run.worker(rank)))
    return Padding(Group(_headline(run), table, _bottom(run)), (1, 0, 0, 1))


def _headline(run: RunSnapshot) -> Text:
    text = Text.assemble(("● ", "red" if run.is_held or run.is_alone else "green"))
    text.append(f"{run.elapsed:.1f} s  ", "dim")
    text.append(run.title, "bold")
    if run.is_alone:
        text.append("   the coordinator is away", "bold red")
    elif run.is_held:
        text.append("   a worker is missing", "bold red")
    return text


def _row(run: RunSnapshot, rank: int, worker: WorkerStatus | None) -> tuple[Text, ...]:
    if worker is None:
        return (Text(str(rank)), Text(""), Text(""), Text("starting", "dim"))
    name, style = _state(run, worker)
    age = worker.heartbeat_age
    is_there = worker.membership is Membership.LIVE
    late = "bold red" if age > _OLD_SECONDS else "dim"
    return (
        Text(str(rank)),
        Text(worker.worker_id, "" if is_there else "dim"),
        Text(worker.process.partition("@")[0], "dim"),
        Text(name, style),
        Text(f"{worker.step or 0:,}"),
        Text(f"{int(worker.metrics.get('samples', 0)):,}"),
        Text(f"{age:.1f} s" if is_there else "", late),
    )


def _state(run: RunSnapshot, worker: WorkerStatus) -> tuple[str, str]:
    """What a worker does, in a word, and how that is shown."""
    if worker.worker_id in run.killed:
        return "killed", "bold red"
    if worker.rank in run.replacing and worker.membership is Membership.DEAD:
        return "replacing", "yellow"
    if worker.membership is Membership.DEAD:
        return "dead", "bold red"
    if worker.membership is Membership.LEFT or worker.state is WorkerState.FINISHED:
        return "finished", "green"
    if run.is_held or worker.state is WorkerState.RECOVERING:
        return "waiting", "yellow"
    if worker.state is WorkerState.IDLE or not run.tally.step:
        return "joining", "dim"
    # Workers wait for each other in every step; that is part of training.
    return "training", "cyan"


def _bottom(run: RunSnapshot) -> Table:
    plan, tally = run.plan, run.tally
    bar = ProgressBar(
        plan.total_steps,
        tally.step,
        width=BAR_WIDTH,
        complete_style="yellow" if run.is_held else "cyan",
        finished_style="green",
    )
    line = Table.grid(padding=(0, 1))
    for _ in range(3):
        line.add_column(no_wrap=True)
    line.add_row(bar, Text(f"{tally.step:,}/{plan.total_steps:,}"), Text(describe(run), "dim"))
    return line


def describe(run: RunSnapshot) -> str:
    """How training goes, in a few words."""
    parts = []
    if run.job is not None and run.job.latest_checkpoint is not None:
        parts.append(f"saved {run.job.latest_checkpoint.step:,}")
    if run.tally.loss is not None:
        parts.append(f"loss {run.tally.loss:.3f}")
    rate = run.tally.steps_per_second
    if rate is not None and not run.is_held:
        parts.append(f"{rate * run.plan.batch_size:,.0f}/s")
    return "  ".join(parts)
