"""What happens is seen in the page within two seconds, without a reload."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.browser.pages import DashboardPage, has_text
from tests.support.workers import RemoteWorker

JOB = "watched"


@pytest.fixture(scope="module")
def workers(coordinator) -> Iterator[list[RemoteWorker]]:
    """Four processes that are members of one job."""
    with ExitStack() as stack:
        members = [
            stack.enter_context(RemoteWorker(coordinator.url, job=JOB, rank=rank, world_size=4))
            for rank in range(4)
        ]
        for member in members:
            member.register()
            member.call("report", step=1, state="training")
        yield members


@pytest.fixture
def dashboard(coordinator, workers, open_page) -> DashboardPage:
    dashboard: DashboardPage = open_page(coordinator.http_url)
    dashboard.open(query=f"?job={JOB}")
    dashboard.until_live()
    return dashboard


def newest(api, event: str) -> float:
    entries = api.ask("/api/logs", job=JOB, event=event).json()["items"]
    return float(entries[0]["at"])


def test_waiting_barrier(dashboard, workers):
    dashboard.go("barriers")
    dashboard.until_text("No barriers yet")
    called = time.time()
    waits = [workers[rank].barrier("epoch-0") for rank in (0, 1, 3)]
    dashboard.see_promptly(
        "barrier waiting", has_text("3 of 4 arrived", ".barriers"), lambda: called
    )
    assert "worker-2" in dashboard.text(".absentees")
    workers[2].call("barrier", "epoch-0")
    for wait in waits:
        wait.result(30)
    dashboard.until_text("No one is waiting")
    assert dashboard.page.get_by_role("img", name="Barrier latencies").is_visible()


def test_committed_checkpoint(dashboard, workers, api):
    dashboard.go("checkpoints")
    dashboard.until_text("No checkpoints yet")
    workers[0].call("commit_checkpoint", "first", 100, path="nowhere", size_bytes=3 << 20)
    dashboard.see_promptly(
        "checkpoint committed",
        has_text("step 100", ".table-row"),
        lambda: float(api.ask("/api/checkpoints", job=JOB).json()["items"][0]["committed_at"]),
    )
    assert "3.00 MiB" in dashboard.text(".table-row")


def test_damaged_and_deleted_checkpoints(dashboard, workers, api):
    dashboard.go("checkpoints")
    workers[0].call("commit_checkpoint", "second", 200, path="elsewhere", size_bytes=1 << 20)
    dashboard.until_text("step 200", ".table-row")
    workers[1].call("report_checkpoints", ["second"], "damaged", detail="a pack is gone")
    dashboard.see_promptly(
        "checkpoint damaged",
        has_text("damaged", ".table-row"),
        lambda: newest(api, "checkpoint.damaged"),
    )
    workers[1].call("report_checkpoints", ["second"], "removed")
    dashboard.until("!document.querySelector('.table-body').innerText.includes('step 200')")
    dashboard.go("journal")
    dashboard.until_text("of step 200 is damaged: a pack is gone", ".log")


def test_reported_step(dashboard, workers):
    dashboard.go("workers")
    dashboard.until_text("worker-0", ".table-row")
    reported = time.time()
    workers[0].call("report", step=4321)
    dashboard.see_promptly("step reported", has_text("4,321", ".table-row"), lambda: reported)


def test_killed_worker(dashboard, workers, api):
    dashboard.go("workers")
    dashboard.until_text("worker-3", ".table-row")
    assert "dead" not in dashboard.text(".table-body")
    workers[3].kill()
    dashboard.see_promptly(
        "worker killed, declared dead",
        has_text("dead", ".table-row"),
        lambda: newest(api, "worker.dead"),
    )
    dashboard.until_text("3 live, 1 dead", ".page-head")
    dashboard.go("overview")
    dashboard.until_text("worker-3", ".recoveries")
    dashboard.until_text("worker.dead", ".log")
    dashboard.go("workers/worker-3")
    dashboard.until_text("was lost: no heartbeat")
