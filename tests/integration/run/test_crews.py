"""Who trains together when workers are lost, come back and join: everybody who is there."""

import re
import signal
from typing import Any

import pytest

from dtruntime.client.observer import Observer
from dtruntime.testing import LocalCoordinator, eventually
from tests.integration.run.test_operator_requests import ask, crew_of, let_go, outcome
from tests.support.crews import TrainingCrew

TOTAL = 4000 * 3999 / 2


def worlds(crew: TrainingCrew) -> set[int]:
    """How many workers there were in the steps after the one that was held."""
    return {
        entry["world"] for step, entries in crew.steps.items() if step > 30 for entry in entries
    }


def live(coordinator: LocalCoordinator, job: str) -> int:
    with Observer(coordinator.url) as observer:
        return observer.status(job).live_workers


@pytest.mark.deaths
@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.long), True])
def test_both_replacements_of_two_lost_workers_train(coordinator, job, tmp_path, apart):
    """At once, or the second when the first one is there already and waits."""
    with crew_of(tmp_path, coordinator, job, 3, wait=60, hold=30, save_steps=5) as crew:
        crew.until("the step to hold at", lambda: crew.last_step >= 30)
        for trainer in crew.trainers[1:]:
            trainer.kill()
        let_go(crew)
        crew.until("the losses to be known", lambda: live(coordinator, job) == 1)
        crew.start(1)
        if apart:
            crew.until("the first one", lambda: "worker.registered" in crew.trainers[3].log)
        crew.start(1)
        crew.wait()
    assert worlds(crew) == {3}, crew.logs()
    ends = [outcome(crew, number) for number in (0, 3, 4)]
    assert {(end["ending"], end["total"]) for end in ends} == {("finished", TOTAL)}


@pytest.mark.long
@pytest.mark.deaths
def test_loss_without_replacement_is_waited_for_once(coordinator, job, tmp_path):
    """Known by a heartbeat alone, it also refuses the first barrier afterwards."""
    options: dict[str, Any] = {"wait": 2, "hold": 30, "save_steps": 5, "apart": 1}
    with crew_of(tmp_path, coordinator, job, 3, **options) as crew:
        crew.until("the step to hold at", lambda: crew.last_step >= 30)
        crew.trainers[2].kill()
        crew.until("the loss to be known", lambda: live(coordinator, job) == 2)
        let_go(crew)
        crew.wait()
    assert crew.worlds[-1] == 2
    for trainer in crew.trainers[:2]:
        assert trainer.log.count("run.goes_on_smaller") == 1, trainer.log
        assert len(re.findall(r"run\.waits_for_workers.*at_most_seconds=2", trainer.log)) <= 1
    assert outcome(crew, 0)["ending"] == "finished"


@pytest.mark.long
@pytest.mark.deaths
def test_second_replacement_joins_a_crew_that_went_on_smaller(coordinator, job, tmp_path):
    """Nobody waits for a third one then: its loss was waited for."""
    options: dict[str, Any] = {"wait": 0.2, "hold": 30, "save_steps": 5, "samples": 40_000}
    with crew_of(tmp_path, coordinator, job, 3, **options) as crew:
        crew.until("the step to hold at", lambda: crew.last_step >= 30)
        for trainer in crew.trainers[1:]:
            trainer.kill()
        let_go(crew)
        crew.until("a crew of one", lambda: crew.worlds[-1] == 1)
        crew.start(1)
        crew.until("a crew of two", lambda: crew.worlds[-1] == 2)


@pytest.mark.long
def test_waiting_for_the_first_workers_reads_as_waiting(coordinator, job, tmp_path):
    with crew_of(tmp_path, coordinator, job, 3, started=1) as crew:
        (waiting,) = crew.trainers
        crew.until("two words", lambda: waiting.log.count("run.waits_for_workers") > 1)
        words = re.findall(
            r"run\.waits_for_workers missing=(\"[^\"]+\") since_seconds=(\d+)", waiting.log
        )
        assert [names for names, _ in words] == ['"worker-1, worker-2"'] * len(words)
        assert int(words[1][1]) >= 2 * int(words[0][1]) - 1, "not at growing intervals"
        assert "timeout_ms" not in waiting.log
        assert "timed out" not in waiting.log
        crew.start(2)
        eventually(lambda: crew.last_step > 2, within=60)


