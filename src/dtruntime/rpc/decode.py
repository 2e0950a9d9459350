"""Requests to commands, with every field checked.

Fields are copied by name, each through the check that `_CHECKS` has for it. A reader of a method
whose fields differ overrides these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
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

C = TypeVar("C", bound=c.Command)
Check = Callable[[str, Any], Any]

METADATA_ENTRIES = 64
METADATA_KEY = 128
METADATA_VALUE = 4096
HEARTBEAT_BYTES = 16 * 1024
PATH_LENGTH = 4096
TEXT_LENGTH = 512
DETAIL_LENGTH = 2048
MAX_COUNT = 2**63 - 1
MAX_PREVIOUS = 2**53
"""Leaves room for everything that will ever be counted."""
PROCESSES_CUT = 1024
INDEX_BYTES = 16 * 2**20
SHARDS = 10_000_000
FILES = 1_000_000
COLUMNS = 10_000
NAME_LENGTH = 4096
FINGERPRINT_LENGTH = 128
OPTIONS_LENGTH = 256 * 1024

# Checks of single fields


def refuse(message: str) -> Refused:
    """The refusal for an invalid field."""
    return Refused("invalid", message)


def identifier(kind: str, value: str) -> str:
    """A checked identifier; ``kind`` may be the name of its field."""
    try:
        return check_id(_KINDS.get(kind, kind), value)
    except ValueError as exc:
        raise refuse(str(exc)) from None


_KINDS = {
    "worker_id": "worker id",
    "dataset_id": "dataset",
    "checkpoint_id": "checkpoint",
    "barrier_id": "barrier",
    "action_id": "action",
}


def job_name(value: str) -> str:
    """A checked job; empty means the default one."""
    return identifier("job", value) if value else DEFAULT_JOB


def order(value: str) -> str:
    """The order in which a worker reads; empty if it is unknown here."""
    return value if value in ORDERS else ""


def _optional(name: str, value: str) -> str:
    return identifier(name, value) if value else ""


def _incarnation(_: str, value: int) -> int:
    if not value:
        raise refuse("the incarnation is missing: send the one that RegisterWorker returned")
    return value


def _count(name: str, value: int, limit: int = MAX_COUNT) -> int:
    if value > limit:
        raise refuse(f"{name} {value} is more than {limit}")
    return value


def _text(name: str, value: str, limit: int = TEXT_LENGTH) -> str:
    if len(value) > limit:
        raise refuse(f"{name} has {len(value)} characters, more than {limit}")
    if not value.isprintable():
        raise refuse(f"{name} {value[:40]!r} contains characters that cannot be printed")
    return value


def _metadata(_: str, pairs: Mapping[str, str]) -> dict[str, str]:
    if len(pairs) > METADATA_ENTRIES:
        raise refuse(f"{len(pairs)} metadata entries are more than {METADATA_ENTRIES}")
    for key, value in pairs.items():
        if not key or len(key) > METADATA_KEY or len(value) > METADATA_VALUE:
            raise refuse(
                f"metadata {key[:40]!r}: keys have 1 to {METADATA_KEY} characters, values up to "
                f"{METADATA_VALUE}"
            )
    return dict(pairs)


def _payload(value: bytes) -> bytes:
    if len(value) > VALUE_BYTES:
        raise refuse(
            f"a value of {len(value)} bytes is too large for a barrier: at most {VALUE_BYTES} "
            "bytes; put it into shared storage, and exchange its name"
        )
    return value


def _seconds(milliseconds: int) -> float:
    return min(milliseconds / 1000, LONGEST_WAIT_SECONDS)


def _ranks(_: str, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks))) if ranks else ()


def _checkpoint_ids(_: str, keys: Sequence[str]) -> tuple[str, ...]:
    if len(keys) > REPORTED_AT_ONCE:
        raise refuse(f"at most {REPORTED_AT_ONCE} checkpoints can be reported on at once")
    return tuple(identifier("checkpoint", key) for key in keys)


def _condition(_: str, code: int) -> Any:
    if code not in CONDITIONS:
        raise refuse(f"checkpoint condition {code} is unknown")
    return CONDITIONS[code]


def _incarnations(_: str, values: Sequence[int]) -> tuple[int, ...]:
    if len(values) > PROCESSES_CUT:
        raise refuse(f"report at most {PROCESSES_CUT} processes at once")
    return tuple(values)


def _weights(_: str, weights: Mapping[int, int]) -> dict[int, int]:
    for rank, weight in weights.items():
        _count(f"the weight of rank {rank}", weight, 100)
    return dict(weights)


def _as_is(_: str, value: Any) -> Any:
    return value


_CHECKS: dict[str, Check] = {
    "job": lambda _, value: job_name(value),
    **dict.fromkeys((*_KINDS, "machine"), identifier),
    "session": _optional,
    "incarnation": _incarnation,
    "incarnations": _incarnations,
    **dict.fromkeys(
        ("step", "epoch", "size_bytes", "memory_bytes", "total_samples", "length", "ticket"), _count
    ),
    **dict.fromkeys(("pid", "process_started"), _count),
    "gpu_count": partial(_count, limit=1024),
    **dict.fromkeys(("hostname", "process", "reason", "outcome", "plan"), _text),
    "path": partial(_text, limit=PATH_LENGTH),
    "detail": partial(_text, limit=DETAIL_LENGTH),
    "metadata": _metadata,
    "ranks": _ranks,
    "condition": _condition,
    "checkpoint_ids": _checkpoint_ids,
    "weights": _weights,
    "order": lambda _, value: order(value),
}
"""The checks by field name; other fields are taken as they are."""
_UNCHECKED: dict[str, Check] = {
    "job": lambda _, value: value or DEFAULT_JOB,
    "worker_id": _as_is,
}
"""Overrides for calls in which the machine refuses unknown members anyway."""


def _reader(kind: type[C], message: type[Message], **checks: Check) -> Callable[..., C]:
    """A function that reads a command from a message; its keywords are the other fields."""
    known = message.DESCRIPTOR.fields_by_name
    names = [name for name in kind.__struct_fields__ if name in known]
    table = [(name, checks.get(name, _CHECKS.get(name, _as_is))) for name in names]

    def read(request: Any, **more: Any) -> C:
        for name, check in table:
            if name not in more:
                more[name] = check(name, getattr(request, name))
        return kind(**more)

    return read


def _from_anybody(kind: type[C], message: type[Message], by: str, **checks: Check) -> Any:
    """The same for calls of anybody; if ``by`` names a member, the incarnation is required."""
    read = _reader(kind, message, **checks)

    def read_checked(request: Any) -> C:
        member = getattr(request, by)
        return read(request, incarnation=_incarnation("", request.incarnation) if member else 0)

    return read_checked


# Readers


deregister = _reader(c.Deregister, pb.DeregisterRequest)
report_ended = _reader(c.ReportEnded, pb.EndedProcesses)
remove_job = _reader(c.RemoveJob, pb.RemoveJobRequest, job=identifier)
remove_dataset = _reader(c.RemoveDataset, pb.RemoveDatasetRequest)
abandon_checkpoints = _reader(c.AbandonCheckpoints, pb.AbandonRequest)
commit = _reader(c.Commit, pb.CommitRequest, **_UNCHECKED)
rebalance = _reader(c.Rebalance, pb.RebalanceRequest)
report_coverage = _reader(c.ReportCoverage, pb.CoverageReport, generation=_count, **_UNCHECKED)
request_action = _from_anybody(
    c.RequestAction, pb.ActionRequest, "requested_by", worker_id=_optional
)
complete_action = _from_anybody(c.CompleteAction, pb.ActionCompletion, "completed_by")
report_checkpoints = _from_anybody(c.ReportCheckpoints, pb.CheckpointReport, "reported_by")

_register = _reader(c.Register, pb.WorkerInfo, worker_id=_optional, machine=_optional)
_claim = _reader(c.Claim, pb.ClaimRequest, **_UNCHECKED)
_begin_checkpoint = _reader(c.BeginCheckpoint, pb.BeginCheckpointRequest)
_notify_checkpoint = _reader(c.NotifyCheckpoint, pb.CheckpointInfo)
_register_dataset = _reader(c.RegisterDataset, pb.DatasetInfo)
_PREVIOUS = ("previous_incarnation", "previous_generation", "previous_attempts")


def register(request: pb.WorkerInfo, max_workers: int, *, returns: bool = False) -> c.Register:
    """A registration, possibly of a worker that ``returns`` from a lost state."""
    rank = request.rank if request.HasField("rank") else None
    if rank is not None and rank >= max_workers:
        raise refuse(f"rank {rank} is too large: a job has at most {max_workers} workers")
    _count("world_size", request.world_size, max_workers)
    _count("port", request.port, 65535)
    previous = {
        name: _count(name, getattr(request, name), MAX_PREVIOUS) if returns else 0
        for name in _PREVIOUS
    }
    return _register(request, rank=rank, **previous)


def heartbeat(request: pb.HeartbeatRequest) -> c.Heartbeat:
    """A heartbeat. The machine refuses unknown ids, so they are not checked here."""
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


def arrive(request: pb.BarrierRequest, call: int) -> c.Arrive:
    """An arrival at a barrier."""
    return c.Arrive(
        request.job or DEFAULT_JOB,
        request.worker_id,
        _incarnation("", request.incarnation),
        identifier("barrier", request.barrier_id),
        call,
        _seconds(request.timeout_ms),
        request.generation,
        request.ticket,
        _payload(request.payload) if request.HasField("payload") else None,
        _ranks("", request.ranks),
    )


def claim(request: pb.ClaimRequest, call: int) -> c.Claim:
    """A claim of samples."""
    return _claim(request, call=call, timeout=_seconds(request.timeout_ms))


def notify_checkpoint(request: pb.CheckpointInfo, call: int) -> c.NotifyCheckpoint:
    """A checkpoint, or a part of one."""
    return _notify_checkpoint(request, call=call, timeout=_seconds(request.timeout_ms))


def begin_checkpoint(request: pb.BeginCheckpointRequest) -> c.BeginCheckpoint:
    """The beginning of a save by all ranks."""
    if not request.ticket:
        raise refuse(
            "the ticket is missing: number this worker's saves from 1, and repeat it in retries"
        )
    return _begin_checkpoint(request)


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
    return _register_dataset(request, layout=_layout(request))


# The layout of a dataset


def _layout(request: pb.DatasetInfo) -> LayoutRecord | None:
    """The layout of a dataset, if the request has one."""
    try:
        return _checked_layout(request)
    except Refused as exc:
        raise refuse(f"dataset {request.dataset_id[:80]!r}: {exc}") from None


def _checked_layout(request: pb.DatasetInfo) -> LayoutRecord | None:
    layout = request.layout
    if not request.HasField("layout"):
        if request.index:
            raise refuse("an index is useful only together with a layout")
        return None
    if not request.path or not request.format:
        raise refuse("a layout needs path and format of the files")
    if len(request.index) > INDEX_BYTES:
        raise refuse(
            f"the index has {len(request.index)} bytes, more than {INDEX_BYTES}: register without "
            "it, and workers make their own"
        )
    samples = _shard_samples(request)
    return LayoutRecord(
        fingerprint=_sized("fingerprint", layout.fingerprint, FINGERPRINT_LENGTH, least=1),
        shard_count=len(samples),
        shard_samples=pack(samples),
        shard_bytes=pack(_shard_bytes(layout)),
        root=_sized("root", layout.root, NAME_LENGTH),
        files=_files(layout),
        file_samples=pack(_file_samples(request)),
        total_bytes=_count("total_bytes", layout.total_bytes),
        columns=_columns(layout),
        options=_sized("options", layout.options, OPTIONS_LENGTH),
    )


def _shard_samples(request: pb.DatasetInfo) -> NDArray[np.uint64]:
    counts = np.fromiter(request.layout.shard_samples, np.uint64)
    _check_length("shard_samples", len(counts), SHARDS)
    if not counts.all():
        raise refuse(f"shard {int(np.flatnonzero(counts == 0)[0])} has no samples")
    _check_sum("shard_samples", counts, request.total_samples)
    if request.exact:
        _check_exact(counts, request.shard_size)
    return counts


def _check_exact(counts: NDArray[np.uint64], size: int) -> None:
    wrong = np.flatnonzero(counts[:-1] != size)
    number = int(wrong[0]) if wrong.size else len(counts) - 1
    if wrong.size or counts[-1] > size:
        raise refuse(f"shard {number} has {counts[number]} samples and not exactly {size}")


def _shard_bytes(layout: pb.DatasetLayout) -> NDArray[np.uint64]:
    sizes, shards = np.fromiter(layout.shard_bytes, np.uint64), len(layout.shard_samples)
    if len(sizes) != shards:
        raise refuse(f"shard_bytes has {len(sizes)} entries for {shards} shards")
    if _sum(sizes) is None:
        raise refuse("shard_bytes together are 2**63 or more")
    return sizes


def _files(layout: pb.DatasetLayout) -> tuple[str, ...]:
    names = tuple(layout.files)
    _check_length("files", len(names), FILES)
    for name in names:
        _sized("file name", name, NAME_LENGTH - len(layout.root), least=1)
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise refuse(f"file {twice[:80]!r} is listed twice")
    return names


def _file_samples(request: pb.DatasetInfo) -> NDArray[np.uint64]:
    counts, files = np.fromiter(request.layout.file_samples, np.uint64), len(request.layout.files)
    if len(counts) != files:
        raise refuse(f"file_samples has {len(counts)} entries for {files} files")
    _check_sum("file_samples", counts, request.total_samples)
    return counts


def _columns(layout: pb.DatasetLayout) -> tuple[str, ...]:
    if len(layout.columns) > COLUMNS:
        raise refuse(f"{len(layout.columns)} columns are more than {COLUMNS}")
    return tuple(_sized("column", column, NAME_LENGTH) for column in layout.columns)


def _check_length(name: str, length: int, limit: int) -> None:
    if not 1 <= length <= limit:
        raise refuse(f"{name} must have 1 to {limit} entries, not {length}")


def _check_sum(name: str, counts: NDArray[np.uint64], samples: int) -> None:
    total = _sum(counts)
    if total != samples:
        shown = "2**63 or more" if total is None else total
        raise refuse(f"{name} add up to {shown} and not to total_samples, {samples}")


def _sum(counts: NDArray[np.uint64]) -> int | None:
    """The sum; None if it is 2**63 or more."""
    if counts.max(initial=np.uint64(0)) > MAX_COUNT:
        return None
    running = np.cumsum(counts, dtype=np.uint64)
    if (running[1:] < running[:-1]).any() or running[-1] > MAX_COUNT:
        return None
    return int(running[-1])


def _sized(name: str, value: str, most: int, least: int = 0) -> str:
    if not least <= len(value) <= most:
        raise refuse(f"{name} must have {least} to {most} characters, not {len(value)}")
    return _text(name, value, most)
