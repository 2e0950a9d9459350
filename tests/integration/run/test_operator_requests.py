"""What an operator or a cloud asks of a run is done by all its workers after the same step."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtruntime import CheckpointManager, DatasetRegistry
from dtruntime.client.observer import Observer
from dtruntime.testing import LocalCoordinator
from tests.support.crews import TrainingCrew, sequence
from tests.support.paths import PROGRAMS

WORKER = PROGRAMS / "run_worker.py"
SAMPLES, BATCH = 4000, 40
HOLD = 60
"""No run gets beyond this step before what was asked of it is agreed on."""


@contextmanager
def crew_of(
    folder: Path,
    coordinator: LocalCoordinator,
    job: str,
    workers: int,
    started: int | None = None,
    **options: Any,
) -> Iterator[TrainingCrew]:
    """A run of so many workers, all of which are started, or as many as are given."""
    given = [f"{name}={value}" for name, value in options.items()]
    with TrainingCrew(folder, coordinator.url, workers, str(WORKER), folder, *given) as crew:
        crew.environment["STRATA_JOB"] = job
        crew.traces = "steps-*.jsonl"
        crew.start(started)
        yield crew


def outcome(crew: TrainingCrew, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(crew.trainers[number].log.strip().splitlines()[-1])
    return found


def saved(folder: Path) -> list[int]:
    with CheckpointManager(folder / "checkpoints") as manager:
        return manager.steps()


def ask(coordinator: LocalCoordinator, job: str, kind: str, worker_id: str = "") -> None:
    with Observer(coordinator.url) as observer:
        observer.request_action(job, kind, worker_id, "the test asks for it")


def pending(coordinator: LocalCoordinator, job: str) -> list[str]:
    with Observer(coordinator.url) as observer:
        return [action.kind for action in observer.actions(job)]


def let_go(crew: TrainingCrew) -> None:
    """Let them pass the step that they hold at."""
    (crew.folder / "go").touch()


def let_go_when_agreed(crew: TrainingCrew) -> None:
    """Let them pass that step once all have agreed on when to do what was asked."""
    crew.until("agreement", lambda: all("run.agreed" in trainer.log for trainer in crew.trainers))
    let_go(crew)


def test_checkpoint_now(coordinator, job, tmp_path):
    with crew_of(tmp_path, coordinator, job, 3, save_steps=1000, hold=HOLD) as crew:
        crew.until("step 5", lambda: crew.last_step >= 5)
        ask(coordinator, job, "checkpoint")
        let_go_when_agreed(crew)
        crew.until("a checkpoint", lambda: len(saved(tmp_path)) > 1)
        crew.until("the end of it", lambda: not pending(coordinator, job))
        crew.wait()
    assert len(saved(tmp_path)) == 3  # the beginning, this one, the end
    assert {outcome(crew, n)["ending"] for n in range(3)} == {"finished"}


def test_stop_ends_all_workers_after_a_commit_and_the_run_can_go_on(coordinator, job, tmp_path):
    with crew_of(tmp_path, coordinator, job, 3, save_steps=1000, hold=HOLD) as crew:
        crew.until("step 5", lambda: crew.last_step >= 5)
        ask(coordinator, job, "stop")
        let_go_when_agreed(crew)
        crew.wait()
        ends = [outcome(crew, n) for n in range(3)]
        assert {end["ending"] for end in ends} == {"stopped"}
        assert {end["step"] for end in ends} == {saved(tmp_path)[-1]}
        assert not pending(coordinator, job)
        crew.start()
        crew.wait()
    assert outcome(crew, 3) == {
        "ending": "finished",
        "step": SAMPLES // BATCH,
        "total": SAMPLES * (SAMPLES - 1) / 2,
    }
    assert sum(map(len, sequence(crew).values())) == SAMPLES


@pytest.mark.long
def test_drained_worker_leaves_and_nothing_is_done_twice(coordinator, job, tmp_path):
    options: dict[str, Any] = {"save_steps": 1000, "wait": 0.2, "hold": HOLD}
    with crew_of(tmp_path, coordinator, job, 3, **options) as crew:
        crew.until("step 5", lambda: crew.last_step >= 5)
        ask(coordinator, job, "drain", "worker-1")
        let_go_when_agreed(crew)
        crew.wait()
    ends = [outcome(crew, n) for n in range(3)]
    assert sorted(end["ending"] for end in ends) == ["drained", "finished", "finished"]
    counts = {step: len(entries) for step, entries in crew.steps.items()}
    assert set(counts.values()) == {3, 2}, "a step was repeated"
    (found,) = DatasetRegistry(coordinator.url, job=job).coverage("train")
    assert found.exact


def test_sigterm_is_a_drain_of_this_worker_and_a_replacement_takes_its_place(
    coordinator, job, tmp_path
):
    with crew_of(tmp_path, coordinator, job, 3, save_steps=1000, hold=HOLD) as crew:
        crew.until("step 5", lambda: crew.last_step >= 5)
        victim = crew.trainers[0]
        victim.process.send_signal(signal.SIGTERM)
        let_go_when_agreed(crew)
        assert victim.process.wait(60) == 143, victim.log
        assert outcome_of_system_exit(victim.log)
        crew.start(1)
        crew.wait(143)
    assert sum(map(len, sequence(crew).values())) == SAMPLES
    assert {outcome(crew, n)["total"] for n in (1, 2, 3)} == {SAMPLES * (SAMPLES - 1) / 2}
    (found,) = DatasetRegistry(coordinator.url, job=job).coverage("train")
    assert found.exact


@pytest.mark.long
def test_all_workers_preempted_at_once_resume_where_they_were(coordinator, job, tmp_path):
    with crew_of(tmp_path, coordinator, job, 2, save_steps=1000, hold=HOLD) as crew:
        crew.until("step 7", lambda: crew.last_step >= 7)
        for trainer in crew.trainers:
            trainer.process.send_signal(signal.SIGTERM)
        let_go_when_agreed(crew)
        crew.wait(143)
        assert saved(tmp_path)[-1] >= 7
        crew.start()
        crew.wait(143)
    counts = {step: len(entries) for step, entries in crew.steps.items()}
    assert set(counts.values()) == {2}, "a step was repeated"
    assert outcome(crew, 3)["total"] == SAMPLES * (SAMPLES - 1) / 2


def test_saving_by_time_is_agreed_on(coordinator, job, tmp_path):
    options: dict[str, Any] = {"save_steps": 100_000, "save_seconds": 0.3, "samples": 400_000}
    with crew_of(tmp_path, coordinator, job, 3, **options) as crew:
        crew.until("the beginning and three more", lambda: len(saved(tmp_path)) > 3)
        ask(coordinator, job, "stop")
        crew.wait()
    assert {outcome(crew, n)["ending"] for n in range(3)} == {"stopped"}


@pytest.mark.long
def test_slow_worker_is_named(coordinator, job, tmp_path):
    """All steps take equally long, since each waits for the slowest: the waits do not count."""

    def slow() -> list[int]:
        with Observer(coordinator.url) as observer:
            workers = observer.status(job).workers
            return [worker.rank for worker in workers if worker.is_straggler]

    with crew_of(tmp_path, coordinator, job, 4, samples=400_000, slow_rank=2) as crew:
        crew.until("steps", lambda: crew.last_step > 5)
        crew.until("a straggler", lambda: slow() == [2])


def outcome_of_system_exit(log: str) -> bool:
    return "run.notice" in log and "SIGTERM" in log


@pytest.mark.long
@pytest.mark.deaths
def test_run_that_fails_over_and_over_gives_up(coordinator, job, tmp_path):
    options: dict[str, Any] = {"max_failures": 1, "samples": 400_000}
    with crew_of(tmp_path, coordinator, job, 2, **options) as crew:
        survivor = crew.trainers[0]
        for goal in (3, 8):
            crew.until(f"step {goal}", lambda goal=goal: crew.last_step >= goal)  # type: ignore[misc]
            crew.trainers[-1].kill()
            if goal == 3:
                crew.start(1)
        assert survivor.process.wait(60) == 1, survivor.log
        assert "max_failures=1" in survivor.log
        assert "start it again" in survivor.log


@pytest.mark.long
@pytest.mark.deaths
def test_ranks_without_samples_in_a_last_batch_stay_in_step(coordinator, job, tmp_path):
    """21 samples in batches of 10: the last one is too small for three ranks, also after a kill."""
    options: dict[str, Any] = {"samples": 21, "batch": 10, "epochs": 3, "save_steps": 1, "hold": 2}
    with crew_of(tmp_path, coordinator, job, 3, **options) as crew:
        crew.until("step 2", lambda: crew.last_step >= 2)
        crew.trainers[2].kill()
        let_go(crew)
        crew.start(1)
        crew.wait()
    assert {outcome(crew, n)["step"] for n in (0, 1, 3)} == {9}
    assert {outcome(crew, n)["total"] for n in (0, 1, 3)} == {3 * 21 * 20 / 2}
    assert all(found.exact for found in DatasetRegistry(coordinator.url, job=job).coverage("train"))


def test_notice_is_heard_while_a_run_waits_for_others(coordinator, job, tmp_path):
    with crew_of(tmp_path, coordinator, job, 2, started=1) as crew:
        (waiting,) = crew.trainers
        crew.until("registration", lambda: "worker.registered" in waiting.log)
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.process.wait(60) == 143, waiting.log
