"""Consumption of an epoch, over the wire: claims, commits, shares, coverage, and a coordinator
that is killed in between."""

import random
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from dtruntime.data.order import AffinityOrder, Segment, Shuffle, TakenBack
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.sharding import SlotTable
from dtruntime.sharding.coverage_digest import Digest, whole
from dtruntime.testing import LocalCoordinator
from tests.support.raw_client import HeldCall, RawClient, RawWorker, Refusal

GRANTED = pb.CLAIM_OUTCOME_GRANTED
MOVED = pb.CLAIM_OUTCOME_MOVED
COMPLETE = pb.CLAIM_OUTCOME_COMPLETE
WAITING = pb.CLAIM_OUTCOME_WAITING

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
WRONG = grpc.StatusCode.FAILED_PRECONDITION

SAMPLES, SHARD = 1000, 20
DATASET = {"dataset_id": "corpus", "epoch": 0}


def digest_of(samples: range) -> bytes:
    digest = Digest(SAMPLES)
    digest.add(np.array(samples, np.int64))
    return digest.to_bytes()


def register_dataset(client: RawClient) -> None:
    client.call("RegisterDataset", dataset_id="corpus", total_samples=SAMPLES, shard_size=SHARD)


def begin_claim(worker: RawWorker, segment: int, upto: int, length: int, **more: Any) -> HeldCall:
    fields = {**worker.identity, **DATASET, **more}
    request = pb.ClaimRequest(segment=segment, upto=upto, length=length, **fields)
    return worker.client.begin("ClaimSamples", request)


def claim(
    worker: RawWorker, segment: int, upto: int = 0, length: int = 0, **more: Any
) -> pb.ClaimResponse:
    reply: pb.ClaimResponse = begin_claim(worker, segment, upto, length, **more).result()
    return reply


def commit(worker: RawWorker, segment: int, position: int, digest: bytes) -> pb.CommitResponse:
    reply: pb.CommitResponse = worker.client.call(
        "CommitSamples",
        segment=segment,
        position=position,
        digest=digest,
        **worker.identity,
        **DATASET,
    )
    return reply


def coverage(client: RawClient, **fields: Any) -> list[pb.Coverage]:
    return list(client.call("GetCoverage", dataset_id="corpus", **fields).epochs)


@pytest.fixture
def readers(service: RawClient) -> list[RawWorker]:
    """Two workers that know the first segment."""
    register_dataset(service)
    workers = [service.register(rank=rank, world_size=2) for rank in range(2)]
    assert claim(workers[0], 0).outcome == MOVED
    return workers


def test_epoch_is_read_by_two_workers(service: RawClient, readers: list[RawWorker]) -> None:
    first, second = readers
    moved = claim(second, 0)
    assert (moved.outcome, moved.slot, len(moved.segments)) == (MOVED, 1, 1)
    assert (moved.segments[0].slot_count, list(moved.segments[0].taken)) == (2, [])
    assert moved.committed_segment == 0
    assert claim(first, 1, 400, 500).outcome == GRANTED
    assert claim(first, 1, 500, 500).outcome == GRANTED
    assert commit(first, 1, 500, digest_of(range(500))).segment == 1
    waiting = claim(first, 1, 500, 500, timeout_ms=1)
    assert (waiting.outcome, list(waiting.unfinished)) == (WAITING, [1])
    held = begin_claim(first, 1, 500, 500, timeout_ms=20_000)
    assert claim(second, 1, 500, 500, timeout_ms=20_000).outcome == GRANTED
    commit(second, 1, 500, digest_of(range(500, 1000)))
    assert held.result().outcome == COMPLETE
    assert claim(second, 1, 500, 500).outcome == COMPLETE
    (found,) = coverage(service, epoch=0)
    assert (found.complete, found.expected, found.workers, found.segments) == (True, SAMPLES, 2, 1)
    assert found.digest == whole(SAMPLES).to_bytes()
    kinds = [event.kind for event in service.events()]
    assert kinds[-2:] == ["epoch.began", "epoch.completed"]


