"""Indexes and layouts of datasets on their way to and from the coordinator."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import ShardError
from ..rpc.gen import coordinator_pb2 as pb
from ..sharding import Membership, MovePlan, SlotTable, lowest_free_slots, plan_change
from ..sharding.coverage_digest import Counted, Digest, compare, whole
from ..telemetry import EventLog
from ..types import EpochCoverage, check_whole

if TYPE_CHECKING:
    from ..data.index import DatasetIndex
    from ..data.readers import Options

log = EventLog("datasets")

INDEX_BYTES = 8 * 10**6
"""A longer index is not sent: workers then make their own."""
COLUMNS = 10_000
COLUMN_LENGTH = 500


@dataclass(frozen=True, slots=True)
class DatasetLayout:
    """Where the samples of a dataset lie; the files are empty when nobody has seen them."""

    shard_samples: NDArray[np.int64]
    """How many samples each shard has."""
    shard_bytes: NDArray[np.int64] | None
    """How much has to be read for each shard."""
    files: tuple[str, ...]
    """Paths or URLs."""
    file_samples: NDArray[np.int64]


def layout_of(info: pb.DatasetInfo) -> DatasetLayout:
    """The layout of a dataset that was described in full."""
    if not info.HasField("layout"):
        sizes = np.full(info.shard_count, info.shard_size, dtype=np.int64)
        sizes[-1] = info.total_samples - info.shard_size * (info.shard_count - 1)
        return DatasetLayout(sizes, None, (), np.zeros(0, np.int64))
    layout = info.layout
    return DatasetLayout(
        _numbers(layout.shard_samples),
        _numbers(layout.shard_bytes),
        tuple(layout.root + name for name in layout.files),
        _numbers(layout.file_samples),
    )


def add_layout(request: pb.DatasetInfo, index: DatasetIndex) -> None:
    """Put what is known of the files into a registration."""
    from ..data.index import shards
    from ..data.index.dataset_index import common_root

    cut = shards(index, request.shard_size, request.exact)
    root = common_root([file.url for file in index.files])
    try:
        request.layout.CopyFrom(
            pb.DatasetLayout(
                fingerprint=index.fingerprint,
                shard_samples=np.diff(cut.bounds).tolist(),
                shard_bytes=cut.bytes_read.tolist(),
                root=root,
                files=[file.url[len(root) :] for file in index.files],
                file_samples=[file.samples for file in index.files],
                total_bytes=index.total_bytes,
                columns=_columns(index),
                options=options_text(index.options),
            )
        )
    except UnicodeEncodeError as exc:
        raise unreadable_name(request.dataset_id, exc) from exc
    request.index = _packed(index)


def unreadable_name(dataset_id: str, error: UnicodeEncodeError) -> ShardError:
    """The error for a file whose name is not text."""
    return ShardError(
        f"dataset {dataset_id!r}: the name of file {error.object[:200]!r} is not valid UTF-8: "
        "rename it"
    )


def index_in(info: pb.DatasetInfo) -> DatasetIndex | None:
    """The index that a registration brought; none when it brought none that is understood here."""
    from ..data.index import index_from_json

    if not info.index:
        return None
    try:
        return index_from_json(zlib.decompress(info.index))
    except (ValueError, zlib.error) as exc:
        log.warning("dataset.index_unreadable", dataset=info.dataset_id, reason=str(exc))
        return None


def options_text(options: Options | None) -> str:
    """Options as JSON; empty when they are those that nobody has to choose."""
    if options is None or options == type(options)():
        return ""
    return msgspec.json.encode(options).decode()


def options_in(info: pb.DatasetInfo) -> Options | None:
    """The options that a dataset's files are read with; none for the usual ones."""
    if not info.layout.options:
        return None
    from ..data.readers import CsvOptions, ParquetOptions, TfrecordOptions

    kinds = ParquetOptions | CsvOptions | TfrecordOptions
    decoded: Options = msgspec.json.decode(info.layout.options, type=kinds)
    return decoded


def _packed(index: DatasetIndex) -> bytes:
    from ..data.index import index_to_json

    data = zlib.compress(index_to_json(index))
    if len(data) <= INDEX_BYTES:
        return data
    log.info("dataset.index_not_sent", path=index.path, bytes=len(data))
    return b""


def _columns(index: DatasetIndex) -> list[str]:
    """The columns for people: cut, and without what cannot be printed."""
    texts = (f"{column.name}: {column.type}" for column in index.columns[:COLUMNS])
    return ["".join(c if c.isprintable() else "?" for c in text)[:COLUMN_LENGTH] for text in texts]


def _numbers(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def move_plan(
    description: pb.DatasetDescription,
    join: int | Collection[int],
    leave: Collection[int],
    world_size: int | None,
) -> MovePlan:
    """Plan with the present members, or with a world of ``world_size`` while there are none."""
    info = description.dataset
    layout = layout_of(info)
    now = membership(description, world_size)
    return plan_change(
        SlotTable(info.shard_count, seed=info.seed),
        now,
        join=_joining(now, join),
        leave=[check_whole("leave", rank) for rank in leave],
        samples=layout.shard_samples,
        size_bytes=layout.shard_bytes,
    )


def membership(description: pb.DatasetDescription, world_size: int | None) -> Membership:
    """Who shares the dataset now."""
    if not description.slot_count:
        return Membership(world_size or 1, frozenset())
    return Membership(description.slot_count, frozenset(description.dead_slots))


def _joining(now: Membership, join: int | Collection[int]) -> Collection[int]:
    if isinstance(join, Collection):
        return [check_whole("join", rank) for rank in join]
    return lowest_free_slots(now, check_whole("join", join))


def coverage_of(
    total: int, epochs: Iterable[pb.Coverage], progress: Counted | None = None
) -> list[EpochCoverage]:
    """Hold each epoch against all samples; takes about a second for a hundred million."""
    found = list(epochs)
    if not found:
        return []
    expected = whole(total, progress)
    return [_verdict(total, epoch, expected) for epoch in found]


def _verdict(total: int, epoch: pb.Coverage, expected: Digest) -> EpochCoverage:
    verdict = compare(Digest(total, epoch.digest), expected)
    elsewhere = total - epoch.expected if epoch.expected else 0
    excused = epoch.assumed + epoch.dropped + elsewhere
    missing = max(0, verdict.missing - excused)
    clean = not (missing or verdict.repeated)
    return EpochCoverage(
        epoch=epoch.epoch,
        total=total,
        covered=verdict.covered,
        missing=missing,
        repeated=verdict.repeated,
        assumed=epoch.assumed,
        dropped=epoch.dropped,
        complete=epoch.complete,
        workers=epoch.workers,
        segments=epoch.segments,
        suspect=() if clean else verdict.suspect,
        ended_incomplete=epoch.ended_incomplete,
    )
