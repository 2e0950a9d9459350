"""Traces and metrics by OTLP: real workers and a real coordinator, a receiver of the test's own."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dtruntime.testing import LocalCoordinator, WorkerProcess
from tests.support.coordinators import PATIENT
from tests.support.servers.otlp_receiver import Receiver, receiving

ERROR = 2
CLIENT, SERVER = 3, 2
COMMIT = "strata.v1.CoordinatorService/NotifyCheckpoint"
WAIT = "strata.v1.CoordinatorService/WaitBarrier"

SAVER = """
import sys
import numpy as np
from dtruntime import CheckpointManager, TrainingOrchestrator

with TrainingOrchestrator() as worker:
    worker.register()
    worker.report(step=6)
    worker.barrier("start")
    with CheckpointManager(sys.argv[1]) as manager:
        manager.save({"weights": np.arange(300_000.0)}, step=7, epoch=1).wait()
print("done", flush=True)
"""

LONELY = """
from dtruntime import SyncError, TrainingOrchestrator

with TrainingOrchestrator(world_size=2) as worker:
    worker.register()
    try:
        worker.barrier("nobody-else-comes", timeout_ms=200)
    except SyncError as exc:
        print("failed", exc.reason, flush=True)
"""

BEATING = """
import logging, os, sys, time
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
from dtruntime import TrainingOrchestrator

with TrainingOrchestrator() as worker:
    worker.register()
    for number in range(int(sys.argv[1])):
        worker.barrier("again")
    print("done", *sorted(name for name in sys.modules if name == "opentelemetry"), flush=True)
    sys.stdin.readline()
    worker.barrier("last")
"""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A collector that all processes of the test know, with every trace sampled."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("STRATA_TRACE_RATIO", "1")
        monkeypatch.setenv("STRATA_METRICS_INTERVAL_MS", "200")
        yield receiver


def worker(program: str, url: str, *arguments: str, **env: str) -> WorkerProcess:
    return WorkerProcess(program, arguments, env={"COORDINATOR_URL": url, **env})


@pytest.mark.parametrize(
    "transport", ["pygrpc-native", pytest.param("grpc.aio", marks=pytest.mark.long)]
)
def test_a_save_and_a_barrier_are_traced_through_the_coordinator(
    receiver: Receiver, tmp_path: Path, transport: str
) -> None:
    with LocalCoordinator(**PATIENT, options=["--transport", transport]) as coordinator:
        with worker(SAVER, coordinator.url, str(tmp_path), STRATA_JOB="traced") as process:
            process.expect("done")
            process.wait()
        save = receiver.span("save")
        assert save.service == "strata-worker"
        assert not save.parent_id
        assert save.attributes["strata.step"] == 7
        assert save.attributes["strata.epoch"] == 1
        assert save.attributes["strata.job"] == "traced"
        assert save.attributes["strata.rank"] == 0
        assert save.attributes["strata.generation"] == 1
        assert save.attributes["strata.size_bytes"] > 300_000 * 8
        for name in ("save.stage", "save.write", "save.commit"):
            assert receiver.span(name, of=save.trace_id).parent_id == save.span_id
        encode = receiver.span("save.encode", of=save.trace_id)
        assert encode.parent_id == receiver.span("save.write").span_id
        commit = receiver.span(COMMIT, of=save.trace_id)
        assert commit.service == "strata-coordinator"
        assert commit.parent_id == receiver.span("save.commit").span_id
        assert commit.kind == SERVER
        assert commit.attributes["strata.step"] == 7
        assert commit.attributes["strata.rank"] == 0
        assert commit.attributes["strata.checkpoint_id"] == save.attributes["strata.checkpoint_id"]

        barrier = receiver.span("barrier")
        assert barrier.kind == CLIENT
        assert not barrier.parent_id
        assert barrier.attributes["strata.barrier_id"] == "start"
        assert barrier.attributes["strata.step"] == 6
        waited = receiver.span(WAIT, of=barrier.trace_id)
        assert (waited.service, waited.parent_id) == ("strata-coordinator", barrier.span_id)
        expected = {"strata.job": "traced", "strata.rank": 0, "strata.generation": 1}
        assert expected.items() <= waited.attributes.items()
        assert {save.status, commit.status, barrier.status, waited.status} == {0}
        assert not [span for span in receiver.spans if "Heartbeat" in span.name]


def test_a_barrier_that_fails_is_an_error_on_both_sides(receiver: Receiver) -> None:
    with (
        LocalCoordinator(**PATIENT) as coordinator,
        worker(LONELY, coordinator.url) as process,
    ):
        process.expect("failed timeout")
        barrier = receiver.span("barrier")
        waited = receiver.span(WAIT, of=barrier.trace_id)
        assert barrier.status == waited.status == ERROR
        assert "timed out after 200 ms" in barrier.message
        assert barrier.events == ("exception",)
        assert waited.message == "timed out"


def test_a_save_that_fails_is_an_error(receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    program = """
import sys
from dtruntime import CheckpointManager, StorageError
try:
    with CheckpointManager(sys.argv[1]) as manager:
        manager.save(b"bytes", step=1).wait()
