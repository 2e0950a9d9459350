"""What an operator asks for with the mouse is done by a real run."""

from collections.abc import Iterator

import pytest

from tests.support.crews import TrainingCrew
from tests.support.paths import PROGRAMS

WORKER = PROGRAMS / "run_worker.py"


@pytest.fixture
def run(coordinator, tmp_path) -> Iterator[TrainingCrew]:
    """Three workers of a run that saves only when it is asked to."""
    options = [tmp_path, "samples=400000", "save_steps=100000", "wait=0"]
    with TrainingCrew(tmp_path, coordinator.url, 3, str(WORKER), *options) as crew:
        crew.traces = "steps-*.jsonl"
        crew.start()
        crew.until("step 5", lambda: crew.last_step >= 5)
        yield crew


def test_checkpoint_now_and_stop(coordinator, run, open_page):
    dashboard = open_page(coordinator.http_url)
    page = dashboard.page
    dashboard.open("runs", query=f"?job={run.job}")
    dashboard.until_text("running", ".badge")

    page.get_by_role("button", name="Checkpoint now").click()
    dashboard.until_text("action.completed", ".log")
    dashboard.go("checkpoints")
    dashboard.until("document.querySelectorAll('.table-row').length === 2")  # the first is step 0

    dashboard.go("runs")
    page.get_by_role("button", name="Stop at the next checkpoint").click()
    page.get_by_label("Reason, for the journal").fill("maintenance tonight")
    page.get_by_role("button", name="Stop the run").click()
    run.wait()
    dashboard.until_text("stopped", ".badge")
    dashboard.until_text("maintenance tonight", ".log")


def test_drain_asks_first(coordinator, run, open_page):
    dashboard = open_page(coordinator.http_url)
    page = dashboard.page
    dashboard.open("workers/worker-2", query=f"?job={run.job}")
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("button", name="Cancel").click()
    dashboard.until("!document.querySelector('dialog[open]')")
    assert page.get_by_role("button", name="Drain").is_enabled()

    page.get_by_role("button", name="Drain").click()
    page.get_by_role("button", name="Drain the worker").click()
    dashboard.until_text("left", ".head-badges", within=60.0)
    dashboard.go("workers")
    dashboard.until_text("2 live", ".page-head")
