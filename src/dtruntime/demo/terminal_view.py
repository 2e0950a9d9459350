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
from .scenario import Scenario
from .timeline import RunSnapshot

if TYPE_CHECKING:
    from .demonstration import DemoFailed
    from .proof import Outcome

NEXT = "next: strata demo --kill coordinator; or --kill none, and kill what you like"
PLAIN_SECONDS = 2.0
"""How often plain output reports progress."""
LATE_SECONDS = 0.8
"""A heartbeat of this age is late."""
BAR_WIDTH = 24
_COLUMNS = {
    "rank": 4,
    "worker": 10,
    "process": 8,
    "state": 12,
    "step": 7,
    "samples": 8,
    "heartbeat": 9,
}
"""Their widths."""


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

    def began(self, plan: Scenario) -> None:
        """The first line."""
        text = f": {count(plan.workers, 'worker')} train a digit classifier together, "
        self._print(("strata demo", "bold"), f"{text}{plan.total_steps:,} steps")

    def say(self, topic: str, text: str, style: str = "", *, at: float | None = None) -> None:
        """One line that stays, about what happened now or ``at`` a time in seconds since 1970."""
        elapsed = self.elapsed if at is None else at - self._began
        self._print((f"{elapsed:6.1f} s  ", "dim"), (f"{topic:<11} ", style), text)

    def show(self, run: RunSnapshot) -> None:
        """The present progress."""
        if self._live is not None:
            self._live.update(live_table(run), refresh=True)
        elif run.tally.step and not run.is_held and run.elapsed >= self._next_line:
            self._next_line = run.elapsed + PLAIN_SECONDS
            steps = f"step {run.tally.step:,} of {run.plan.total_steps:,}"
            self.say("progress", f"{steps}  {_describe(run)}")

    def failed(self, failure: DemoFailed, kept_at: str | None) -> None:
        """Why there is no result."""
        self._print(("\n✗ ", "bold red"), str(failure))
        if failure.tail:
            self._print(("\n  the end of its log:", "dim"))
        for line in failure.tail:
            self._print((f"  │ {line}", "dim"))
        self._print((f"\n  {_logs(kept_at)}", "dim"))

    def interrupted(self) -> None:
        """The user stopped it."""
        self._print("\ninterrupted; all processes of the demo have ended")

    def ended(self, outcome: Outcome, kept_at: str | None) -> None:
        """The results."""
        self._print("")
        for incident in outcome.disturbed.incidents:
            for name, text in incident.facts.items():
                self._entry(("·", "dim"), name, text)
        training = f"training took {duration(outcome.disturbed.training_seconds)}"
        training += " with the kill" if outcome.disturbed.incidents else ""
        undisturbed = duration(outcome.undisturbed.training_seconds)
        text = f"{duration(outcome.seconds)} in all; {training}, {undisturbed} undisturbed"
        self._entry(("·", "dim"), "time", text)
        self._print("")
        for check in outcome.checks:
            mark = ("✓", "green") if check.passed else ("✗", "bold red")
            self._entry(mark, check.name, check.text)
            if not check.passed and check.where is not None and kept_at is not None:
                self._entry(("", ""), "", f"see {check.where}")
        if outcome.passed:
            self._print((f"\n  {f'kept in {kept_at}; ' if kept_at else ''}{NEXT}", "dim"))
        else:
            failed = ", ".join(check.name for check in outcome.checks if not check.passed)
            self._print(("\n✗ ", "bold red"), f"the proof does not hold: {failed}")
            self._print((f"  {_logs(kept_at)}", "dim"))

    def stays(self, dashboard: str) -> None:
        """The dashboard is still served."""
        self._print("\n  look at it: ", (dashboard, "bold"), "   Enter ends the demo")

    def _entry(self, mark: tuple[str, str], name: str, text: str) -> None:
        self._print("  ", mark, f" {name:<11} ", text)

    def _print(self, *parts: str | tuple[str, str]) -> None:
        self._console.print(Text.assemble(*parts), soft_wrap=True)


def _logs(kept_at: str | None) -> str:
    if kept_at is None:
        return "to keep its data, checkpoints and logs, add --keep DIR"
    return f"data, checkpoints and logs are in {Path(kept_at).absolute()}"


def live_table(run: RunSnapshot) -> RenderableType:
    """As many lines as there are ranks, and four; no more than 80 columns."""
    plan, tally, is_away = run.plan, run.tally, run.is_held or run.is_alone
    missing = "the coordinator is away" if run.is_alone else "a worker is missing"
    head = Text.assemble(
        ("● ", "red" if is_away else "green"),
        (f"{run.elapsed:.1f} s  ", "dim"),
        (run.title, "bold"),
        (f"   {missing}" if is_away else "", "bold red"),
    )
    table = Table.grid(padding=(0, 2))
    for name, width in _COLUMNS.items():
        left = name in ("worker", "state")
        table.add_column(min_width=width, justify="left" if left else "right", no_wrap=True)
    table.add_row(*(Text(name, "dim") for name in _COLUMNS))
    for rank in range(plan.workers):
        table.add_row(*_row(run, rank, run.worker(rank)))
    line = Table.grid(padding=(0, 1))
    style = "yellow" if run.is_held else "cyan"
    bar = ProgressBar(
        plan.total_steps, tally.step, BAR_WIDTH, complete_style=style, finished_style="green"
    )
    line.add_row(bar, Text(f"{tally.step:,}/{plan.total_steps:,}"), Text(_describe(run), "dim"))
    for column in line.columns:
        column.no_wrap = True
    return Padding(Group(head, table, line), (1, 0, 0, 1))


def _row(run: RunSnapshot, rank: int, worker: WorkerStatus | None) -> tuple[Text, ...]:
    if worker is None:
        return (Text(str(rank)), Text(""), Text(""), Text("starting", "dim"))
    age, is_live = worker.heartbeat_age, worker.membership is Membership.LIVE
    return (
        Text(str(rank)),
        Text(worker.worker_id, "" if is_live else "dim"),
        Text(worker.process.partition("@")[0], "dim"),
        Text(*_state(run, worker)),
        Text(f"{worker.step or 0:,}"),
        Text(f"{int(worker.metrics.get('samples', 0)):,}"),
        Text(f"{age:.1f} s" if is_live else "", "bold red" if age > LATE_SECONDS else "dim"),
    )


def _state(run: RunSnapshot, worker: WorkerStatus) -> tuple[str, str]:
    """The state of a worker in a word, and its style."""
    if worker.worker_id in run.killed:
        return "killed", "bold red"
    if worker.membership is Membership.DEAD:
        is_replaced = worker.rank in run.replacing
        return ("replacing", "yellow") if is_replaced else ("dead", "bold red")
    if worker.membership is Membership.LEFT or worker.state is WorkerState.FINISHED:
        return "finished", "green"
    if run.is_held or worker.state is WorkerState.RECOVERING:
        return "waiting", "yellow"
    if worker.state is WorkerState.IDLE or not run.tally.step:
        return "joining", "dim"
    # Workers wait for each other in every step; that is part of training.
    return "training", "cyan"


def _describe(run: RunSnapshot) -> str:
    """Checkpoint, loss and speed in a few words."""
    parts = []
    if run.job is not None and run.job.latest_checkpoint is not None:
        parts.append(f"saved {run.job.latest_checkpoint.step:,}")
    if run.tally.loss is not None:
        parts.append(f"loss {run.tally.loss:.3f}")
    if run.tally.steps_per_second and not run.is_held:
        parts.append(f"{run.tally.steps_per_second * run.plan.batch_size:,.0f}/s")
    return "  ".join(parts)