except StorageError:
    print("failed", flush=True)
"""
    with worker(program, "http://127.0.0.1:1", str(tmp_path / "file")) as process:
        process.expect("failed")
        save = receiver.span("save")
        assert save.status == ERROR
        assert save.message


def test_a_span_of_the_program_itself_is_the_parent(receiver: Receiver) -> None:
    program = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from dtruntime import TrainingOrchestrator
tracer = TracerProvider().get_tracer("program")
with TrainingOrchestrator() as worker, tracer.start_as_current_span("epoch") as span:
    worker.register()
    worker.barrier("inside")
    print("span", format(span.get_span_context().span_id, "016x"), flush=True)
    worker.beat()
"""
    with (
        LocalCoordinator(**PATIENT) as coordinator,
        worker(program, coordinator.url) as process,
    ):
        span_id = process.expect("span").split()[1]
        assert receiver.span("barrier").parent_id.hex() == span_id


@pytest.mark.long
def test_sampling_leaves_traces_out_whole(receiver: Receiver) -> None:
    with LocalCoordinator(**PATIENT) as coordinator:
        with worker(BEATING, coordinator.url, "300", STRATA_TRACE_RATIO="0.2") as process:
            process.expect("done opentelemetry")
            process.send("go on")
            process.wait()
        receiver.wait(lambda: any(span.name == "barrier" for span in receiver.spans))
        coordinator.stop()
        barriers = {span.trace_id for span in receiver.spans if span.name == "barrier"}
        waits = {span.trace_id for span in receiver.spans if span.name == WAIT}
        assert waits == barriers
        assert 20 <= len(barriers) <= 120


def test_metrics_are_those_of_prometheus(receiver: Receiver) -> None:
    with (
        LocalCoordinator(**PATIENT, http=True) as coordinator,
        worker(BEATING, coordinator.url, "3", STRATA_JOB="measured") as process,
    ):
        process.expect("done")
        receiver.wait(lambda: "strata_barrier_duration_seconds" in receiver.metrics)

        def completed() -> bool:
            points = receiver.metrics["strata_barrier_duration_seconds"][1].histogram.data_points
            return [point.count for point in points] == [3]

        receiver.wait(completed)
        text = httpx.get(f"{coordinator.http_url}/metrics", trust_env=False).text
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        # Only counters carry their ending, and the information is a gauge, there.
        sent = set(receiver.metrics) | {f"{name}_total" for name in receiver.metrics}
        sent |= {f"{name}_info" for name in receiver.metrics}
        optional = {"strata_coordinator_event_loop_lag_seconds"}
        families = {name for name in names if f"\n{name}" in text.replace("# TYPE", "")}
        assert families - optional <= sent
        service, workers = receiver.metrics["strata_workers"]
        assert service == "strata-coordinator"
        values = {
            tuple(pair.value.string_value for pair in point.attributes): point.as_double
            or point.as_int
            for point in workers.gauge.data_points
        }
        assert values == {("measured", "live"): 1, ("measured", "dead"): 0}
        assert receiver.metrics["strata_heartbeats"][1].sum.is_monotonic


def test_nothing_is_imported_where_nothing_is_configured() -> None:
    with (
        LocalCoordinator(**PATIENT) as coordinator,
        worker(BEATING, coordinator.url, "1") as process,
    ):
        assert process.expect("done") == "done"
        assert "telemetry" not in coordinator.log


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["nobody listens", "refused"])
def test_a_collector_that_fails_disturbs_nothing_and_is_named_once(
    receiver: Receiver, trouble: str
) -> None:
    receiver.answer = 400
    endpoint = receiver.url if trouble == "refused" else "http://127.0.0.1:1"
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    with (
        LocalCoordinator(**PATIENT) as coordinator,
        worker(BEATING, coordinator.url, "20", **env) as process,
    ):
        process.expect("done opentelemetry")
        receiver.wait(lambda: "telemetry.not_sent" in process.log)
        process.send("go on")
        assert process.wait() == 0
        assert process.log.count("telemetry.not_sent") == 1
        assert "opentelemetry.exporter" not in process.log
        assert "Traceback" not in process.log


def test_a_protocol_that_is_not_spoken_is_said(receiver: Receiver) -> None:
    env = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with (
        LocalCoordinator(**PATIENT) as coordinator,
        worker(BEATING, coordinator.url, "1", **env) as process,
    ):
        process.expect("done")
        assert "telemetry.unusable" in process.log
