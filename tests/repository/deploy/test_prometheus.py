"""A real Prometheus scrapes a real coordinator, with the files that are shipped for it."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dtruntime import TrainingOrchestrator
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import PATIENT

DEPLOY = Path(__file__).parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus" / "strata-alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "strata.json").read_text(encoding="utf-8"))
SECONDS = 30.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="NOT TESTED against a real Prometheus: it is not installed (Debian: apt-get install "
    "prometheus; `make test` does that where it may)",
)


@pytest.fixture(scope="module")
def measured() -> Iterator[LocalCoordinator]:
    """A coordinator with everything that can be measured: steps, barriers, a checkpoint."""
    with LocalCoordinator(**PATIENT, http=True) as coordinator:
        workers = [TrainingOrchestrator(coordinator_url=coordinator.url, job="m") for _ in "ab"]
        for worker in workers:
            worker.register()
            worker.report(step=3, state="training")
        asyncio.run(_meet(workers))
        workers[0].commit_checkpoint("c-1", 3, size_bytes=1000)
        yield coordinator
        for worker in workers:
            worker.deregister()


async def _meet(workers: list[TrainingOrchestrator]) -> None:
    await asyncio.gather(*(worker.wait_barrier("meet") for worker in workers))


@pytest.fixture(scope="module")
def prometheus(
    measured: LocalCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Its HTTP API."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(ALERTS, folder)
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    config = config.replace("localhost:3000", measured.http_url.removeprefix("http://"))
    config = config.replace("interval: 10s", "interval: 200ms\n  evaluation_interval: 200ms")
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = (folder / "log").open("w", encoding="utf-8")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=log,
    )
    try:
        with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
            eventually(lambda: _is_ready(client), within=SECONDS, what="a ready Prometheus")
            yield client
    finally:
        process.terminate()
        process.wait(SECONDS)
        log.close()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def query(client: httpx.Client, expression: str) -> list[Any]:
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    return list(answer["data"]["result"])


def expressions() -> list[str]:
    return [
        target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]


@needs_prometheus
def test_prometheus_scrapes_jobs_under_their_own_names(prometheus: httpx.Client) -> None:
    live = 'strata_workers{job="m",membership="live"}'
    found = eventually(lambda: query(prometheus, live), within=SECONDS)

    assert found[0]["value"][1] == "2"
    (target,) = prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    (checkpoint,) = query(prometheus, "strata_checkpoint_last_size_bytes")
    assert checkpoint["value"][1] == "1000"
    rounds = 'strata_barrier_duration_seconds_bucket{job="m",le="+Inf"}'
    assert query(prometheus, rounds)[0]["value"][1] == "1"


@needs_prometheus
def test_every_panel_asks_what_prometheus_understands(prometheus: httpx.Client) -> None:
    eventually(lambda: query(prometheus, "strata_steps_per_second"), within=SECONDS)
    answered = [bool(query(prometheus, expression)) for expression in expressions()]

    assert len(answered) > 20
    assert sum(answered) > len(answered) / 2


@needs_prometheus
def test_alerts_are_loaded_and_quiet_on_a_healthy_job(prometheus: httpx.Client) -> None:
    def evaluated() -> list[Any]:
        groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["health"] == "ok" for rule in rules) else []

    rules = eventually(evaluated, within=SECONDS)
    assert len(rules) == ALERTS.read_text(encoding="utf-8").count("- alert:")
    assert "firing" not in {rule["state"] for rule in rules}


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="NOT TESTED: promtool, of the package prometheus, is not installed",
)
def test_promtool_accepts_the_alerts_and_their_tests() -> None:
    folder = DEPLOY / "prometheus"
    for arguments in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "strata-alerts.yml"],
        ["test", "rules", "strata-alerts.test.yml"],
    ):
        command = ["promtool", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_and_alerts_name_only_metrics_that_exist(measured: LocalCoordinator) -> None:
    def exposed() -> set[str]:
        text = httpx.get(f"{measured.http_url}/metrics", trust_env=False).text
        families = list(text_string_to_metric_families(text))
        # A figure that is not known yet has a name and no sample.
        names = {sample.name for family in families for sample in family.samples}
        return names | {family.name for family in families}

    texts = [*expressions(), ALERTS.read_text(encoding="utf-8")]
    used = {name for text in texts for name in re.findall(r"\bstrata_\w+", text)}
    assert len(used) > 20
    lag = "strata_coordinator_event_loop_lag_seconds"
    eventually(lambda: lag in exposed(), within=SECONDS)
    assert used <= exposed()