def test_loss_moves_the_survivors(service: RawClient, readers: list[RawWorker]) -> None:
    first, second = readers
    claim(first, 1, 500, 500)
    commit(first, 1, 500, digest_of(range(500)))
    claim(second, 1, 200, 500)
    commit(second, 1, 50, digest_of(range(500, 550)))
    held = begin_claim(first, 1, 500, 500, timeout_ms=20_000)
    second.leave()
    moved = held.result()
    assert (moved.outcome, len(moved.segments)) == (MOVED, 2)
    assert list(moved.segments[0].taken) == [500, 50]
    assert (moved.segments[1].slot_count, list(moved.segments[1].dead_slots)) == (1, [])
    assert (moved.claimed, moved.committed_segment, moved.committed_position) == (0, 1, 500)
    assert moved.committed_digest == digest_of(range(500))
    with pytest.raises(Refusal) as caught:
        commit(second, 1, 60, digest_of(range(500, 560)))
    assert caught.value.reason == "superseded"
    (event,) = [e for e in service.events() if e.kind == "epoch.segment"]
    assert (event.fields["why"], event.fields["taken_back"]) == ("lost rank 1", "150")


def test_idle_worker_gets_of_what_another_has_left(
    service: RawClient, readers: list[RawWorker]
) -> None:
    first, second = readers
    claim(second, 1, 100, 500)
    for upto in range(100, 600, 100):
        claim(first, 1, upto, 500)
    commit(first, 1, 500, digest_of(range(500)))
    moved = claim(first, 1, 500, 500, timeout_ms=20_000)
    assert moved.outcome == MOVED
    assert list(moved.segments[0].taken) == [500, 100]
    assert len(moved.segments[1].weights) == 2
    assert moved.segments[1].weights[0] == 100


def test_shares_can_be_changed_by_hand(service: RawClient, readers: list[RawWorker]) -> None:
    claim(readers[0], 1, 100, 500)
    reply = service.call("RebalanceEpoch", **DATASET, weights={1: 25})
    assert (reply.segment, list(reply.weights)) == (2, [100, 25])
    assert claim(readers[0], 1, 200, 500).outcome == MOVED
    with pytest.raises(Refusal, match="rank 7") as caught:
        service.call("RebalanceEpoch", **DATASET, weights={7: 25})
    assert (caught.value.code, caught.value.reason) == (NOT_FOUND, "unknown_rank")
    with pytest.raises(Refusal, match="101 is more than 100"):
        service.call("RebalanceEpoch", **DATASET, weights={1: 101})
    with pytest.raises(Refusal, match="epoch 9") as caught:
        service.call("RebalanceEpoch", dataset_id="corpus", epoch=9)
    assert (caught.value.code, caught.value.reason) == (NOT_FOUND, "unknown_epoch")


def test_coverage_is_what_workers_report(service: RawClient) -> None:
    register_dataset(service)
    first, second = service.workers(2, world_size=2)
    for worker, own in ((first, range(100, 300)), (second, range(300, 350))):
        service.call(
            "ReportCoverage",
            **worker.identity,
            **DATASET,
            base=digest_of(range(100)),
            world_size=2,
            digest=digest_of(own),
            dropped=3,
            expected=997,
        )
    (found,) = coverage(service)
    assert (found.workers, found.dropped, found.expected, found.complete) == (2, 3, 997, False)
    assert (found.digest, found.segments) == (digest_of(range(350)), 0)
    assert coverage(service, epoch=1) == []
    with pytest.raises(Refusal) as caught:
        service.call("GetCoverage", dataset_id="other")
    assert (caught.value.code, caught.value.reason) == (NOT_FOUND, "unknown_dataset")


