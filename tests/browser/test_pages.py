"""Every page with a real training run behind it: torch workers, files, shared checkpoints."""

import json
from collections.abc import Iterator

import pytest

from dtruntime.testing import eventually
from tests.browser.pages import AXE, PAGES, DashboardPage
from tests.support.crews import TrainingCrew
from tests.support.http_api import Api

WORKERS = 2
PHONE = {"width": 390, "height": 844}
SHOWN = {
    "overview": "Throughput",
    "workers": "worker-1",
    "workers?view=map": "waiting, recovering",
    "workers/worker-0": "Reported by the training loop",
    "data": "Shards per rank",
    "checkpoints": "Timeline",
    "barriers": "first arrival to completion",
    "runs": "Requests",
    "journal": "checkpoint.committed",
    "settings": "Preferences",
}
"""What each place says when it has its data."""


@pytest.fixture(scope="module")
def run(coordinator, tmp_path_factory) -> Iterator[TrainingCrew]:
    """Two workers that train, and have committed at least twice."""
    folder = tmp_path_factory.mktemp("digits")
    options = ["--samples", 4096, "--epochs", 1000, "--save-steps", 20, "--step-seconds", 0.1]
    command = ["real_training.py", "--folder", folder, *options]
    with (
        TrainingCrew(folder, coordinator.url, WORKERS, *command) as crew,
        Api(coordinator.http_url) as api,
    ):
        crew.start()
        eventually(
            lambda: api.ask("/api/checkpoints", job=crew.job).json().get("total", 0) >= 2,
            within=100.0,
            what="two checkpoints",
        )
        yield crew


@pytest.fixture
def opened(coordinator, run, open_page):
    def opened(where: str = "overview", **options) -> DashboardPage:
        dashboard: DashboardPage = open_page(coordinator.http_url, **options)
        dashboard.open(where, query=f"?job={run.job}")
        dashboard.until_text(SHOWN[where])
        return dashboard

    return opened


def visit_all(dashboard: DashboardPage) -> Iterator[str]:
    for where, text in SHOWN.items():
        dashboard.go(where)
        dashboard.until_text(text)
        yield where


def test_every_page_shows_the_run(opened):
    dashboard = opened()
    page = dashboard.page
    for where in visit_all(dashboard):
        assert dashboard.overflow <= 0, where
    dashboard.go("workers")
    dashboard.until("document.querySelectorAll('.table-row').length === 2")
    dashboard.go("data")
    dashboard.until_text("4,096")
    dashboard.until_text("Every sample exactly once", ".coverage", within=60.0)
    dashboard.go("overview")
    dashboard.until("document.querySelector('.chart .line')?.getAttribute('d')")
    assert page.locator(".stat .sparkline").count() == 8
    dashboard.go("checkpoints")
    dashboard.until("document.querySelectorAll('.stem').length >= 2")
    dashboard.go("runs")
    dashboard.until_text("running", ".badge")
    dashboard.until_text("loss", ".facts")


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_looks(opened, tmp_path, theme, size):
    viewport = {"viewport": PHONE} if size == "phone" else {}
    dashboard = opened(color_scheme=theme, **viewport)
    ground = dashboard.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert ground == {"dark": "rgb(17, 17, 16)", "light": "rgb(244, 243, 239)"}[theme]
    has_axe = AXE.exists()
    for where in visit_all(dashboard):
        assert dashboard.overflow <= 0, where
        name = where.replace("/", "-").replace("?", "-")
        picture = dashboard.page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
        assert picture.startswith(b"\x89PNG")
        if has_axe:
            assert dashboard.accessibility() == [], where
    dashboard.measured(
        f"{size}, {theme}: {len(SHOWN)} pages, "
        + ("none breaks a rule of axe (WCAG 2.1 AA)" if has_axe else "AXE IS NOT INSTALLED")
    )


def test_keyboard_alone(opened):
    dashboard = opened()
    keyboard = dashboard.page.keyboard
    for key, where in zip("owdcbrjs", PAGES, strict=True):
        keyboard.press("g")
        keyboard.press(key)
        dashboard.until(f"location.hash === '#/{where}'")
    keyboard.press("g")
    keyboard.press("w")
    dashboard.until_text("worker-1", ".table-row")
    keyboard.press("/")
    keyboard.type("worker-1")
    dashboard.until("document.querySelectorAll('.table-row').length === 1")
    for _ in range(20):
        keyboard.press("Tab")
        if dashboard.page.evaluate("() => document.activeElement.matches('.table-row')"):
            break
    outline = dashboard.page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    keyboard.press("Enter")
    dashboard.until_text("worker-1", "h1")
    keyboard.press("?")
    dashboard.until("document.querySelector('dialog[open]')")
    keyboard.press("Escape")
    dashboard.until("!document.querySelector('dialog[open]')")
    keyboard.press("t")
    dashboard.until("document.documentElement.dataset.theme === 'light'")


def test_first_tab_skips_to_the_content(opened):
    dashboard = opened()
    dashboard.page.keyboard.press("Tab")
    assert dashboard.page.evaluate("() => document.activeElement.className") == "skip-link"
    dashboard.page.keyboard.press("Enter")
    dashboard.until("document.activeElement === document.querySelector('main')")


def test_journal_is_searched_filtered_and_exported(opened, tmp_path):
    dashboard = opened("journal")
    page = dashboard.page
    page.get_by_role("button", name="Pause").click()
    page.get_by_label("Event").select_option("checkpoint.committed")
    dashboard.until("!document.querySelector('.log').innerText.includes('checkpoint.begun')")
    checkpoint_id = page.locator(".log-message").first.inner_text().split()[1]
    page.get_by_label("Search the journal").fill(checkpoint_id)
    dashboard.until("document.querySelectorAll('.log-entry').length === 1")
    with page.expect_download() as download:
        page.get_by_role("link", name="JSONL").click()
    exported = tmp_path / "journal.jsonl"
    download.value.save_as(exported)
    entries = [json.loads(line) for line in exported.read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["checkpoint.committed"]
    assert checkpoint_id in entries[0]["message"]
    page.get_by_label("Search the journal").fill("no such thing")
    dashboard.until_text("No entry matches")


def test_settings_are_kept(opened):
    dashboard = opened("settings")
    dashboard.page.get_by_role("radio", name="Light").click()
    dashboard.page.get_by_role("radio", name="GB", exact=True).click()
    dashboard.page.reload()
    dashboard.until_text("Preferences")
    assert dashboard.page.evaluate("() => document.documentElement.dataset.theme") == "light"
    dashboard.go("settings")
    dashboard.until_text("MB", ".facts")
