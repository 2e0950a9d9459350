"""All workers of a run save into one place; whoever has another is named, and leaves."""

from pathlib import Path

import numpy as np
import pytest

from dtruntime import CheckpointManager, ConfigError, Run
from tests.integration.run.test_operator_requests import (
    HOLD,
    SAMPLES,
    crew_of,
    let_go,
    outcome,
    saved,
)

TOTAL = SAMPLES * (SAMPLES - 1) / 2
ELSEWHERE = "is another place than that of"


def start_elsewhere(crew, folder: Path) -> None:
    """One more worker, whose checkpoints are in another folder; what it says is in its log."""
    folder.mkdir()
    command, crew.command = crew.command, [crew.command[0], folder, *crew.command[2:]]
    crew.start(1)
    crew.command = command


@pytest.mark.long
@pytest.mark.deaths
def test_replacement_with_another_folder_is_named_and_the_crew_waits_for_a_right_one(
    coordinator, job, tmp_path
):
    folder = tmp_path / "shared"
    with crew_of(folder, coordinator, job, 2, hold=HOLD, save_steps=5) as crew:
        crew.until("a save", lambda: max(saved(folder), default=0) >= 5)
        victim, survivor = crew.trainers
        victim.kill()
        let_go(crew)
        crew.until("the loss", lambda: "run.regrouping" in survivor.log)
        start_elsewhere(crew, tmp_path / "not-mounted")
        odd = crew.trainers[-1]
        assert odd.process.wait(60) == 1, odd.log
        assert ELSEWHERE in odd.log
        assert str(folder / "checkpoints") in odd.log
        assert str(tmp_path / "not-mounted" / "checkpoints") in odd.log
        assert not saved(tmp_path / "not-mounted"), "it began to train by itself"
        crew.start(1)
        crew.wait(1)
    assert outcome(crew, 1)["total"] == outcome(crew, 3)["total"] == TOTAL


def test_odd_one_of_three_leaves_before_the_first_step(coordinator, job, tmp_path):
    folder = tmp_path / "shared"
    with crew_of(folder, coordinator, job, 3, started=2) as crew:
        start_elsewhere(crew, tmp_path / "typo")
        odd = crew.trainers[-1]
        assert odd.process.wait(60) == 1, odd.log
        assert ELSEWHERE in odd.log
        crew.until("the others are told", lambda: "run.other_place" in crew.trainers[0].log)
        crew.start(1)
        crew.wait(1)
    assert {outcome(crew, number)["total"] for number in (0, 1, 3)} == {TOTAL}
    assert "typo" in crew.trainers[0].log
    assert not saved(tmp_path / "typo")


def test_two_workers_with_a_folder_each_are_told_what_they_need(coordinator, job, tmp_path):
    with crew_of(tmp_path / "one", coordinator, job, 2, started=1) as crew:
        start_elsewhere(crew, tmp_path / "two")
        ended = [trainer.process.wait(60) for trainer in crew.trainers]
        logs = [trainer.log for trainer in crew.trainers]
    assert ended == [1, 1], crew.logs()
    for log in logs:
        assert "2 different places" in log
        for name in ("one", "two"):
            assert str(tmp_path / name / "checkpoints") in log
    assert not saved(tmp_path / "one")


def run_alone(url: str, job: str, folder: Path, steps: int, last: int = 10) -> int:
    """Train up to a step, in a run that would go on to ``last``; the step that it began after."""
    with Run(
        folder, coordinator_url=url, job=job, world_size=1, max_steps=last, state={"x": np.zeros(1)}
    ) as run:
        began = run.step
        for _ in run:
            with run.guard():
                pass
            if run.step + 1 == steps < last:
                break
    return began


def test_single_worker_does_not_begin_anew_in_an_empty_folder(coordinator, job, tmp_path):
    assert run_alone(coordinator.url, job, tmp_path / "first", 4) == 0
    with pytest.raises(ConfigError, match="is another place than that of job") as told:
        run_alone(coordinator.url, job, tmp_path / "empty", 6)
    assert str(tmp_path / "first") in str(told.value)
    assert "STRATA_JOB" in str(told.value)
    # The same place under another name, and a copy without the file that names it, are right.
    (tmp_path / "first").rename(tmp_path / "moved")
    assert run_alone(coordinator.url, job, tmp_path / "moved", 5) == 4
    (tmp_path / "moved" / "place.json").unlink()
    assert run_alone(coordinator.url, job, tmp_path / "moved", 6) == 5
    # Whoever means another run says so.
    assert run_alone(coordinator.url, f"{job}-anew", tmp_path / "empty", 10) == 0


def test_finished_job_can_be_run_anew_in_another_folder(coordinator, job, tmp_path):
    assert run_alone(coordinator.url, job, tmp_path / "first", 10) == 0
    assert run_alone(coordinator.url, job, tmp_path / "second", 10) == 0
    assert saved(tmp_path.parent) == []
    with CheckpointManager(tmp_path / "second") as manager:
        assert manager.newest_step() == 10


def test_checkpoints_that_another_manager_commits_in_the_job_do_not_matter(
    coordinator, job, tmp_path
):
    url = coordinator.url
    with Run(tmp_path / "run", coordinator_url=url, job=job, world_size=1, max_steps=4) as run:
        for _ in run:
            with run.guard():
                pass
            with CheckpointManager(tmp_path / "export", orchestrator=run.orchestrator) as export:
                export.save(b"weights", step=run.step + 1)
            if run.step + 1 == 2:
                break
    with Run(tmp_path / "run", coordinator_url=url, job=job, world_size=1, max_steps=4) as run:
        assert run.step == 2
        list(run)
    assert run.ending == "finished"
