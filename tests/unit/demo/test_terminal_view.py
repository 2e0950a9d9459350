"""The live picture: it fits a small terminal, and does not jump."""

import io

import pytest
from rich.console import Console

from dtruntime.demo.scenario import Scenario
from dtruntime.demo.terminal_view import live_table
from dtruntime.demo.timeline import RunSnapshot, StepNote, StepTally
from dtruntime.types import CheckpointInfo, JobStatus, Membership, WorkerState, WorkerStatus

PLAN = Scenario(root="/nowhere", epochs=1000)


def draw(scene: RunSnapshot) -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(live_table(scene))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def worker(rank, membership=Membership.LIVE, state=WorkerState.WAITING, name=""):
    return WorkerStatus(
        name or f"worker-{rank}", rank, rank + 1, membership, state, 119_000, 2, 0.2,
        process="4194304@host", metrics={"samples": 23_900_000},
    )  # fmt: skip


def scene(*workers, **fields):
    tally = StepTally()
    tally.add(
        StepNote(at=float(s), generation=1, step=119_000 + s, epoch=0, rank=0, loss=0.123, ids=[])
        for s in range(1, 4)
    )
    saved = CheckpointInfo("step-118000", 118_000)
    job = JobStatus("demo", 1, 4, 4, 0, 0, 0, 1, 1, workers=workers, latest_checkpoint=saved)
    return RunSnapshot(PLAN, "run 1 of 2", 61.5, job, tally, **fields)


LIVE = [worker(rank) for rank in range(4)]
DEAD = [*LIVE[:2], worker(2, Membership.DEAD), LIVE[3]]


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        (scene(*LIVE), "training"),
        (scene(), "starting"),
        (scene(*LIVE, killed=frozenset({"worker-2"}), is_held=True), "killed"),
        (scene(*DEAD, is_held=True), "dead"),
        (scene(*DEAD, replacing=frozenset({2}), is_held=True), "replacing"),
        (scene(*LIVE, is_alone=True), "coordinator is away"),
    ],
)
def test_picture_keeps_its_height_within_80_columns(shown, state):
    lines = draw(shown)

    assert len(lines) == len(draw(scene(*LIVE))) == PLAN.workers + 4
    assert max(len(line) for line in lines) <= 80
    assert state in "\n".join(lines)


def test_survivors_wait_while_somebody_is_missing():
    text = "\n".join(draw(scene(*DEAD, is_held=True)))

    assert text.count("waiting") == 3
    assert "training" not in text
