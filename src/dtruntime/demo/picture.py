"""The live picture of a run: a row for each rank, and how far all of them are."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..types import Membership, WorkerState, WorkerStatus
from .progress import RunSnapshot

BAR_WIDTH = 24
_COLUMNS = ("rank", "worker", "process", "state", "step", "samples", "heartbeat")
_WIDTHS = (4, 10, 8, 12, 7, 8, 9)
_LEFT = frozenset({"worker", "state"})
_OLD_SECONDS = 0.8
"""A heartbeat of this age is late."""


def picture(scene: RunSnapshot) -> RenderableType:
    """As many lines as there are ranks, and four; no more than 80 columns."""
    table = Table.grid(padding=(0, 2))
    for name, width in zip(_COLUMNS, _WIDTHS, strict=True):
        table.add_column(
            min_width=width, justify="left" if name in _LEFT else "right", no_wrap=True
        )
    table.add_row(*(Text(name, "dim") for name in _COLUMNS))
    for rank in range(scene.plan.workers):
        table.add_row(*_row(scene, rank, scene.members.rank(rank)))
    return Padding(Group(_headline(scene), table, _bottom(scene)), (1, 0, 0, 1))


def _headline(scene: RunSnapshot) -> Text:
    text = Text.assemble(("● ", "red" if scene.is_held or scene.is_alone else "green"))
    text.append(f"{scene.elapsed:.1f} s  ", "dim")
    text.append(scene.title, "bold")
    if scene.is_alone:
        text.append("   the coordinator is away", "bold red")
    elif scene.is_held:
        text.append("   a worker is missing", "bold red")
    return text


def _row(scene: RunSnapshot, rank: int, worker: WorkerStatus | None) -> tuple[Text, ...]:
    if worker is None:
        return (Text(str(rank)), Text(""), Text(""), Text("starting", "dim"))
    name, style = _state(scene, worker)
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


def _state(scene: RunSnapshot, worker: WorkerStatus) -> tuple[str, str]:
    """What a worker does, in a word, and how that is shown."""
    if worker.worker_id in scene.killed:
        return "killed", "bold red"
    if worker.rank in scene.replacing and worker.membership is Membership.DEAD:
        return "replacing", "yellow"
    if worker.membership is Membership.DEAD:
        return "dead", "bold red"
    if worker.membership is Membership.LEFT or worker.state is WorkerState.FINISHED:
        return "finished", "green"
    if scene.is_held or worker.state is WorkerState.RECOVERING:
        return "waiting", "yellow"
    if worker.state is WorkerState.IDLE or not scene.tally.step:
        return "joining", "dim"
    # Workers wait for each other in every step; that is part of training.
    return "training", "cyan"


def _bottom(scene: RunSnapshot) -> Table:
    plan, tally = scene.plan, scene.tally
    bar = ProgressBar(
        plan.total_steps,
        tally.step,
        width=BAR_WIDTH,
        complete_style="yellow" if scene.is_held else "cyan",
        finished_style="green",
    )
    line = Table.grid(padding=(0, 1))
    for _ in range(3):
        line.add_column(no_wrap=True)
    line.add_row(bar, Text(f"{tally.step:,}/{plan.total_steps:,}"), Text(describe(scene), "dim"))
    return line


def describe(scene: RunSnapshot) -> str:
    """How training goes, in a few words."""
    parts = []
    if scene.members.checkpoint_step is not None:
        parts.append(f"saved {scene.members.checkpoint_step:,}")
    if scene.tally.loss is not None:
        parts.append(f"loss {scene.tally.loss:.3f}")
    rate = scene.tally.steps_per_second
    if rate is not None and not scene.is_held:
        parts.append(f"{rate * scene.plan.batch_size:,.0f}/s")
    return "  ".join(parts)
