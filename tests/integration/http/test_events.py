"""Server-sent events: a snapshot, then changes, also for many readers and after a cut."""

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.coordinator.http import views
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.http_api import Api, log_in, worker_in
from tests.support.raw_client import RawClient

TRAINING = 3


@pytest.fixture
def raw(served: LocalCoordinator) -> Iterator[RawClient]:
    with RawClient(served.url, "j") as client:
        yield client


def test_changes_tell_of_everything_that_happens_soon(raw: RawClient, api: Api) -> None:
    first = raw.register()
    with api.events("j") as stream:
        assert [w["worker_id"] for w in stream.snapshot()["workers"]] == ["worker-0"]

        second = raw.register()
        row = stream.until(worker_in("worker-1", membership="live"))
        assert row["rank"] == 1
        second.heartbeat(state=TRAINING, step=7)
        assert stream.until(worker_in("worker-1", step=7))["state"] == "training"

        held = first.arrive("gate")
        opened = stream.until(lambda c: c.get("barriers", {}).get("open") or None)
        assert (opened[0]["barrier_id"], opened[0]["arrived"], opened[0]["expected"]) == (
            "gate",
            1,
            2,
        )
        assert opened[0]["missing"] == [{"worker_id": "worker-1", "step": 7}]
        held.cancel()

        first.commit("c-1", 7, size_bytes=10).result()
        (committed,) = stream.until(lambda c: c.get("checkpoints"))
        assert (committed["checkpoint_id"], committed["size_bytes"]) == ("c-1", 10)

        second.leave("enough")
        assert stream.until(worker_in("worker-1", membership="left"))["detail"] == "enough"


@pytest.mark.deaths
def test_changes_tell_of_deaths(raw: RawClient, api: Api) -> None:
    raw.register()
    with api.events("j") as stream:
        stream.snapshot()
        lost = stream.until(worker_in("worker-0", membership="dead"), seconds=30)
        assert lost["detail"].startswith("no heartbeat for")


def test_every_event_has_the_documented_shape(raw: RawClient, api: Api) -> None:
    worker = raw.register()
    with api.events("j") as stream:
        first = stream.next()
        assert first is not None
        msgspec.convert(first.data, views.Dashboard)
        worker.heartbeat(state=TRAINING, step=1, metrics={"loss": 0.5})
        for _ in range(3):
            event = stream.next()
            assert event is not None
            assert event.kind == "change"
            change = msgspec.convert(event.data, views.Change)
            assert msgspec.to_builtins(change) == event.data


def test_reader_that_was_cut_off_gets_what_it_missed(raw: RawClient, api: Api) -> None:
    raw.register()
    with api.events("j") as stream:
        stream.snapshot()
    raw.register()
    with api.events("j", stream.last_id) as resumed:
        event = resumed.next()
        assert event is not None
        assert event.kind == "change"
        if worker_in("worker-1")(event.data) is None:
            resumed.until(worker_in("worker-1"))


def test_event_id_of_a_polled_dashboard_can_be_resumed_from(raw: RawClient, api: Api) -> None:
    raw.register()
    seen = api.get("/api/dashboard", views.Dashboard, job="j")
    raw.register()
    with api.events("j", seen.event_id) as stream:
        assert stream.until(worker_in("worker-1"))


@pytest.mark.parametrize("last_id", [1, 2**53 - 1])
def test_unknown_event_id_gets_a_snapshot(raw: RawClient, api: Api, last_id: int) -> None:
    raw.register()
    with api.events("j", last_id) as stream:
        assert stream.snapshot()["job"] == "j"


def test_event_id_from_before_a_restart_gets_a_snapshot(
    served: LocalCoordinator, raw: RawClient, api: Api
) -> None:
    raw.register()
    with api.events("j") as stream:
        stream.snapshot()
    served.kill()
    served.start()
    with Api(served.http_url) as again, again.events("j", stream.last_id) as resumed:
        assert resumed.snapshot()["event_id"] > stream.last_id


def test_stream_without_a_job_follows_the_first_one(raw: RawClient, api: Api) -> None:
    with api.events() as stream:
        assert stream.snapshot()["job"] == ""
        raw.register()
        assert stream.until(lambda data: data["job"] or None) == "j"


@pytest.mark.long
def test_fifty_readers_get_the_same_while_workers_stay_alive(
    served: LocalCoordinator, api: Api
) -> None:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(TrainingOrchestrator(coordinator_url=served.url, job="j"))
            for _ in range(4)
        ]
        for worker in workers:
            worker.register()
        streams = [stack.enter_context(api.events("j")) for _ in range(50)]
        for stream in streams:
            stream.snapshot()
        until = time.monotonic() + 3
        step = 0
        while time.monotonic() < until:
            step += 1
            for worker in workers:
                worker.report(step=step, state="training")
            time.sleep(0.02)
        with RawClient(served.url, "j") as raw:
            raw.register(worker_id="late")
        for stream in streams:
            assert stream.until(worker_in("late"), seconds=30)["membership"] == "live"
        metrics = api.get("/api/metrics", views.Metrics, job="j")
        assert metrics.workers_live >= 4
        assert metrics.losses_last_hour == 0


def test_stopping_coordinator_ends_streams(served: LocalCoordinator, api: Api) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(api.events()) for _ in range(5)]
        for stream in streams:
            stream.snapshot()
        began = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - began < 10
        for stream in streams:
            while stream.next() is not None:
                pass


@pytest.mark.long
@pytest.mark.deaths
def test_recovery_is_measured_from_the_loss_to_the_next_step(raw: RawClient, api: Api) -> None:
    lost, survivor = raw.register(), raw.register()
    with api.events("j") as stream:
        stream.snapshot()
        for worker in (lost, survivor):
            worker.heartbeat(state=TRAINING, step=10)
        deadline = time.monotonic() + 30
        while log_in("worker.dead")(stream.next().data) is None:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            survivor.heartbeat(state=TRAINING, step=10)
        survivor.heartbeat(state=6, step=8)
        eventually(lambda: open_recovery(api), within=30)
        assert api.get("/api/tasks", views.Page[views.Task], job="j").items[0].state == "recovering"
        steps = itertools.count(8)

        def trains_again() -> bool:
            survivor.heartbeat(state=TRAINING, step=next(steps))
            return not open_recovery(api)

        eventually(trains_again, within=30)
    found = api.get("/api/history", views.History, job="j").recoveries
    assert [r.worker_id for r in found] == [lost.worker_id]
    assert found[0].training_at is not None
    assert found[0].lost_at < found[0].detected_at < found[0].training_at
    metrics = api.get("/api/metrics", views.Metrics, job="j")
    assert (metrics.losses_last_hour, metrics.recoveries_last_hour) == (1, 1)
    assert metrics.last_recovery_seconds == pytest.approx(
        found[0].training_at - found[0].lost_at, abs=0.01
    )


def open_recovery(api: Api) -> bool:
    found = api.get("/api/history", views.History, job="j").recoveries
    return bool(found) and found[-1].training_at is None
