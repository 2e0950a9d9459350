"""The files and shards of a dataset: checked on their way in, written on their way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..coordinator.state import Refused
from ..coordinator.state.dataset_layouts import LayoutRecord, pack, unpack
from .gen import coordinator_pb2 as pb

INDEX_BYTES = 16 * 2**20
SHARDS = 10_000_000
FILES = 1_000_000
COLUMNS = 10_000
NAME_LENGTH = 4096
FINGERPRINT_LENGTH = 128
OPTIONS_LENGTH = 256 * 1024
MAX_COUNT = 2**63 - 1


def decode(request: pb.DatasetInfo) -> LayoutRecord | None:
    """The layout of a dataset, if the request has one; every field is checked."""
    layout = request.layout
    if not request.HasField("layout"):
        if request.index:
            raise _refuse(request, "an index is of use only together with a layout")
        return None
    if not request.path or not request.format:
        raise _refuse(request, "a layout needs path and format of the files")
    if len(request.index) > INDEX_BYTES:
        raise _refuse(
            request,
            f"the index has {len(request.index)} bytes, more than {INDEX_BYTES}: register without "
            "it, and workers make their own",
        )
    samples = _shard_samples(request)
    return LayoutRecord(
        fingerprint=_text(request, "fingerprint", layout.fingerprint, FINGERPRINT_LENGTH, least=1),
        shard_count=len(samples),
        shard_samples=pack(samples),
        shard_bytes=pack(_shard_bytes(request)),
        root=_text(request, "root", layout.root, NAME_LENGTH),
        files=_files(request),
        file_samples=pack(_file_samples(request)),
        total_bytes=_count(request, "total_bytes", layout.total_bytes),
        columns=_columns(request),
        options=_text(request, "options", layout.options, OPTIONS_LENGTH),
    )


def encode(record: LayoutRecord, full: bool) -> pb.DatasetLayout:
    """A layout for the wire; the lists of shards and files only when ``full``."""
    layout = pb.DatasetLayout(
        fingerprint=record.fingerprint,
        root=record.root,
        total_bytes=record.total_bytes,
        columns=record.columns,
        options=record.options,
    )
    if full:
        layout.shard_samples.extend(unpack(record.shard_samples, record.shard_count).tolist())
        layout.shard_bytes.extend(unpack(record.shard_bytes, record.shard_count).tolist())
        layout.files.extend(record.files)
        layout.file_samples.extend(unpack(record.file_samples, len(record.files)).tolist())
    return layout


def _shard_samples(request: pb.DatasetInfo) -> NDArray[np.uint64]:
    counts = _numbers(request.layout.shard_samples)
    _check_length(request, "shard_samples", len(counts), SHARDS)
    if not counts.all():
        number = int(np.flatnonzero(counts == 0)[0])
        raise _refuse(request, f"shard {number} has no samples")
    _check_sum(request, "shard_samples", counts)
    if request.exact:
        _check_exact(request, counts)
    return counts


def _check_exact(request: pb.DatasetInfo, counts: NDArray[np.uint64]) -> None:
    size = request.shard_size
    wrong = np.flatnonzero(counts[:-1] != size)
    number = int(wrong[0]) if wrong.size else len(counts) - 1
    if wrong.size or counts[-1] > size:
        raise _refuse(
            request, f"shard {number} has {counts[number]} samples and not exactly {size}"
        )


def _shard_bytes(request: pb.DatasetInfo) -> NDArray[np.uint64]:
    sizes = _numbers(request.layout.shard_bytes)
    if len(sizes) != len(request.layout.shard_samples):
        raise _refuse(
            request,
            f"shard_bytes has {len(sizes)} entries for {len(request.layout.shard_samples)} shards",
        )
    if _sum(sizes) is None:
        raise _refuse(request, "shard_bytes together are 2**63 or more")
    return sizes


def _files(request: pb.DatasetInfo) -> tuple[str, ...]:
    layout = request.layout
    names = tuple(layout.files)
    _check_length(request, "files", len(names), FILES)
    for name in names:
        _text(request, "file name", name, NAME_LENGTH - len(layout.root), least=1)
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise _refuse(request, f"file {twice[:80]!r} is listed twice")
    return names


def _file_samples(request: pb.DatasetInfo) -> NDArray[np.uint64]:
    counts = _numbers(request.layout.file_samples)
    if len(counts) != len(request.layout.files):
        raise _refuse(
            request, f"file_samples has {len(counts)} entries for {len(request.layout.files)} files"
        )
    _check_sum(request, "file_samples", counts)
    return counts


def _columns(request: pb.DatasetInfo) -> tuple[str, ...]:
    columns = tuple(request.layout.columns)
    if len(columns) > COLUMNS:
        raise _refuse(request, f"{len(columns)} columns are more than {COLUMNS}")
    return tuple(_text(request, "column", column, NAME_LENGTH) for column in columns)


def _numbers(values: Iterable[int]) -> NDArray[np.uint64]:
    return np.fromiter(values, np.uint64)


def _check_length(request: pb.DatasetInfo, name: str, length: int, limit: int) -> None:
    if not 1 <= length <= limit:
        raise _refuse(request, f"{name} must have 1 to {limit} entries, not {length}")


def _check_sum(request: pb.DatasetInfo, name: str, counts: NDArray[np.uint64]) -> None:
    total = _sum(counts)
    if total != request.total_samples:
        shown = "2**63 or more" if total is None else total
        raise _refuse(
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
        raise _refuse(request, f"{name} {value} is more than {MAX_COUNT}")
    return value


def _text(request: pb.DatasetInfo, name: str, value: str, most: int, least: int = 0) -> str:
    if not least <= len(value) <= most:
        raise _refuse(request, f"{name} must have {least} to {most} characters, not {len(value)}")
    if not value.isprintable():
        raise _refuse(request, f"{name} {value[:80]!r} contains characters that cannot be printed")
    return value


def _refuse(request: Any, message: str) -> Refused:
    return Refused("invalid", f"dataset {request.dataset_id[:80]!r}: {message}")
