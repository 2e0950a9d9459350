"""A newcomer that is lost before it trains costs the crew nothing: no rollback, no failure."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtruntime.testing import LocalCoordinator
from tests.integration.run.test_crews import TOTAL, live
from tests.integration.run.test_operator_requests import crew_of, let_go, outcome
from tests.support.crews import Trainer, TrainingCrew

HOLD = 30


@contextmanager
def elastic_crew(
    folder: Path, coordinator: LocalCoordinator, job: str, workers: int = 2, **options: Any
) -> Iterator[TrainingCrew]:
    """Workers of an elastic job, which hold in a step and have saved nothing since the start."""
    given = {"save_steps": 100_000, "max_failures": 0, "hold": HOLD, "least": 2, **options}
    with crew_of(folder, coordinator, job, workers, started=0, **given) as crew:
        del crew.environment["WORLD_SIZE"]
        crew.start()
        crew.until("the step to hold at", lambda: crew.last_step >= HOLD)
        yield crew


def start_newcomer(crew: TrainingCrew) -> Trainer:
    (newcomer,) = crew.start(1)
    crew.until("registration", lambda: "worker.registered" in newcomer.log)
    return newcomer


def check_undisturbed(crew: TrainingCrew) -> None:
    """The two that trained did every step once, and all samples."""
    assert {len(entries) for step, entries in crew.steps.items() if step >= HOLD} == {2}
    for number in (0, 1):
        end = outcome(crew, number)
        assert end == {"ending": "finished", "step": 100, "total": TOTAL}, crew.logs()


@pytest.mark.deaths
@pytest.mark.parametrize("end", ["killed", "leaves", "silent"])
def test_newcomer_that_goes_while_it_waits_disturbs_nobody(coordinator, job, tmp_path, end):
    with elastic_crew(tmp_path, coordinator, job) as crew:
        newcomer = start_newcomer(crew)
        if end == "killed":
            newcomer.kill()
        elif end == "silent":
            newcomer.stop()
        else:
            newcomer.process.send_signal(signal.SIGTERM)
            assert newcomer.process.wait(60) == 143, newcomer.log
        crew.until("the loss to be known", lambda: live(coordinator, job) == 2)
        let_go(crew)
        crew.until("the end", lambda: not any(one.is_running for one in crew.trainers[:2]))
    check_undisturbed(crew)


@pytest.mark.deaths
def test_newcomer_that_dies_while_the_crew_saves_aborts_no_checkpoint(coordinator, job, tmp_path):
    """Saves that follow at once, before a heartbeat has told of the loss, are committed."""
    with elastic_crew(tmp_path, coordinator, job, save_steps=1) as crew:
        start_newcomer(crew).kill()
        let_go(crew)
        crew.wait()
    check_undisturbed(crew)
    assert "run.save_aborted" not in crew.logs()


@pytest.mark.deaths
def test_newcomer_that_dies_while_the_crew_forms_is_not_waited_for(coordinator, job, tmp_path):
    """The others had met it at the roll call, and go on as they were."""
    with elastic_crew(tmp_path, coordinator, job, wait=60) as crew:
        crew.environment["DIES"] = "assembled"
        newcomer = start_newcomer(crew)
        let_go(crew)
        assert newcomer.process.wait(60) == -signal.SIGKILL, newcomer.log
        began = time.monotonic()
        crew.wait()
    assert time.monotonic() - began < 45, crew.logs()
    assert crew.worlds[-1] == 2
    check_undisturbed(crew)


@pytest.mark.deaths
def test_newcomers_that_die_over_and_over_do_not_count_as_failures(coordinator, job, tmp_path):
    """They do not use up what is allowed for the loss of one that trains, either."""
    options = {"least": 3, "max_failures": 1, "wait": 0.2}
    with elastic_crew(tmp_path, coordinator, job, 3, **options) as crew:
        for _ in range(3):
            start_newcomer(crew).kill()
            crew.until("the loss to be known", lambda: live(coordinator, job) == 3)
        crew.trainers[1].kill()
        crew.until("the loss to be known", lambda: live(coordinator, job) == 2)
        let_go(crew)
        crew.start(1)
        crew.wait()
    assert {outcome(crew, number)["ending"] for number in (0, 2, 6)} == {"finished"}, crew.logs()
    assert crew.worlds[-1] == 3
