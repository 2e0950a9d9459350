"""The page of a run that is over: it says so, and goes on with nothing."""

import json
import re

from dtruntime.testing import eventually
from tests.support.crews import TrainingCrew
from tests.support.paths import PROGRAMS

WORKER = PROGRAMS / "run_worker.py"
STEPS = 60
AGE = ".stat-strip .stat:nth-child(5) .stat-value"
"""How long ago the last checkpoint was: it ticks."""
POINTS = "document.querySelector('.chart .line').getAttribute('d').split(/[ML]/).length"


def test_finished_run_is_at_its_end_and_has_no_rates(coordinator, api, open_page, tmp_path):
    folder = tmp_path / "over"
    options = ["samples=1200", "batch=40", "epochs=2", "save_steps=10", "pause=0.05"]
    with TrainingCrew(folder, coordinator.url, 1, str(WORKER), folder, *options) as crew:
        crew.start()
        dashboard = open_page(coordinator.http_url)
        eventually(lambda: api.ask("/api/tasks", job=crew.job).json().get("items"), what="a run")
        dashboard.open("overview", query=f"?job={crew.job}")
        dashboard.until_text("epoch 1, 2 in all", ".run-hero")
        dashboard.page.get_by_text("Loss", exact=True).click()
        crew.wait()
        dashboard.until_text("finished", ".run-hero .badge")
        hero = dashboard.text(".run-hero")
        assert re.search(r"100%\s+finished", hero)
        assert f"step {STEPS}" in hero
        assert "2 epochs done" in hero
        assert "last loss" in hero
        figures = dashboard.text(".stat-strip")
        for label, note in (
            ("Steps", "none reported now"),
            ("Samples", "none reported now"),
            ("Goodput", "nobody says when it trains"),
        ):
            assert re.search(rf"{label}\n+—\n+{note}", figures), figures
        drawn = dashboard.page.evaluate(f"() => {POINTS}")
        age = json.dumps(dashboard.text(AGE))
        dashboard.until(f"document.querySelector('{AGE}').innerText !== {age}")
        assert dashboard.page.evaluate(f"() => {POINTS}") == drawn, "the curve has ended"
        dashboard.go("runs")
        dashboard.until_text("2 epochs done", ".facts")
        assert re.search(rf"{STEPS} of {STEPS}", dashboard.text())
        assert re.search(r"Steps/s\s+—", dashboard.text())
