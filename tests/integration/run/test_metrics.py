"""Every figure of a real run against the truth: before it, while it runs, and when it is over."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dtruntime.testing import LocalCoordinator, eventually
from tests.support.command_line import strata
from tests.support.crews import TrainingCrew
from tests.support.http_api import Api
from tests.support.paths import PROGRAMS

WORKER = PROGRAMS / "run_worker.py"
SAMPLES, BATCH, EPOCHS, PAUSE = 1600, 40, 2, 0.02
STEPS = EPOCHS * SAMPLES // BATCH
HOLD = STEPS - 20
RATES = (
    "steps_per_second",
    "samples_per_second",
    "heartbeats_per_second",
    "goodput",
    "checkpoint_bytes_per_second",
    "loss",
    "heartbeat_age_max_seconds",
)
"""What there is only while somebody works."""


@pytest.fixture
def crew(served: LocalCoordinator, job: str, tmp_path: Path) -> Iterator[TrainingCrew]:
    options = {"samples": SAMPLES, "batch": BATCH, "epochs": EPOCHS, "pause": PAUSE}
    given = [f"{name}={value}" for name, value in {**options, "hold": HOLD, "wait": 0.1}.items()]
    folder = tmp_path / "run"
    with TrainingCrew(folder, served.url, 2, str(WORKER), folder, *given) as crew:
        crew.environment["STRATA_JOB"] = job
        crew.traces = "steps-*.jsonl"
        yield crew


class Figures:
    """What the coordinator says of one job, everywhere."""

    def __init__(self, api: Api, url: str, job: str) -> None:
        self._api, self._url, self._job = api, url, job

    def dashboard(self) -> Any:
        return self._api.ask("/api/dashboard", job=self._job).json()

    @property
    def metrics(self) -> Any:
        return self.dashboard()["metrics"]

    @property
    def task(self) -> Any:
        (task,) = self.dashboard()["tasks"]
        return task

    def points(self) -> list[Any]:
        found: list[Any] = self._api.ask("/api/history", job=self._job).json()["points"]
        return found

    def prometheus(self) -> dict[str, float]:
        """The job's samples without further labels."""
        text = self._api.ask("/metrics").text
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels == {"job": self._job}
        }

    def status(self) -> str:
        return strata("status", "--url", self._url, "--job", self._job).stdout

    def in_state(self, state: str) -> Any:
        """The run, once it is in a state."""
        return eventually(
            lambda: next((t for t in self.dashboard()["tasks"] if t["state"] == state), None),
            what=f"the run is {state}",
        )

    def without_rates(self) -> None:
        """Nobody works: there is no rate anywhere, and no point goes on with the last one."""
        found = eventually(lambda: self._at_rest(), what="no rates")
        assert {name: found[name] for name in RATES} == dict.fromkeys(RATES)
        assert self.task["steps_per_second"] is None
        assert self.task["eta_seconds"] is None
        names = ("strata_steps_per_second", "strata_samples_per_second", "strata_goodput_ratio")
        assert [name for name in (*names, "strata_job_step") if name in self.prometheus()] == []
        kept = ("steps_per_second", "samples_per_second", "goodput", "loss")
        eventually(
            lambda: all(self.points()[-1][name] is None for name in kept), what="the curves end"
        )

    def _at_rest(self) -> Any:
        found = self.metrics
        live = found["workers_live"]
        return found if not live and found["heartbeat_age_max_seconds"] is None else None


@pytest.mark.long
@pytest.mark.deaths
def test_every_figure_is_true_from_before_the_run_until_after_a_restart(
    served: LocalCoordinator, api: Api, job: str, crew: TrainingCrew
) -> None:
    nothing = api.ask("/api/dashboard").json()
    assert (nothing["job"], nothing["tasks"], nothing["workers"]) == ("", [], [])
    assert {name: nothing["metrics"][name] for name in RATES} == dict.fromkeys(RATES)
    assert nothing["metrics"]["barrier_p50_ms"] is None

    figures = Figures(api, served.url, job)
    crew.start(1)
    eventually(lambda: figures.dashboard().get("workers"), what="a worker")
    waiting = figures.in_state("waiting")
    assert (waiting["step"], waiting["progress"], waiting["completed_epochs"]) == (None, None, 0)
    metrics = figures.metrics
    assert (metrics["workers_live"], metrics["workers_dead"]) == (1, 0)
    assert metrics["goodput"] is None, "nobody has trained yet"
    assert metrics["steps_per_second"] in (None, 0.0)
    assert (metrics["barrier_p50_ms"], metrics["barriers_measured"]) == (None, 0)

    crew.start(1)
    running(figures, crew)
    one_dead(figures, crew)

    (crew.folder / "go").touch()
    crew.wait()
    finished(figures)
    served.stop()
    served.start()
    finished(figures, restarted=True)


