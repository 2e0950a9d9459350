"""Requests from the wire: every field checked, then turned into commands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..coordinator.state import Refused
from ..coordinator.state import commands as c
from ..coordinator.state.datasets import ORDERS
from ..coordinator.state.records import LayoutRecord, pack
from ..types import (
    DEFAULT_JOB,
    FORMATS,
    LONGEST_WAIT_SECONDS,
    REPORTED_AT_ONCE,
    VALUE_BYTES,
    check_id,
)
from .gen import coordinator_pb2 as pb
from .messages import CONDITIONS, STATES

METADATA_ENTRIES = 64
METADATA_KEY = 128
METADATA_VALUE = 4096
HEARTBEAT_BYTES = 16 * 1024
PATH_LENGTH = 4096
TEXT_LENGTH = 512
DETAIL_LENGTH = 2048
MAX_COUNT = 2**63 - 1
MAX_PREVIOUS = 2**53
"""Above it there is room for all that will ever be counted."""
PROCESSES_CUT = 1024


def refuse(message: str) -> Refused:
    """A refusal for a field that is wrong."""
    return Refused("invalid", message)


def identifier(kind: str, value: str) -> str:
    """A checked identifier."""
    try:
        return check_id(kind, value)
    except ValueError as exc:
        raise refuse(str(exc)) from None


def job_name(value: str) -> str:
    """A checked job; empty means the default one."""
    return identifier("job", value) if value else DEFAULT_JOB


def register(request: pb.WorkerInfo, max_workers: int, *, returns: bool = False) -> c.Register:
    """A registration, maybe of a worker that ``returns`` from a state that was lost."""
    rank = request.rank if request.HasField("rank") else None
    if rank is not None and rank >= max_workers:
        raise refuse(f"rank {rank} is too large: a job has at most {max_workers} workers")
    if request.world_size > max_workers:
        raise refuse(f"world_size {request.world_size} is more than {max_workers}")
    if request.port > 65535:
        raise refuse(f"port {request.port} is more than 65535")
    command = c.Register(
        job=job_name(request.job),
        worker_id=identifier("worker id", request.worker_id) if request.worker_id else "",
        session=identifier("session", request.session) if request.session else "",
        rank=rank,
        world_size=request.world_size,
        attempt=request.attempt,
        hostname=_text("hostname", request.hostname),
        port=request.port,
        process=_text("process", request.process),
        gpu_count=_at_most("gpu_count", request.gpu_count, 1024),
        memory_bytes=_at_most("memory_bytes", request.memory_bytes, MAX_COUNT),
        metadata=_metadata(request.metadata),
        machine=machine(request.machine) if request.machine else "",
        pid=_at_most("pid", request.pid, MAX_COUNT),
        process_started=_at_most("process_started", request.process_started, MAX_COUNT),
    )
    if not returns:
        return command
    names = ("previous_incarnation", "previous_generation", "previous_attempts")
    known = {name: _at_most(name, getattr(request, name), MAX_PREVIOUS) for name in names}
    return msgspec.structs.replace(command, **known)


def machine(value: str) -> str:
    """A checked name of a machine."""
    return identifier("machine", value)


def report_ended(request: pb.EndedProcesses) -> c.ReportEnded:
    """Processes that are gone."""
    if len(request.incarnations) > PROCESSES_CUT:
        raise refuse(f"report at most {PROCESSES_CUT} processes at once")
    return c.ReportEnded(
        job=job_name(request.job),
        machine=machine(request.machine),
        incarnations=tuple(request.incarnations),
    )


def remove_job(request: pb.RemoveJobRequest) -> c.RemoveJob:
    """A job to be forgotten; none is by default."""
    return c.RemoveJob(identifier("job", request.job), request.force)


def remove_dataset(request: pb.RemoveDatasetRequest) -> c.RemoveDataset:
    """A dataset to be forgotten."""
    return c.RemoveDataset(
        job_name(request.job), identifier("dataset", request.dataset_id), request.force
    )


def heartbeat(request: pb.HeartbeatRequest) -> c.Heartbeat:
    """A heartbeat. The ids need no check: an unknown one is refused by the machine."""
    state = STATES.get(request.state)
    if state is None:
        raise refuse(f"worker state {request.state} is unknown")
    report = request.SerializeToString()
    if len(report) > HEARTBEAT_BYTES:
        raise refuse(
            f"a heartbeat has {len(report)} bytes, more than {HEARTBEAT_BYTES}: report less"
        )
    step = request.step if request.HasField("step") else None
    if max(request.epoch, request.samples, step or 0) > MAX_COUNT:
        raise refuse("step, epoch and samples must be below 2**63")
    if not 0 <= request.step_seconds < math.inf:
        raise refuse(f"step_seconds must be a time, not {request.step_seconds}")
    return c.Heartbeat(
        request.job or DEFAULT_JOB,
        request.worker_id,
        request.incarnation,
        state,
        step,
        request.epoch,
        report,
        request.step_seconds,
        request.samples,
    )


def deregister(request: pb.DeregisterRequest) -> c.Deregister:
    """A goodbye."""
    return c.Deregister(
        job=job_name(request.job),
        worker_id=identifier("worker id", request.worker_id),
        incarnation=_incarnation(request.incarnation),
        reason=_text("reason", request.reason),
    )


def arrive(request: pb.BarrierRequest, call: int) -> c.Arrive:
    """An arrival at a barrier."""
    return c.Arrive(
        request.job or DEFAULT_JOB,
        request.worker_id,
        _incarnation(request.incarnation),
        identifier("barrier", request.barrier_id),
        call,
        _seconds(request.timeout_ms),
        request.generation,
        request.ticket,
        _payload(request.payload) if request.HasField("payload") else None,
        _ranks(request.ranks),
    )


def request_action(request: pb.ActionRequest) -> c.RequestAction:
    """Something asked of a job."""
    return c.RequestAction(
        job=job_name(request.job),
        kind=request.kind,
        worker_id=identifier("worker id", request.worker_id) if request.worker_id else "",
        reason=_text("reason", request.reason),
        requested_by=request.requested_by,
        incarnation=_incarnation(request.incarnation) if request.requested_by else 0,
    )


def complete_action(request: pb.ActionCompletion) -> c.CompleteAction:
    """Something that is done."""
    return c.CompleteAction(
        job=job_name(request.job),
        action_id=identifier("action", request.action_id),
        outcome=_text("outcome", request.outcome),
        completed_by=request.completed_by,
        incarnation=_incarnation(request.incarnation) if request.completed_by else 0,
    )


def register_dataset(request: pb.DatasetInfo) -> c.RegisterDataset:
    """A dataset."""
    if not request.total_samples:
        raise refuse(f"dataset {request.dataset_id!r} has no samples: total_samples must be given")
    if not request.shard_size:
        raise refuse(f"dataset {request.dataset_id!r}: shard_size must be at least 1")
    if request.format and request.format not in FORMATS:
        raise refuse(
            f"dataset {request.dataset_id!r}: format {request.format[:40]!r} is unknown; "
            "use parquet, csv or tfrecord"
        )
    return c.RegisterDataset(
        job=job_name(request.job),
        dataset_id=identifier("dataset", request.dataset_id),
        total_samples=_at_most("total_samples", request.total_samples, MAX_COUNT),
        shard_size=request.shard_size,
        path=_text("path", request.path, PATH_LENGTH),
        format=request.format,
        shuffle=request.shuffle,
        seed=request.seed,
        metadata=_metadata(request.metadata),
        exact=request.exact,
        layout=_layout(request),
        index=request.index,
    )


def begin_checkpoint(request: pb.BeginCheckpointRequest) -> c.BeginCheckpoint:
    """The beginning of a save by all ranks."""
    if not request.ticket:
        raise refuse(
            "the ticket is missing: number this worker's saves from 1, and repeat it in retries"
        )
    return c.BeginCheckpoint(
        job=job_name(request.job),
        worker_id=identifier("worker id", request.worker_id),
        incarnation=_incarnation(request.incarnation),
        step=_at_most("step", request.step, MAX_COUNT),
        ticket=_at_most("ticket", request.ticket, MAX_COUNT),
        ranks=_ranks(request.ranks),
    )


def abandon_checkpoints(request: pb.AbandonRequest) -> c.AbandonCheckpoints:
    """A worker that will not send its part of anything that is being saved."""
    return c.AbandonCheckpoints(
        job=job_name(request.job),
        worker_id=identifier("worker id", request.worker_id),
        incarnation=_incarnation(request.incarnation),
    )


def notify_checkpoint(request: pb.CheckpointInfo, call: int) -> c.NotifyCheckpoint:
    """A checkpoint, or a part of one."""
    return c.NotifyCheckpoint(
        job=job_name(request.job),
        worker_id=identifier("worker id", request.worker_id),
        incarnation=_incarnation(request.incarnation),
        checkpoint_id=identifier("checkpoint", request.checkpoint_id),
        step=_at_most("step", request.step, MAX_COUNT),
        epoch=_at_most("epoch", request.epoch, MAX_COUNT),
        path=_text("path", request.path, PATH_LENGTH),
        size_bytes=_at_most("size_bytes", request.size_bytes, MAX_COUNT),
        is_full=request.is_full,
        generation=request.generation,
        partial=request.partial,
        call=call,
        timeout=_seconds(request.timeout_ms),
        metadata=_metadata(request.metadata),
    )


def report_checkpoints(request: pb.CheckpointReport) -> c.ReportCheckpoints:
    """What became of committed checkpoints."""
    condition = CONDITIONS.get(request.condition)
    if condition is None:
        raise refuse(f"checkpoint condition {request.condition} is unknown")
    if len(request.checkpoint_ids) > REPORTED_AT_ONCE:
        raise refuse(f"at most {REPORTED_AT_ONCE} checkpoints can be reported on at once")
    return c.ReportCheckpoints(
        job=job_name(request.job),
        condition=condition,
        checkpoint_ids=tuple(identifier("checkpoint", key) for key in request.checkpoint_ids),
        path=_text("path", request.path, PATH_LENGTH),
        detail=_text("detail", request.detail, DETAIL_LENGTH),
        reported_by=request.reported_by,
        incarnation=_incarnation(request.incarnation) if request.reported_by else 0,
    )


def claim(request: pb.ClaimRequest, call: int) -> c.Claim:
    """A claim of samples."""
    return c.Claim(
        job=request.job or DEFAULT_JOB,
        worker_id=request.worker_id,
        incarnation=_incarnation(request.incarnation),
        dataset_id=identifier("dataset", request.dataset_id),
        epoch=_at_most("epoch", request.epoch, MAX_COUNT),
        plan=_text("plan", request.plan),
        segment=request.segment,
        upto=request.upto,
        length=_at_most("length", request.length, MAX_COUNT),
        call=call,
        timeout=_seconds(request.timeout_ms),
        known=request.known,
        commit_segment=request.commit_segment,
        commit_position=request.commit_position,
        commit_digest=request.commit_digest,
    )


def commit(request: pb.CommitRequest) -> c.Commit:
    """A commit of samples."""
    return c.Commit(
        job=request.job or DEFAULT_JOB,
        worker_id=request.worker_id,
        incarnation=_incarnation(request.incarnation),
        dataset_id=identifier("dataset", request.dataset_id),
        epoch=_at_most("epoch", request.epoch, MAX_COUNT),
        segment=request.segment,
        position=request.position,
        digest=request.digest,
    )


def rebalance(request: pb.RebalanceRequest) -> c.Rebalance:
    """A wish for other shares."""
    for rank, weight in request.weights.items():
        _at_most(f"the weight of rank {rank}", weight, 100)
    return c.Rebalance(
        job=job_name(request.job),
        dataset_id=identifier("dataset", request.dataset_id),
        epoch=_at_most("epoch", request.epoch, MAX_COUNT),
        weights=dict(request.weights),
    )


def report_coverage(request: pb.CoverageReport) -> c.ReportCoverage:
    """What a worker consumed."""
    return c.ReportCoverage(
        job=request.job or DEFAULT_JOB,
        worker_id=request.worker_id,
        incarnation=_incarnation(request.incarnation),
        dataset_id=identifier("dataset", request.dataset_id),
        epoch=_at_most("epoch", request.epoch, MAX_COUNT),
        base=request.base,
        digest=request.digest,
        world_size=request.world_size,
        assumed=request.assumed,
        dropped=request.dropped,
        expected=request.expected,
        generation=_at_most("generation", request.generation, MAX_COUNT),
        loads=request.loads,
        ended=request.ended,
        order=order(request.order),
    )


def order(told: str) -> str:
    """The order in which a worker reads; empty: one that is not known here."""
    return told if told in ORDERS else ""


def _incarnation(value: int) -> int:
    if not value:
        raise refuse("the incarnation is missing: send the one that RegisterWorker returned")
    return value


def _payload(value: bytes) -> bytes:
    if len(value) > VALUE_BYTES:
        raise refuse(
            f"a value of {len(value)} bytes cannot be handed round: at most {VALUE_BYTES} bytes; "
            "put it into the storage that all workers share, and hand round its name"
        )
    return value


def _seconds(milliseconds: int) -> float:
    return min(milliseconds / 1000, LONGEST_WAIT_SECONDS)


def _at_most(name: str, value: int, limit: int) -> int:
    if value > limit:
        raise refuse(f"{name} {value} is more than {limit}")
    return value


def _text(name: str, value: str, limit: int = TEXT_LENGTH) -> str:
    if len(value) > limit:
        raise refuse(f"{name} has {len(value)} characters, more than {limit}")
    if not value.isprintable():
        raise refuse(f"{name} {value[:40]!r} contains characters that cannot be printed")
    return value


def _metadata(pairs: Mapping[str, str]) -> dict[str, str]:
    if len(pairs) > METADATA_ENTRIES:
        raise refuse(f"{len(pairs)} metadata entries are more than {METADATA_ENTRIES}")
    for key, value in pairs.items():
        if not key or len(key) > METADATA_KEY or len(value) > METADATA_VALUE:
            raise refuse(
                f"metadata {key[:40]!r}: keys have 1 to {METADATA_KEY} characters, values up to "
                f"{METADATA_VALUE}"
            )
    return dict(pairs)


def _ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks))) if ranks else ()


INDEX_BYTES = 16 * 2**20
SHARDS = 10_000_000
FILES = 1_000_000
COLUMNS = 10_000
NAME_LENGTH = 4096
FINGERPRINT_LENGTH = 128
OPTIONS_LENGTH = 256 * 1024


def _layout(request: pb.DatasetInfo) -> LayoutRecord | None:
    """The layout of a dataset, if the request has one; every field is checked."""
    layout = request.layout
    if not request.HasField("layout"):
        if request.index:
            raise _refuse_layout(request, "an index is of use only together with a layout")
        return None
    if not request.path or not request.format:
        raise _refuse_layout(request, "a layout needs path and format of the files")
    if len(request.index) > INDEX_BYTES:
        raise _refuse_layout(
            request,
            f"the index has {len(request.index)} bytes, more than {INDEX_BYTES}: register without "
            "it, and workers make their own",
        )
    samples = _shard_samples(request)
    return LayoutRecord(
        fingerprint=_layout_text(
            request, "fingerprint", layout.fingerprint, FINGERPRINT_LENGTH, least=1
        ),
        shard_count=len(samples),
        shard_samples=pack(samples),
        shard_bytes=pack(_shard_bytes(request)),
        root=_layout_text(request, "root", layout.root, NAME_LENGTH),
        files=_files(request),
        file_samples=pack(_file_samples(request)),
        total_bytes=_count(request, "total_bytes", layout.total_bytes),
        columns=_columns(request),
        options=_layout_text(request, "options", layout.options, OPTIONS_LENGTH),
    )


def _shard_samples(request: pb.DatasetInfo) -> NDArray[np.uint64]:
    counts = _numbers(request.layout.shard_samples)
    _check_length(request, "shard_samples", len(counts), SHARDS)
    if not counts.all():
        number = int(np.flatnonzero(counts == 0)[0])
        raise _refuse_layout(request, f"shard {number} has no samples")
    _check_sum(request, "shard_samples", counts)
    if request.exact:
        _check_exact(request, counts)
    return counts


def _check_exact(request: pb.DatasetInfo, counts: NDArray[np.uint64]) -> None:
    size = request.shard_size
    wrong = np.flatnonzero(counts[:-1] != size)
    number = int(wrong[0]) if wrong.size else len(counts) - 1
    if wrong.size or counts[-1] > size:
        raise _refuse_layout(
            request, f"shard {number} has {counts[number]} samples and not exactly {size}"
        )


def _shard_bytes(request: pb.DatasetInfo) -> NDArray[np.uint64]:
    sizes = _numbers(request.layout.shard_bytes)
    if len(sizes) != len(request.layout.shard_samples):
        raise _refuse_layout(
            request,
            f"shard_bytes has {len(sizes)} entries for {len(request.layout.shard_samples)} shards",
        )
    if _sum(sizes) is None:
        raise _refuse_layout(request, "shard_bytes together are 2**63 or more")
    return sizes


def _files(request: pb.DatasetInfo) -> tuple[str, ...]:
    layout = request.layout
    names = tuple(layout.files)
    _check_length(request, "files", len(names), FILES)
    for name in names:
        _layout_text(request, "file name", name, NAME_LENGTH - len(layout.root), least=1)
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise _refuse_layout(request, f"file {twice[:80]!r} is listed twice")
    return names


def _file_samples(request: pb.DatasetInfo) -> NDArray[np.uint64]:
    counts = _numbers(request.layout.file_samples)
    if len(counts) != len(request.layout.files):
        raise _refuse_layout(
            request, f"file_samples has {len(counts)} entries for {len(request.layout.files)} files"
        )
    _check_sum(request, "file_samples", counts)
    return counts


def _columns(request: pb.DatasetInfo) -> tuple[str, ...]:
    columns = tuple(request.layout.columns)
    if len(columns) > COLUMNS:
        raise _refuse_layout(request, f"{len(columns)} columns are more than {COLUMNS}")
    return tuple(_layout_text(request, "column", column, NAME_LENGTH) for column in columns)


def _numbers(values: Iterable[int]) -> NDArray[np.uint64]:
    return np.fromiter(values, np.uint64)


def _check_length(request: pb.DatasetInfo, name: str, length: int, limit: int) -> None:
    if not 1 <= length <= limit:
        raise _refuse_layout(request, f"{name} must have 1 to {limit} entries, not {length}")


def _check_sum(request: pb.DatasetInfo, name: str, counts: NDArray[np.uint64]) -> None:
    total = _sum(counts)
    if total != request.total_samples:
        shown = "2**63 or more" if total is None else total
        raise _refuse_layout(
            request, f"{name} add up to {shown} and not to total_samples, {request.total_samples}"
        )


def _sum(counts: NDArray[np.uint64]) -> int | None:
    """The sum; none when it is 2**63 or more, where machine numbers would wrap around."""
    if counts.max(initial=np.uint64(0)) > MAX_COUNT:
        return None
    running = np.cumsum(counts, dtype=np.uint64)
    if (running[1:] < running[:-1]).any() or running[-1] > MAX_COUNT:
        return None
    return int(running[-1])


def _count(request: pb.DatasetInfo, name: str, value: int) -> int:
    if value > MAX_COUNT:
        raise _refuse_layout(request, f"{name} {value} is more than {MAX_COUNT}")
    return value


def _layout_text(request: pb.DatasetInfo, name: str, value: str, most: int, least: int = 0) -> str:
    if not least <= len(value) <= most:
        raise _refuse_layout(
            request, f"{name} must have {least} to {most} characters, not {len(value)}"
        )
    if not value.isprintable():
        raise _refuse_layout(
            request, f"{name} {value[:80]!r} contains characters that cannot be printed"
        )
    return value


def _refuse_layout(request: Any, message: str) -> Refused:
    return Refused("invalid", f"dataset {request.dataset_id[:80]!r}: {message}")
