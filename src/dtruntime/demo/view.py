"""What a demonstration looks like: live in a terminal, plain lines anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..display import count, duration, size
from ..types import Membership, WorkerState, WorkerStatus
from .plan import Plan
from .processes import DemoFailed
from .progress import Happening, Progress
from .runner import Outcome

NEXT = "next: strata coordinator (for your own training), strata doctor, strata --help"
PLAIN_SECONDS = 2.0
"""How often plain output says how far it is."""
OBSERVING = frozenset({"GetServerInfo", "GetStatus", "ListJobs", "WatchEvents"})
"""Methods that the demonstration itself calls, to watch."""
_STATE_STYLES = {
    WorkerState.TRAINING: "cyan",
    WorkerState.CHECKPOINTING: "green",
    WorkerState.WAITING: "yellow",
    WorkerState.FINISHED: "green",
}


class View:
    """Shows one run; leaving the ``with`` block gives the terminal back."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console = console
        self._live = None if plain else Live(console=console, auto_refresh=False, transient=True)
        self._plan: Plan | None = None
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
        text = Text.assemble(
            ("strata demo", "bold"),
            f": {count(plan.workers, 'worker')}, {count(plan.epochs, 'epoch')} of training a digit "
            "classifier",
        )
        self._console.print(text)

    def opened(self, plan: Plan, url: str) -> None:
        """The coordinator serves."""
        self._plan = plan
        hint = f"          another terminal: strata status --watch --url {url}"
        self._console.print(Text(hint, "dim"), soft_wrap=True)

    def happened(self, happening: Happening) -> None:
        """One line that stays."""
        self._console.print(
            Text.assemble(
                (f"{happening.elapsed:6.1f} s  ", "dim"),
                (f"{happening.topic:<11} ", happening.style),
                (happening.text, "dim" if happening.style == "dim" else ""),
            ),
            soft_wrap=True,
        )

    def advanced(self, elapsed: float, progress: Progress) -> None:
        """How far everybody is."""
        if self._plan is None:
            return
        if self._live is not None:
            self._live.update(_picture(self._plan, progress), refresh=True)
        elif progress.workers and elapsed >= self._next_line:
            self._next_line = elapsed + PLAIN_SECONDS
            self.happened(Happening(elapsed, "progress", _one_line(self._plan, progress)))

    # At the end

    def failed(self, failure: DemoFailed) -> None:
        """Why there is no result."""
        self._console.print(Text.assemble(("\n✗ ", "bold red"), str(failure)), soft_wrap=True)
        if failure.tail:
            self._console.print(Text("\n  the end of its log:", "dim"))
        for line in failure.tail:
            self._console.print(Text(f"  │ {line}", "dim"), soft_wrap=True)

    def interrupted(self) -> None:
        """Somebody stopped it."""
        self._console.print("\ninterrupted; all processes of the demo have ended")

    def ended(self, outcome: Outcome, kept_at: str | None) -> None:
        """What came out."""
        self._console.print()
        for check in outcome.verdict.checks:
            mark = ("✓", "green") if check.passed else ("✗", "bold red")
            self._entry(mark, check.name, check.text)
        for name, text in _facts(outcome).items():
            self._entry(("·", "dim"), name, text)
        if kept_at is not None:
            self._entry(("·", "dim"), "kept", f"data, checkpoints and logs in {kept_at}")
        if outcome.verdict.passed:
            self._console.print(Text(f"\n  {NEXT}", "dim"))
        else:
            self._console.print(Text("\n  the run did not do what it should", "bold red"))

    def _entry(self, mark: tuple[str, str], name: str, text: str) -> None:
        line = Text.assemble("  ", mark, f" {name:<11} ", text)
        self._console.print(line, soft_wrap=True)


def _picture(plan: Plan, progress: Progress) -> RenderableType:
    """A bar for each worker, and what all of them have reached."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    table.add_column(justify="right", min_width=len(f"{plan.total_steps:,}") * 2 + 1)
    table.add_column(min_width=max(len(state) for state in WorkerState))
    for rank in range(plan.workers):
        table.add_row(f"worker-{rank}", *_row(plan, progress.worker(rank)))
    latest = progress.latest_checkpoint
    parts = [count(progress.barrier.calls // plan.workers, "barrier")]
    if progress.barrier.calls:
        parts[0] += f", p50 {duration(progress.barrier.p50)}"
    parts.append(count(progress.checkpoint_count, "checkpoint"))
    if latest is not None and progress.accuracy is not None:
        parts[1] += f", {size(latest.size_bytes)} each"
        parts.append(f"accuracy {progress.accuracy:.1%}")
    return Padding(Group(table, Text("   ".join(parts), "dim")), (1, 0, 0, 2))


def _row(plan: Plan, worker: WorkerStatus | None) -> tuple[RenderableType, ...]:
    if worker is None:
        return (_bar(plan, 0), "", Text("starting", "dim"), "", "")
    bar = _bar(plan, worker.step or 0)
    step = Text(f"{worker.step or 0:,}/{plan.total_steps:,}", "dim")
    dead = worker.membership is Membership.DEAD
    state = Text("dead", "red") if dead else Text(worker.state, _STATE_STYLES.get(worker.state, ""))
    epoch = Text(f"epoch {min(worker.epoch + 1, plan.epochs)}/{plan.epochs}", "dim")
    loss = worker.metrics.get("loss")
    return bar, step, state, epoch, "" if loss is None else f"loss {loss:.3f}"


def _bar(plan: Plan, step: int) -> ProgressBar:
    return ProgressBar(
        plan.total_steps, step, width=30, complete_style="cyan", finished_style="green"
    )


def _one_line(plan: Plan, progress: Progress) -> str:
    step = progress.step
    text = f"step {step:,} of {plan.total_steps:,} ({step / plan.total_steps:.0%})"
    losses = [worker.metrics["loss"] for worker in progress.workers if "loss" in worker.metrics]
    if losses:
        text += f", loss {sum(losses) / len(losses):.3f}"
    if progress.accuracy is not None:
        text += f", accuracy {progress.accuracy:.1%}"
    return text + f", {count(progress.barrier.calls // plan.workers, 'barrier')}"


def _facts(outcome: Outcome) -> dict[str, str]:
    plan, last, results = outcome.plan, outcome.progress, outcome.verdict.results
    samples = sum(result.samples for result in results)
    training = max(result.training_seconds for result in results)
    asked = [use for use in last.methods if use.method not in OBSERVING]
    errors = sum(use.errors for use in asked)
    busiest = max(asked, key=lambda use: use.calls)
    return {
        "barriers": f"{results[0].barriers:,}; wait for the slowest worker "
        f"p50 {duration(last.barrier.p50)}, p99 {duration(last.barrier.p99)}",
        "requests": f"{sum(use.calls for use in asked):,} by the workers, {errors} failed; most "
        f"often {busiest.method}, {busiest.calls:,}",
        "throughput": f"{samples / training:,.0f} samples/s by {count(plan.workers, 'worker')}",
        "time": f"{duration(outcome.seconds)}, of which training {duration(training)}",
    }