def running(figures: Figures, crew: TrainingCrew) -> None:
    def moving() -> Any:
        found = figures.metrics
        known = [found[name] for name in ("steps_per_second", "goodput", "loss", "barrier_p50_ms")]
        return found if None not in known and found["samples_per_second"] else None

    found = eventually(moving, what="rates")
    assert 0 < found["steps_per_second"] <= 1 / PAUSE
    assert 0 < found["samples_per_second"] <= BATCH / PAUSE
    assert 0 < found["goodput"] <= 1
    assert 0 < found["loss"] <= 1
    assert found["barriers_measured"] > 0
    assert found["barrier_p50_ms"] <= found["barrier_p99_ms"]
    task = figures.in_state("running")
    assert (task["epochs"], task["total_steps"]) == (EPOCHS, STEPS)
    assert 0 < task["progress"] < 1
    assert task["progress"] == pytest.approx(task["step"] / STEPS)
    epochs = {w["epoch"] for w in figures.dashboard()["workers"]}
    assert epochs <= set(range(EPOCHS)), "epochs are counted from 0"
    crew.until("the last epoch", lambda: crew.last_step >= HOLD)
    held = eventually(lambda: t if (t := figures.task)["epoch"] == EPOCHS - 1 else None)
    assert held["completed_epochs"] == EPOCHS - 1
    assert held["progress"] < 1


def one_dead(figures: Figures, crew: TrainingCrew) -> None:
    crew.trainers[1].kill()
    metrics = eventually(lambda: m if (m := figures.metrics)["workers_dead"] else None)
    assert (metrics["workers_live"], metrics["workers_dead"]) == (1, 1)
    assert metrics["losses_last_hour"] == 1
    dead = next(w for w in figures.dashboard()["workers"] if w["membership"] == "dead")
    assert (dead["is_straggler"], dead["slowness"]) == (False, None)
    # With nobody but the one who holds, nothing advances.
    figures.in_state("recovering")
    assert "1 dead" in figures.status()


def finished(figures: Figures, *, restarted: bool = False) -> None:
    task = figures.in_state("finished")
    assert task["progress"] == 1.0
    assert task["step"] == STEPS
    assert task["completed_epochs"] == EPOCHS
    assert (task["epochs"], task["total_steps"]) == (EPOCHS, STEPS)
    task = eventually(lambda: t if (t := figures.task)["samples"] else None, what="samples")
    assert task["samples"] == task["total_samples"] == EPOCHS * SAMPLES
    assert 0 < task["metrics"]["loss"] <= 1
    figures.without_rates()
    requests = "requests_per_second"
    eventually(lambda: figures.dashboard()["coordinator"][requests] is not None)
    found = figures.dashboard()
    assert found["metrics"][requests] == found["coordinator"][requests]
    assert found["metrics"]["losses_last_hour"] == 1
    if restarted:
        assert (found["metrics"]["barrier_p50_ms"], found["metrics"]["barriers_measured"]) == (
            None,
            0,
        )
    assert re.search(rf"{EPOCHS} epochs completed", figures.status())


@pytest.mark.deaths
def test_run_whose_workers_are_all_dead_has_no_rates(
    served: LocalCoordinator, api: Api, job: str, crew: TrainingCrew
) -> None:
    figures = Figures(api, served.url, job)
    crew.resize(1)
    crew.start()
    eventually(lambda: figures.dashboard().get("tasks") and figures.metrics["steps_per_second"])
    crew.trainers[0].kill()
    stopped = figures.in_state("stopped")
    assert stopped["progress"] < 1
    assert (figures.metrics["workers_live"], figures.metrics["workers_dead"]) == (0, 1)
    figures.without_rates()