def superseded(coordinator: LocalCoordinator, job: str) -> int:
    """How often somebody was registered."""
    with Observer(coordinator.url) as observer:
        return max(worker.incarnation for worker in observer.status(job).workers)


def test_two_processes_with_one_rank_do_not_fight(coordinator, job, tmp_path):
    with crew_of(tmp_path, coordinator, job, 1, hold=30, started=0) as crew:
        crew.environment["RANK"] = "0"
        (first,) = crew.start(1)
        crew.until("the step to hold at", lambda: crew.last_step >= 30)
        (second,) = crew.start(1)
        crew.until("the second one", lambda: "run.training" in second.log)
        let_go(crew)
        assert first.process.wait(60) == 1, first.log
        assert "another process" in first.log.splitlines()[-1], first.log
        assert "RANK" in first.log.splitlines()[-1], first.log
        frames = [line for line in first.log.splitlines() if line.startswith("  File ")]
        assert all("run_worker.py" in line for line in frames[:-2]), first.log
        assert len([line for line in frames if "/dtruntime/" in line]) <= 2, first.log
        crew.wait(1)
    assert outcome(crew, 1)["ending"] == "finished"
    assert superseded(coordinator, job) == 2


@pytest.mark.long
@pytest.mark.deaths
def test_worker_that_was_declared_dead_and_not_replaced_comes_back(coordinator, job, tmp_path):
    options: dict[str, Any] = {"wait": 60, "hold": 30, "save_steps": 5}
    with crew_of(tmp_path, coordinator, job, 2, started=0, **options) as crew:
        for rank in range(2):
            crew.environment["RANK"] = str(rank)
            crew.start(1)
        crew.until("the step to hold at", lambda: crew.last_step >= 30)
        crew.trainers[1].stop()
        crew.until("the loss to be known", lambda: live(coordinator, job) == 1)
        let_go(crew)
        crew.trainers[1].process.send_signal(signal.SIGCONT)
        crew.wait()
    assert crew.worlds[-1] == 2
    assert outcome(crew, 1) == {"ending": "finished", "step": 100, "total": TOTAL}


@pytest.mark.long
def test_joins_are_no_failures_and_nobody_waits_for_a_timeout(start_coordinator, job, tmp_path):
    """Each costs the others one regrouping, and the request for it is agreed on once."""
    coordinator = start_coordinator(heartbeat_interval_ms=1000)
    options: dict[str, Any] = {
        "samples": 200_000,
        "save_steps": 100_000,
        "max_failures": 1,
        "wait": 5,
    }
    with crew_of(tmp_path, coordinator, job, 1, started=0, **options) as crew:
        del crew.environment["WORLD_SIZE"]
        for workers in (1, 2, 3, 4):
            crew.start(1)
            crew.until(f"a crew of {workers}", lambda n=workers: crew.worlds[-1:] == [n])  # type: ignore[misc]
        ask(coordinator, job, "stop")
        crew.wait()
    for number, trainer in enumerate(crew.trainers):
        assert outcome(crew, number)["ending"] == "stopped", trainer.log
        assert trainer.log.count("run.regrouping") == 3 - number, trainer.log
        assert trainer.log.count("run.agreed") == 4 - number, trainer.log
        assert "run.no_agreement" not in trainer.log, trainer.log
    assert {len(entries) for entries in crew.steps.values()} <= {1, 2, 3, 4}, "a step was repeated"


def test_one_that_comes_right_after_another_is_let_in_too(start_coordinator, job, tmp_path):
    """The leader still rests from asking the one before in, and is told of each only once."""
    coordinator = start_coordinator(heartbeat_interval_ms=200)
    options: dict[str, Any] = {"samples": 200_000, "save_steps": 100_000, "ask_seconds": 5}
    with crew_of(tmp_path, coordinator, job, 1, started=0, **options) as crew:
        del crew.environment["WORLD_SIZE"]
        for workers in (1, 2, 3):
            crew.start(1)
            crew.until(f"a crew of {workers}", lambda n=workers: crew.worlds[-1:] == [n])  # type: ignore[misc]
