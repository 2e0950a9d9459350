"""Requests become commands; what the messages leave out gets its default."""

import pytest

from dtruntime.coordinator.state import Refused
from dtruntime.rpc import decode
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.types import DEFAULT_JOB, WorkerState


def test_empty_job_is_the_default_one() -> None:
    assert decode.register(pb.WorkerInfo(), 10).job == DEFAULT_JOB
    assert decode.heartbeat(pb.HeartbeatRequest()).job == DEFAULT_JOB
    assert decode.job_name("") == DEFAULT_JOB


def test_absent_rank_and_rank_zero_are_not_the_same() -> None:
    assert decode.register(pb.WorkerInfo(), 10).rank is None
    assert decode.register(pb.WorkerInfo(rank=0), 10).rank == 0
    assert decode.register(pb.WorkerInfo(rank=9), 10).rank == 9
    with pytest.raises(Refused, match="rank 10"):
        decode.register(pb.WorkerInfo(rank=10), 10)


def test_absent_step_and_step_zero_are_not_the_same() -> None:
    assert decode.heartbeat(pb.HeartbeatRequest()).step is None
    assert decode.heartbeat(pb.HeartbeatRequest(step=0)).step == 0


@pytest.mark.parametrize("state", WorkerState)
def test_every_state_is_understood(state: WorkerState) -> None:
    code = pb.WorkerState.Value(f"WORKER_STATE_{state.name}")
    assert decode.heartbeat(pb.HeartbeatRequest(state=code)).state == state  # type: ignore[arg-type]


def test_unspecified_state_is_idle_and_an_unknown_one_refused() -> None:
    assert decode.heartbeat(pb.HeartbeatRequest()).state == WorkerState.IDLE
    message = pb.HeartbeatRequest.FromString(b"\x20\x63")
    assert message.state == 99
    with pytest.raises(Refused, match="state 99"):
        decode.heartbeat(message)


def test_registration_keeps_every_field() -> None:
    command = decode.register(
        pb.WorkerInfo(
            worker_id="w",
            hostname="h",
            port=1,
            gpu_count=2,
            memory_bytes=3,
            metadata={"k": "v"},
            job="j",
            rank=4,
            world_size=5,
            session="s",
            process="p",
            attempt=6,
        ),
        10,
    )
    assert (command.worker_id, command.hostname, command.port) == ("w", "h", 1)
    assert (command.gpu_count, command.memory_bytes, command.metadata) == (2, 3, {"k": "v"})
    assert (command.job, command.rank, command.world_size) == ("j", 4, 5)
    assert (command.session, command.process, command.attempt) == ("s", "p", 6)


def test_arrival_keeps_every_field() -> None:
    command = decode.arrive(
        pb.BarrierRequest(
            barrier_id="b",
            worker_id="w",
            job="j",
            incarnation=1,
            generation=2,
            ticket=3,
            timeout_ms=4500,
        ),
        call=9,
    )
    assert (command.barrier_id, command.worker_id, command.job) == ("b", "w", "j")
    assert (command.incarnation, command.generation, command.ticket) == (1, 2, 3)
    assert (command.timeout, command.call) == (4.5, 9)


def test_checkpoint_keeps_every_field() -> None:
    command = decode.notify_checkpoint(
        pb.CheckpointInfo(
            checkpoint_id="c",
            worker_id="w",
            step=1,
            epoch=2,
            path="/p",
            size_bytes=3,
            is_full=True,
            metadata={"k": "v"},
            job="j",
            incarnation=4,
            generation=5,
            partial=True,
            timeout_ms=6000,
            committed_at=7.0,
            parts=8,
        ),
        call=9,
    )
    assert (command.checkpoint_id, command.worker_id, command.job) == ("c", "w", "j")
    assert (command.step, command.epoch, command.path, command.size_bytes) == (1, 2, "/p", 3)
    assert (command.is_full, command.partial, command.metadata) == (True, True, {"k": "v"})
    assert (command.incarnation, command.generation) == (4, 5)
    assert (command.timeout, command.call) == (6.0, 9)


def test_dataset_keeps_every_field() -> None:
    command = decode.register_dataset(
        pb.DatasetInfo(
            dataset_id="d",
            path="s3://b/p",
            format="parquet",
            total_samples=2**63 - 1,
            shard_size=2**32 - 1,
            shuffle=True,
            seed=2**64 - 1,
            metadata={"k": "v"},
            job="j",
        )
    )
    assert (command.dataset_id, command.path, command.format) == ("d", "s3://b/p", "parquet")
    assert (command.total_samples, command.shard_size) == (2**63 - 1, 2**32 - 1)
    assert (command.shuffle, command.seed, command.metadata) == (True, 2**64 - 1, {"k": "v"})


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(0, 0.0), (1, 0.001), (1500, 1.5), (2**64 - 1, 86400.0)]
)
def test_wait_is_cut_at_a_day(milliseconds: int, seconds: float) -> None:
    request = pb.BarrierRequest(barrier_id="b", incarnation=1, timeout_ms=milliseconds)
    assert decode.arrive(request, 1).timeout == seconds


def test_refusals_name_the_limit() -> None:
    with pytest.raises(Refused, match="world_size 11 is more than 10") as caught:
        decode.register(pb.WorkerInfo(world_size=11), 10)
    assert caught.value.reason == "invalid"
    assert caught.value.retry_after is None