BAD_CLAIMS: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({"incarnation": 0}, INVALID, "incarnation is missing"),
    ({"incarnation": 99}, WRONG, "incarnation 99"),
    ({"dataset_id": ""}, INVALID, "dataset"),
    ({"dataset_id": "../x"}, INVALID, "dataset"),
    ({"dataset_id": "other", "segment": 0}, NOT_FOUND, "not registered"),
    ({"epoch": 2**63}, INVALID, "epoch"),
    ({"epoch": 5}, NOT_FOUND, "epoch 5"),
    ({"plan": "p" * 513}, INVALID, "plan"),
    ({"plan": "other"}, WRONG, "plan"),
    ({"segment": 2}, INVALID, "segment 2"),
    ({"upto": 501}, INVALID, "501 samples"),
    ({"length": 2**63, "upto": 2**63}, INVALID, "length"),
    ({"length": 5000, "upto": 5000}, WRONG, "5000"),
]


@pytest.mark.parametrize(("fields", "code", "named"), BAD_CLAIMS)
def test_bad_claim_is_refused(
    readers: list[RawWorker], fields: dict[str, Any], code: grpc.StatusCode, named: str
) -> None:
    good = {**readers[0].identity, **DATASET, "segment": 1, "upto": 10, "length": 500}
    with pytest.raises(Refusal) as caught:
        readers[0].client.call("ClaimSamples", **{**good, **fields})
    assert caught.value.code == code
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"incarnation": 0}, "invalid"),
        ({"dataset_id": "a\nb"}, "invalid"),
        ({"epoch": 1}, "unknown_epoch"),
        ({"segment": 2, "position": 0}, "lane_conflict"),
        ({"position": 101, "digest": digest_of(range(101))}, "lane_conflict"),
        ({"digest": b""}, "digest_conflict"),
        ({"digest": b"short"}, "invalid"),
        ({"digest": digest_of(range(51))}, "digest_conflict"),
    ],
)
def test_bad_commit_is_refused(
    readers: list[RawWorker], fields: dict[str, Any], reason: str
) -> None:
    claim(readers[0], 1, 100, 500)
    good = {**readers[0].identity, **DATASET, "segment": 1, "position": 50}
    good["digest"] = digest_of(range(50))
    with pytest.raises(Refusal) as caught:
        readers[0].client.call("CommitSamples", **{**good, **fields})
    assert caught.value.reason == reason
    readers[0].client.call("CommitSamples", **good)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"incarnation": 0}, "invalid"),
        ({"base": b"x"}, "invalid"),
        ({"digest": b"x"}, "invalid"),
        ({"expected": SAMPLES + 1}, "invalid"),
        ({"generation": 2**63}, "invalid"),
        ({"dataset_id": "other"}, "unknown_dataset"),
    ],
)
def test_bad_report_is_refused(
    service: RawClient, readers: list[RawWorker], fields: dict[str, Any], reason: str
) -> None:
    good = {**readers[0].identity, **DATASET, "digest": digest_of(range(5)), "expected": SAMPLES}
    with pytest.raises(Refusal) as caught:
        service.call("ReportCoverage", **{**good, **fields})
    assert caught.value.reason == reason


def test_killed_coordinator_remembers_every_answer(
    start_coordinator: Callable[..., LocalCoordinator],
) -> None:
    coordinator = start_coordinator(heartbeat_timeout_ms=60_000)

    def restarted() -> None:
        coordinator.kill()
        coordinator.start()

    with RawClient(coordinator.url) as client:
        register_dataset(client)
        first, second = [client.register(rank=rank, world_size=2) for rank in range(2)]
        claim(first, 0)
        claim(first, 1, 300, 500)
        restarted()
        commit(first, 1, 250, digest_of(range(250)))
        claim(second, 1, 100, 500)
        restarted()
        second.leave()
        moved = claim(first, 1, 400, 500)
        restarted()
        assert claim(first, 1, 400, 500) == moved
        assert list(moved.segments[0].taken) == [300, 0]
        assert moved.committed_position == 250
        client.call("ReportCoverage", **first.identity, dataset_id="corpus", epoch=3, world_size=1)
        assert claim(first, 2, 700, 700).outcome == GRANTED
        commit(first, 2, 700, digest_of(range(1000)))
        restarted()
        assert claim(first, 2, 700, 700).outcome == COMPLETE
        found = coverage(client)
        assert [(c.epoch, c.complete) for c in found] == [(0, True), (3, True)]
        assert found[0].digest == whole(SAMPLES).to_bytes()


