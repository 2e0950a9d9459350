"""The HTTP API of a real coordinator: every path, against the documented types."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dtruntime import TrainingOrchestrator
from dtruntime.coordinator.http import views
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import PATIENT
from tests.support.http_api import Api
from tests.support.raw_client import RawClient, RawWorker

TRAINING, WAITING = 3, 5


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCoordinator]:
    options: dict[str, Any] = dict(PATIENT)
    folder = tmp_path_factory.mktemp("http")
    with LocalCoordinator(folder, http=True, **options) as coordinator:
        yield coordinator


@pytest.fixture
def api(served: LocalCoordinator) -> Iterator[Api]:
    with Api(served.http_url) as api:
        yield api


@pytest.fixture
def raw(served: LocalCoordinator, job: str) -> Iterator[RawClient]:
    with RawClient(served.url, job) as client:
        yield client


@pytest.fixture
def trained(raw: RawClient) -> list[RawWorker]:
    """Two workers that have saved together, one of which waits for the other."""
    workers = raw.workers(2)
    for worker in workers:
        worker.told = raw.call("GetStatus").generation
    ids = {worker.begin_checkpoint(4).checkpoint_id for worker in workers}
    (checkpoint_id,) = ids
    parts = [
        worker.commit(checkpoint_id, 4, size_bytes=500, partial=True, timeout_ms=5000)
        for worker in workers
    ]
    for part in parts:
        part.result()
    for held in [worker.arrive("met") for worker in workers]:
        held.result()
    raw.call("RegisterDataset", dataset_id="d", total_samples=95, shard_size=10)
    for worker in workers:
        worker.heartbeat(state=TRAINING, step=4, epoch=1, metrics={"loss": 0.5}, step_seconds=0.1)
    return workers


def test_every_path_answers_with_the_documented_type(
    api: Api, job: str, trained: list[RawWorker]
) -> None:
    held = trained[0].arrive("gate")
    eventually(lambda: api.get("/api/barriers", views.Barriers, job=job).open)
    eventually(lambda: api.get("/api/history", views.History, job=job).points)

    assert api.get("/api/health", views.Health).status == "ok"
    process = api.get("/api/coordinator", views.Coordinator)
    assert process.http_address == api.url.removeprefix("http://")
    assert process.requests_total > 5
    assert process.memory_bytes > 10_000_000
    assert job in [row.job for row in api.get("/api/jobs", views.Page[views.Job]).items]
    workers = api.get("/api/workers", views.Page[views.Worker], job=job)
    assert [w.worker_id for w in workers.items] == ["worker-0", "worker-1"]
    assert workers.items[0].metrics == {"loss": 0.5}
    one = api.get("/api/workers/worker-1", views.Worker, job=job)
    assert (one.rank, one.step, one.epoch, one.cpu_percent) == (1, 4, 1, None)
    (dataset,) = api.get("/api/datasets", views.Page[views.Dataset], job=job).items
    assert [share.shards for share in dataset.shards_per_rank] == [5, 5]
    assert sum(share.samples for share in dataset.shards_per_rank) == 95
    (saved,) = api.get("/api/checkpoints", views.Page[views.Checkpoint], job=job).items
    assert (saved.size_bytes, saved.parts, saved.written_bytes) == (1000, 2, None)
    assert saved.duration_seconds is not None
    barriers = api.get("/api/barriers", views.Barriers, job=job)
    assert barriers.completed_total == 1
    assert sum(bucket.count for bucket in barriers.histogram) == 1
    metrics = api.get("/api/metrics", views.Metrics, job=job)
    assert (metrics.workers_live, metrics.checkpoints_committed) == (2, 1)
    assert api.get("/api/tasks", views.Page[views.Task], job=job).items[0].state == "running"
    assert api.get("/api/actions", views.Page[views.Action], job=job).items == []
    events = {e.event for e in api.get("/api/logs", views.Page[views.LogEntry], job=job).items}
    assert {"worker.registered", "checkpoint.begun", "dataset.registered"} <= events
    whole = api.get("/api/dashboard", views.Dashboard, job=job)
    assert whole.job == job
    assert [w.worker_id for w in whole.workers] == ["worker-0", "worker-1"]
    held.cancel()


def test_figures_are_measured(api: Api, job: str, trained: list[RawWorker]) -> None:
    steps = iter(range(5, 10_000))

    def measured() -> views.Metrics | None:
        step = next(steps)
        trained[0].heartbeat(state=TRAINING, step=step, metrics={"loss": 0.25})
        trained[1].heartbeat(state=WAITING, step=step)
        found = api.get("/api/metrics", views.Metrics, job=job)
        known = (found.steps_per_second, found.goodput, found.assignment_ms)
        return found if all(value is not None for value in known) else None

    metrics = eventually(measured)
    assert metrics is not None
    assert metrics.steps_per_second is not None
    assert metrics.steps_per_second > 0
    assert metrics.goodput is not None
    assert 0 < metrics.goodput <= 1
    assert metrics.requests_per_second is not None
    assert metrics.heartbeats_per_second is not None
    assert metrics.barrier_p50_ms is not None
    assert metrics.checkpoint_bytes_per_second is not None
    assert metrics.heartbeat_age_max_seconds is not None
    assert metrics.samples_per_second is None, "nobody reports what it has consumed"


def test_three_hundred_workers_come_page_by_page(raw: RawClient, api: Api, job: str) -> None:
    for held in [raw.begin("RegisterWorker", pb_worker(job, number)) for number in range(300)]:
        held.result()
    seen: list[str] = []
    cursor = ""
    while True:
        page = api.get("/api/workers", views.Page[views.Worker], job=job, limit=70, cursor=cursor)
        assert page.total == 300
        seen += [worker.worker_id for worker in page.items]
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
    assert sorted(seen) == sorted(f"w-{number:03d}" for number in range(300))

    found = api.get("/api/workers", views.Page[views.Worker], job=job, search="W-29", limit=1000)
    assert len(found.items) == found.total == 10
    last = api.get("/api/workers", views.Page[views.Worker], job=job, sort="-worker_id", limit=1)
    assert last.items[0].worker_id == "w-299"
    assert api.get("/api/workers", views.Page[views.Worker], job=job, state="dead").total == 0
    assert api.get("/api/workers", views.Page[views.Worker], job=job, state="live").total == 300
    assert len(api.get("/api/dashboard", views.Dashboard, job=job).workers) == 300


def pb_worker(job: str, number: int) -> Any:
    from dtruntime.rpc.gen import coordinator_pb2 as pb

    return pb.WorkerInfo(job=job, worker_id=f"w-{number:03d}", session=f"s-{number}")


def test_action_reaches_the_workers_and_disappears_when_done(
    served: LocalCoordinator, api: Api, job: str
) -> None:
    with TrainingOrchestrator(coordinator_url=served.url, job=job) as worker:
        worker.register()
        body = {"job": job, "kind": "checkpoint", "reason": "before lunch"}
        action = api.post("/api/actions", body).json()
        assert action["kind"] == "checkpoint"
        pending = api.get("/api/actions", views.Page[views.Action], job=job).items
        assert [one.action_id for one in pending] == [action["action_id"]]
        (heard,) = eventually(lambda: worker.actions)
        assert heard.reason == "before lunch"
        assert api.post("/api/actions", body).json()["action_id"] == action["action_id"]
        worker.complete_action(heard.action_id, "saved")
        assert api.get("/api/actions", views.Page[views.Action], job=job).items == []


def test_actions_of_other_origins_are_refused(api: Api, job: str, raw: RawClient) -> None:
    raw.register()
    body = {"job": job, "kind": "stop"}
    own = api.url
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://evil.example:80", "Host": "evil.example:80"},
        {"Origin": own.replace("http://", "https://").replace("127.0.0.1", "evil.example")},
    ):
        status, code, message = api.error_of(api.post("/api/actions", body, **headers))
        assert (status, code) == (403, "cross_origin"), headers
        assert "http_origins" in message
    assert api.get("/api/actions", views.Page[views.Action], job=job).items == []
    assert api.post("/api/actions", body, Origin=own).status_code == 200
    assert "access-control-allow-origin" not in api.ask("/api/health").headers


def test_wrong_actions_get_clear_errors(api: Api, job: str, raw: RawClient) -> None:
    raw.register()
    status, code, message = api.error_of(
        api.post("/api/actions", {"job": job, "kind": "drain", "worker_id": "nobody"})
    )
    assert (status, code) == (404, "no_such_worker")
    assert "'nobody' is not a live worker" in message
    status, code, message = api.error_of(
        api.post("/api/actions", {"job": "no-such-job", "kind": "stop"})
    )
    assert (status, code) == (404, "unknown_job")
    for bad in ({}, {"job": job}, {"job": job, "kind": "explode"}, [], {"job": job, "x": 1}):
        assert api.error_of(api.post("/api/actions", bad))[:2] == (400, "invalid"), bad
    plain = {"Content-Type": "text/plain"}
    body = json.dumps({"job": job, "kind": "stop"}).encode()
    assert api.error_of(api.post_bytes("/api/actions", body, **plain))[:2] == (415, "not_json")
    large = {"Content-Type": "application/json"}
    refused = api.post_bytes("/api/actions", b" " * 100_000, **large)
    assert api.error_of(refused)[:2] == (413, "request_too_large")


@pytest.mark.parametrize(
    ("path", "query", "status", "code"),
    [
        ("/api/dashboard", {"job": "no-such-job"}, 404, "unknown_job"),
        ("/api/events", {"job": "no-such-job"}, 404, "unknown_job"),
        ("/api/workers", {"limit": 0}, 400, "invalid"),
        ("/api/workers", {"limit": "many"}, 400, "invalid"),
        ("/api/workers", {"sort": "beauty"}, 400, "invalid"),
        ("/api/workers", {"cursor": "x"}, 400, "invalid"),
        ("/api/history", {"seconds": -1}, 400, "invalid"),
        ("/api/logs", {"level": "loud"}, 400, "invalid"),
        ("/api/workers/nobody", {}, 404, "no_such_worker"),
        ("/api/nothing", {}, 404, "not_found"),
        ("/nothing", {}, 404, "not_found"),
        ("/../../etc/passwd", {}, 404, "not_found"),
        ("/%2e%2e/%2e%2e/etc/passwd", {}, 404, "not_found"),
    ],
)
def test_wrong_requests_get_clear_errors(
    api: Api, raw: RawClient, path: str, query: dict[str, Any], status: int, code: str
) -> None:
    raw.register()
    found = api.error(path, **query)
    assert found[:2] == (status, code)
    assert len(found[2]) > 10


def test_wrong_method_is_refused(api: Api) -> None:
    refused = api.post("/api/workers", {})
    assert api.error_of(refused)[:2] == (405, "method_not_allowed")
    assert refused.headers["allow"] == "GET, HEAD"


def test_answers_are_tagged_and_compressed_on_request(
    api: Api, job: str, trained: list[RawWorker]
) -> None:
    first = api.ask("/api/checkpoints", job=job)
    tag = first.headers["etag"]
    again = api.ask("/api/checkpoints", {"If-None-Match": tag}, job=job)
    assert (again.status_code, again.content) == (304, b"")
    small = api.ask("/openapi.json", {"Accept-Encoding": "gzip"})
    plain = api.ask("/openapi.json", {"Accept-Encoding": "identity"})
    assert small.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert small.content == plain.content


def test_pages_are_guarded_by_headers(api: Api) -> None:
    for path in ("/", "/api/health", "/nothing"):
        headers = api.ask(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers
    assert api.ask("/").headers["content-type"].startswith("text/html")


def test_journal_can_be_searched_and_exported(api: Api, job: str, trained: list[RawWorker]) -> None:
    trained[1].leave("lunch")
    page = views.Page[views.LogEntry]
    assert [e.event for e in api.get("/api/logs", page, job=job, search="LUNCH").items] == [
        "worker.left"
    ]
    everything = api.get("/api/logs", page, job=job)
    ids = [entry.id for entry in everything.items]
    assert ids == sorted(ids, reverse=True)
    newest = api.get("/api/logs", page, job=job, limit=2)
    assert newest.next_cursor == str(ids[1])
    older = api.get("/api/logs", page, job=job, before=newest.next_cursor)
    assert [e.id for e in older.items] == ids[2:]
    assert api.get("/api/logs", page, job=job, after=ids[0]).items == []
    assert {e.event for e in api.get("/api/logs", page, job=job, event="worker").items} == {
        "worker.registered",
        "worker.left",
    }
    lines = api.ask("/api/logs", job=job, format="jsonl").text.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ids
    table = api.ask("/api/logs", job=job, format="csv")
    assert table.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert [int(row["id"]) for row in rows] == ids


def test_prometheus_reads_the_metrics(api: Api, job: str, trained: list[RawWorker]) -> None:
    answer = api.ask("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {f.name: f for f in text_string_to_metric_families(answer.text)}
    workers = {
        (s.labels["job"], s.labels["membership"]): s.value
        for s in families["strata_workers"].samples
    }
    assert workers[job, "live"] == 2
    assert families["strata_heartbeats"].type == "counter"
    assert families["strata_barrier_duration_seconds"].type == "histogram"
    documented = Path(__file__).parents[3] / "docs" / "metrics.md"
    names = {f"`{name}" for name in families}
    text = documented.read_text(encoding="utf-8")
    assert [name for name in names if name not in text] == []


def test_files_that_a_client_named_are_never_read(api: Api, job: str) -> None:
    assert api.error("/api/datasets/rows/preview", job=job)[:2] == (404, "not_found")
