"""An epoch that ended with missing samples is red wherever it is shown."""

from dtruntime.testing import WorkerProcess, eventually

HALF = """
from dtruntime import DatasetRegistry, TrainingOrchestrator

worker = TrainingOrchestrator()
worker.register()
registry = DatasetRegistry()
registry.register_dataset("numbers", 400, 40, shuffle=False)
for batch in registry.loader("numbers", batch_size=20, rank=0, world_size=2):
    pass
"""


def test_epoch_with_missing_samples(coordinator, api, open_page):
    job = "half"
    with WorkerProcess(HALF, env={"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}) as worker:
        assert worker.wait() == 0
    eventually(
        lambda: [
            epoch
            for dataset in api.ask("/api/dashboard", job=job).json()["datasets"]
            for epoch in dataset["coverage"]
            if epoch["ended_incomplete"]
        ]
    )
    dashboard = open_page(coordinator.http_url)
    dashboard.open("overview", query=f"?job={job}")
    dashboard.until_text(
        "epoch 0 of numbers ended with 200 of 400 samples missing", ".problems .bad"
    )
    dashboard.until_text("1 incomplete", ".nav-count.bad")
    dashboard.page.get_by_role("link", name="epoch 0 of numbers").click()
    dashboard.until_text("200 samples missing", ".coverage .bad")
    assert "to come" not in dashboard.text(".coverage")
    assert dashboard.page.locator(".coverage-bar .missing").count() == 1
