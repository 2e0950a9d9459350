"""Programs without `Run` in the page: what they do, what they store, and what nobody knows."""

from tests.integration.run.test_plain_programs import started
from tests.support.programs.plain_programs import LOADER, MANAGER, ORCHESTRATOR


def test_elastic_workers_that_only_meet(coordinator, open_page):
    job = "meeting"
    with started(coordinator, job, ORCHESTRATOR, count=3) as workers:
        dashboard = open_page(coordinator.http_url)
        dashboard.open("overview", query=f"?job={job}")
        dashboard.until_text("workers, elastic", ".stat-strip")
        assert "elastic" in dashboard.text(".header-facts")
        shown = dashboard.text("body")
        assert "of 0" not in shown
        assert "world size" not in shown
        assert "epoch" not in dashboard.text(".run-hero")
        dashboard.until_text("nobody says when it trains", ".stat-strip")
        workers[0].send("go")
        dashboard.go("workers")
        dashboard.until_text("waiting", ".table-row")
        workers[1].send("go")
        workers[2].send("go")
        dashboard.go("barriers")
        dashboard.until_text("of 1 barrier in the last 10 min", ".stat-strip")


def test_loader_and_manager(coordinator, open_page, tmp_path):
    job = "storing"
    (tmp_path / "disk").touch()
    with (
        started(coordinator, job, LOADER) as (reader,),
        started(coordinator, job, MANAGER, tmp_path) as (writer,),
    ):
        dashboard = open_page(coordinator.http_url)
        dashboard.open("overview", query=f"?job={job}")
        reader.send("begin")
        writer.send("save")
        writer.expect("saved 1")
        dashboard.until_text("the last: 2.86 MiB in", ".stat-strip")
        dashboard.until_text("of the last 10 min training", ".stat-strip")
        dashboard.until("/Checkpoint rate\\s+[\\d.]+ [KMG]?i?B/.test(document.body.innerText)")
        dashboard.until("/Coordinator requests\\s+[\\d.]+/.test(document.body.innerText)")
        dashboard.go("workers")
        dashboard.until_text("training", ".table-row")
        dashboard.go("checkpoints")
        dashboard.until_text("median of 1", ".stat-strip")
