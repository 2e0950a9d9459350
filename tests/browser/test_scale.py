"""A thousand workers on one page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from dtruntime.testing import LocalCoordinator, WorkerProcess

CROWD = Path(__file__).parents[2] / "examples/simulated_worker.py"
WORKERS = 1000
NODES = 3000


TIMEOUT_MS = 20_000
"""On a busy machine the one process that all members live in may get no turn for seconds."""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory) -> Iterator[LocalCoordinator]:
    folder = tmp_path_factory.mktemp("coordinator")
    with LocalCoordinator(folder, heartbeat_timeout_ms=TIMEOUT_MS, http=True) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def crowd(coordinator) -> Iterator[None]:
    """As many members as one process can have, each with its own heartbeats."""
    arguments = ["--workers", WORKERS, "--seconds", 300, "--checkpoints"]
    arguments += ["--die-every", 4, "--rejoin-seconds", 1.5 * TIMEOUT_MS / 1000]
    env = {"COORDINATOR_URL": coordinator.url}
    with WorkerProcess(CROWD, [str(argument) for argument in arguments], env=env) as process:
        process.expect(f"{WORKERS} registered", timeout=120.0)
        yield


@pytest.mark.parametrize("where", ["overview", "workers", "workers?view=map", "data", "journal"])
def test_thousand_workers_are_smooth(coordinator, crowd, open_page, where):
    dashboard = open_page(coordinator.http_url)
    dashboard.open(where, query="?job=simulation")
    dashboard.until_text("world size 1,000", ".header")
    dashboard.until_live()
    found = dashboard.smoothness(3.0)
    dashboard.measured(
        f"1,000 workers, {where}: {found['frames']:.0f} frames in 3 s, p50 {found['p50']:.0f} ms, "
        f"p99 {found['p99']:.0f} ms, longest {found['longest']:.0f} ms; "
        f"{found['tasks']:.0f} tasks over 50 ms, {found['blocked']:.0f} ms in all"
    )
    nodes = dashboard.page.evaluate("() => document.querySelectorAll('*').length")
    assert nodes < NODES


def test_table_draws_only_rows_in_sight(coordinator, crowd, open_page):
    dashboard = open_page(coordinator.http_url)
    dashboard.open("workers", query="?job=simulation")
    dashboard.until_text("worker-0", ".table-row")
    table = dashboard.page.get_by_role("grid", name="Workers")
    expect(table).to_have_attribute("aria-rowcount", f"{WORKERS + 1}", timeout=20_000)
    assert table.locator(".table-row").count() < 60
    dashboard.page.locator(".table-row").first.focus()
    dashboard.page.keyboard.press("End")
    dashboard.until("document.activeElement.matches('[data-index=\"999\"]')")
    dashboard.page.keyboard.press("Enter")
    dashboard.until_text("worker-999", "h1")


def test_heat_map_finds_a_worker_by_keys(coordinator, crowd, open_page):
    dashboard = open_page(coordinator.http_url)
    dashboard.open("workers?view=map", query="?job=simulation")
    dashboard.until("document.querySelector('.heat-map canvas')")
    dashboard.page.locator(".heat-map canvas").focus()
    dashboard.page.keyboard.press("ArrowRight")
    dashboard.until_text("rank", ".heat-inspect")
    dashboard.page.keyboard.press("Enter")
    dashboard.until_text("incarnation", ".stat-strip")
