"""A real Chromium and real coordinators; where there is no browser, every test here is skipped."""

import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from dtruntime.testing import LocalCoordinator
from tests.browser.pages import DashboardPage
from tests.support.http_api import Api

TIMING: dict[str, Any] = {"heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 10_000}
"""While a browser starts, a worker may get no turn for seconds."""
BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = {"width": 1440, "height": 900}

OpenPage = Callable[..., DashboardPage]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, with a dashboard to look at.

    Its driver keeps an event loop running in this thread, so it may not outlive the file.
    """
    binary = next((path for name in BINARIES if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip("NO BROWSER: install chromium to test the dashboard")
    if not (files("dtruntime") / "dashboard" / "static" / "index.html").is_file():
        pytest.skip("NO DASHBOARD: build it with `make dashboard` (needs Node 20) to test it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say a figure in the summary of the test run."""
    return lambda text: request.node.user_properties.append(("measured", text))


@pytest.fixture
def open_page(browser: Browser, measured: Callable[[str], None]) -> Iterator[OpenPage]:
    """Open a tab of its own; when the test ends, nobody may have complained in it."""
    tabs: list[DashboardPage] = []

    def open_page(url: str, **options: Any) -> DashboardPage:
        context = browser.new_context(**{"viewport": DESKTOP, "color_scheme": "dark", **options})
        tabs.append(DashboardPage(context.new_page(), url, measured))
        return tabs[-1]

    yield open_page
    for tab in tabs:
        tab.page.context.close()
    assert [tab.errors for tab in tabs if tab.errors] == []


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCoordinator]:
    """One coordinator for the tests of a file."""
    with LocalCoordinator(
        tmp_path_factory.mktemp("coordinator"), **TIMING, http=True
    ) as coordinator:
        yield coordinator


@pytest.fixture
def own_coordinator(tmp_path: Path) -> Iterator[LocalCoordinator]:
    """A coordinator that the test may kill."""
    with LocalCoordinator(tmp_path / "coordinator", **TIMING, http=True) as coordinator:
        yield coordinator


@pytest.fixture
def api(coordinator: LocalCoordinator) -> Iterator[Api]:
    """What the coordinator says without a browser."""
    with Api(coordinator.http_url) as api:
        yield api


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured, also from tests that passed."""
    lines = [
        text
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == "measured"
    ]
    if lines:
        terminalreporter.section("measured in the browser")
        for line in lines:
            terminalreporter.write_line(line)