class Reader:
    """A worker that reads its lanes by the order that the real loader uses."""

    def __init__(self, worker: RawWorker) -> None:
        self.worker = worker
        self.done = False
        self._digest = Digest(SAMPLES)
        self._segments: list[pb.EpochSegment] = []
        self._claimed = 0
        self._read_from = 0
        """The segment it reads in, and how far it is there."""
        self._position = 0

    def go_on(self, rng: random.Random) -> None:
        """Do one thing: claim, or read and commit."""
        if self._pending() and rng.random() < 0.6:
            self._read(rng.randint(1, 90))
            return
        length = len(self._lane(len(self._segments))) if self._segments else 0
        if self._segments and self._claimed == length:
            self._read(SAMPLES)
        upto = min(self._claimed + 60, length)
        reply = claim(self.worker, len(self._segments), upto, length)
        self.done = reply.outcome == COMPLETE
        if reply.outcome == GRANTED:
            self._claimed = upto
        elif reply.outcome == MOVED:
            self._read_from = self._read_from or len(reply.segments)
            self._segments, self._claimed = list(reply.segments), reply.claimed

    def _lane(self, number: int) -> Any:
        segments = [
            Segment(
                s.slot_count,
                tuple(s.dead_slots),
                tuple(s.taken),
                tuple(s.weights),
                tuple(TakenBack(b.segment, b.slot, b.start, b.stop) for b in s.taken_back),
            )
            for s in self._segments[:number]
        ]
        starts = np.arange(0, SAMPLES + 1, SHARD)
        order = AffinityOrder(SlotTable(len(starts) - 1), starts, Shuffle(seed=3))
        return order.lanes(segments[:-1], segments[-1])[self.worker.rank]

    def _pending(self) -> bool:
        while self._read_from < len(self._segments):
            if self._position < self._segments[self._read_from - 1].taken[self.worker.rank]:
                return True
            self._read_from, self._position = self._read_from + 1, 0
        return self._position < self._claimed

    def _read(self, count: int) -> None:
        while count and self._pending():
            limit = self._claimed
            if self._read_from < len(self._segments):
                limit = self._segments[self._read_from - 1].taken[self.worker.rank]
            stop = min(limit, self._position + count)
            lane = self._lane(self._read_from)
            for window in lane.between(self._position, stop):
                self._digest.add(window.numbers())
            count -= stop - self._position
            self._position = stop
        commit(self.worker, self._read_from, self._position, self._digest.to_bytes())


def test_every_sample_is_consumed_once_whoever_dies(
    start_coordinator: Callable[..., LocalCoordinator],
) -> None:
    coordinator = start_coordinator(heartbeat_timeout_ms=60_000)
    rng = random.Random(7)
    with RawClient(coordinator.url) as client:
        register_dataset(client)
        readers = [Reader(client.register(rank=rank, world_size=4)) for rank in range(4)]
        for step in range(2000):
            if step % 40 == 25:
                coordinator.kill()
                coordinator.start()
            if step in (12, 30, 31, 60):
                lost = rng.choice(readers)
                lost.worker.leave()
                readers.remove(lost)
            if step in (20, 70):
                readers.append(Reader(client.register(world_size=4)))
            if step == 50:
                client.call("RebalanceEpoch", **DATASET, weights={readers[0].worker.rank: 30})
            rng.choice(readers).go_on(rng)
            if all(reader.done for reader in readers):
                break
        (found,) = coverage(client)
        assert (found.complete, found.segments > 5) == (True, True)
        assert found.digest == whole(SAMPLES).to_bytes()
