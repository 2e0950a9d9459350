"""Registration of datasets: argument checks, and the index and layout of their files as messages.

A dataset to be registered is a `pb.DatasetInfo` without layout and index; ``total_samples`` 0 means
that the samples are to be counted.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import threading
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .._background import abandonable
from ..config import Config
from ..errors import ShardError, ShardValueError, StorageError, install_command
from ..rpc.gen import coordinator_pb2 as pb
from ..sharding import Membership, MovePlan, SlotTable, lowest_free_slots, plan_change
from ..storage.data_files import look
from ..storage.object_client import SCHEMES
from ..storage.urls import absolute, is_remote
from ..telemetry import EventLog
from ..types import check_flag, check_id, check_whole

if TYPE_CHECKING:
    from ..data.index import DatasetIndex, IndexProgress
    from ..data.readers import Options

log = EventLog("datasets")

PROBE_SECONDS = 6.0
"""How long a store may delay a registration that gives the number of samples."""
OPTIONAL_PACKAGES = ("pyarrow", "obstore", "google_crc32c")
NAMES_SHOWN = 5
ARGUMENTS = ("total_samples", "shard_size", "shuffle", "seed", "exact", "options", "progress")
"""Optional arguments of a registration."""
INDEX_BYTES = 8 * 10**6
"""A larger index is not sent: each worker then builds its own."""
COLUMNS = 10_000
COLUMN_LENGTH = 500

Progress = Callable[["IndexProgress"], None]


def new_dataset(  # noqa: PLR0913
    job: str,
    dataset_id: str,
    total_samples: int | None,
    shard_size: int | None,
    *,
    path: str | os.PathLike[str] = "",
    format: str = "",
    shuffle: bool,
    seed: int = 0,
    exact: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> pb.DatasetInfo:
    """A dataset to be registered, with all checks that need no look at its files."""
    check_id("dataset", dataset_id)
    size = Config.load().dataset.default_shard_size if shard_size is None else shard_size
    if total_samples is not None:
        total_samples = _count("total_samples", dataset_id, total_samples)
    return pb.DatasetInfo(
        job=job,
        dataset_id=dataset_id,
        path=_absolute(dataset_id, path),
        format=format,
        total_samples=total_samples,
        shard_size=_count("shard_size", dataset_id, size, 2**32 - 1),
        shuffle=check_flag("shuffle", shuffle),
        seed=check_whole("seed", seed, most=2**64 - 1),
        exact=check_flag("exact", exact),
        metadata=_checked_metadata(metadata or {}),
    )


def with_total(dataset: pb.DatasetInfo, total_samples: int) -> pb.DatasetInfo:
    """The registration request for a dataset of so many samples, without layout and index."""
    request = pb.DatasetInfo()
    request.CopyFrom(dataset)
    for name in ("layout", "index", "shard_count"):
        request.ClearField(name)
    request.total_samples = total_samples
    return request


def agrees(dataset: pb.DatasetInfo, registered: pb.DatasetInfo) -> bool:
    """Whether the parameters are those of a registered dataset; its files are not compared."""
    request = with_total(dataset, dataset.total_samples or registered.total_samples)
    request.job = registered.job
    return bool(request == with_total(registered, registered.total_samples))


def check_options(options: Options | None, registered: pb.DatasetInfo) -> None:
    """Raise when the registered files are read with other options."""
    given, before = options_text(options), registered.layout.options
    if registered.HasField("layout") and given != before:
        raise ShardError(
            f"dataset {registered.dataset_id!r} is already registered with other options "
            f"(registered {before or 'none'}, given {given or 'none'}): use the same, or another id"
        )


@dataclass(frozen=True, slots=True)
class RegisteredDataset:
    """A registered dataset, kept in case the coordinator loses its state."""

    dataset: pb.DatasetInfo
    options: Options | None
    fingerprint: str
    """Of its files; empty where nobody has seen them."""
    state_id: str
    """The coordinator's state that has it."""

    @classmethod
    def of(cls, info: pb.DatasetInfo, state_id: str) -> RegisteredDataset:
        """A dataset as it was registered or described."""
        dataset = with_total(info, info.total_samples)
        return cls(dataset, options_in(info), info.layout.fingerprint, state_id)

    async def request(self) -> pb.DatasetInfo:
        """The request that registers it again; `ShardError` when its files have changed since."""
        request = with_total(self.dataset, self.dataset.total_samples)
        if self.fingerprint:
            index = await index_files(self.dataset, self.options)
            if index is None or index.fingerprint != self.fingerprint:
                raise ShardError(
                    f"dataset {self.dataset.dataset_id!r} cannot be registered again with a "
                    "coordinator that has lost its state: the files at "
                    f"{self.dataset.path} have changed since they were registered; begin with "
                    "another dataset id, or restore the coordinator's state ('strata state "
                    "restore COPY')"
                )
            await asyncio.to_thread(add_layout, request, index)
        return request


# Indexing


async def index_files(
    dataset: pb.DatasetInfo, options: Options | None, progress: Progress | None = None
) -> DatasetIndex | None:
    """Index the files; None when they cannot be seen here but ``total_samples`` is given."""
    try:
        if dataset.total_samples:
            await _probe(dataset.path)
    except (ShardError, StorageError) as exc:
        _warn_unseen(dataset, str(exc))
        return None
    except ImportError as exc:
        _warn_unseen(dataset, _missing_package(exc))
        return None
    index = await _build_until_cancelled(dataset, options, progress)
    if index is not None and dataset.total_samples not in (0, index.total_samples):
        raise ShardError(
            f"dataset {dataset.dataset_id!r}: total_samples is {dataset.total_samples}, but the "
            f"files at {dataset.path} have {index.total_samples} samples: correct it, or leave it "
            "out"
        )
    return index


async def index_registered_files(info: pb.DatasetInfo) -> DatasetIndex:
    """Index the files of a registered dataset; `ShardError` when they have changed."""
    if not info.path:
        raise ShardError(f"dataset {info.dataset_id!r} has no files that could be indexed")
    index = await index_files(with_total(info, 0), options_in(info))
    assert index is not None
    if info.HasField("layout") and index.fingerprint != info.layout.fingerprint:
        raise await asyncio.to_thread(changed_files, info, index)
    if index.total_samples != info.total_samples:
        raise ShardError(
            f"dataset {info.dataset_id!r} was registered with {info.total_samples} samples, "
            f"but its files at {info.path} have {index.total_samples}"
        )
    return index


def changed_files(registered: pb.DatasetInfo, index: DatasetIndex) -> ShardError:
    """The error for files that are not the registered ones; takes a full description."""
    from ..data.index import changes_since

    before = index_in(registered)
    changes = str(changes_since(before, index)) if before else _changes(registered.layout, index)
    path = registered.path
    hint = "" if is_remote(path) else " (copies on several machines need the same file times)"
    return ShardError(
        f"dataset {registered.dataset_id!r}: the files at {path} are not those that were "
        f"registered: {changes}. Restore them{hint}, or register them under another id"
    )


def _changes(layout: pb.DatasetLayout, index: DatasetIndex) -> str:
    """What differs in names and sample counts, where the registered index is not kept."""
    before = {
        layout.root + name: samples
        for name, samples in zip(layout.files, layout.file_samples, strict=True)
    }
    after = {file.url: file.samples for file in index.files}
    changes = {
        "changed": [url for url in after if before.get(url, after[url]) != after[url]],
        "added": [url for url in after if url not in before],
        "removed": [url for url in before if url not in after],
    }
    parts = [
        f"{len(urls)} {what} ({', '.join(urls[:NAMES_SHOWN])}{', ...' * (len(urls) > NAMES_SHOWN)})"
        for what, urls in changes.items()
        if urls
    ]
    return "; ".join(parts) or "the content of some differs"


async def _build_until_cancelled(
    dataset: pb.DatasetInfo, options: Options | None, progress: Progress | None
) -> DatasetIndex | None:
    cancelled = threading.Event()

    def report(state: IndexProgress) -> None:
        if progress is not None:
            progress(state)
        if cancelled.is_set():
            raise CancelledError

    try:
        return await asyncio.to_thread(_build, dataset, options, report)
    except asyncio.CancelledError:
        # The interpreter's exit waits for the thread.
        cancelled.set()
        raise


def _build(
    dataset: pb.DatasetInfo, options: Options | None, progress: Progress
) -> DatasetIndex | None:
    try:
        from ..data.index import build_index

        return build_index(dataset.path, dataset.format, options=options, progress=progress)
    except UnicodeEncodeError as exc:
        raise _unreadable_name(dataset.dataset_id, exc) from exc
    except ImportError as exc:
        reason = _missing_package(exc)
        if dataset.total_samples:
            _warn_unseen(dataset, reason)
            return None
        raise ShardError(
            f"dataset {dataset.dataset_id!r}: its samples cannot be counted, since {reason}; or "
            "give total_samples"
        ) from exc


def _missing_package(error: ImportError) -> str:
    """What to install; other import errors are raised again."""
    name = error.name or ""
    if name.partition(".")[0] not in OPTIONAL_PACKAGES:
        raise error
    return f"{name} is not installed: {install_command(name)}"


async def _probe(path: str) -> None:
    """Raise unless something can be seen at ``path``; a store gets a few seconds to answer."""
    if not is_remote(path):
        await asyncio.to_thread(look, path)
        return
    try:
        await asyncio.wait_for(abandonable(lambda: look(path), "strata-probe"), PROBE_SECONDS)
    except TimeoutError:
        raise StorageError(f"{path} could not be reached within {PROBE_SECONDS:g} s") from None


def _warn_unseen(dataset: pb.DatasetInfo, reason: str) -> None:
    log.warning(
        "dataset.unseen",
        dataset=dataset.dataset_id,
        path=dataset.path,
        reason=reason,
        files=f"{dataset.path}/shard_*.{dataset.format}",
    )


# Index and layout as messages


def add_layout(request: pb.DatasetInfo, index: DatasetIndex) -> None:
    """Put the layout and index of the files into a registration."""
    from ..data.index import index_to_json, shards
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
                columns=_column_names(index),
                options=options_text(index.options),
            )
        )
    except UnicodeEncodeError as exc:
        raise _unreadable_name(request.dataset_id, exc) from exc
    packed = zlib.compress(index_to_json(index))
    if len(packed) <= INDEX_BYTES:
        request.index = packed
    else:
        log.info("dataset.index_not_sent", path=index.path, bytes=len(packed))


def index_in(info: pb.DatasetInfo) -> DatasetIndex | None:
    """The registered index; None when there is none that this version can read."""
    from ..data.index import index_from_json

    if not info.index:
        return None
    try:
        return index_from_json(zlib.decompress(info.index))
    except (ValueError, zlib.error) as exc:
        log.warning("dataset.index_unreadable", dataset=info.dataset_id, reason=str(exc))
        return None


def options_text(options: Options | None) -> str:
    """Options as JSON; empty for the defaults."""
    if options is None or options == type(options)():
        return ""
    return msgspec.json.encode(options).decode()


def options_in(info: pb.DatasetInfo) -> Options | None:
    """The options that a dataset's files are read with; None for the defaults."""
    if not info.layout.options:
        return None
    from ..data.readers import CsvOptions, ParquetOptions, TfrecordOptions

    kinds = ParquetOptions | CsvOptions | TfrecordOptions
    decoded: Options = msgspec.json.decode(info.layout.options, type=kinds)
    return decoded


def _column_names(index: DatasetIndex) -> list[str]:
    """``name: type`` of each column, printable and of bounded length."""
    texts = (f"{column.name}: {column.type}" for column in index.columns[:COLUMNS])
    return ["".join(c if c.isprintable() else "?" for c in text)[:COLUMN_LENGTH] for text in texts]


@dataclass(frozen=True, slots=True)
class DatasetLayout:
    """Where a dataset's samples are; without files when nobody has seen them."""

    shard_samples: NDArray[np.int64]
    """How many samples each shard has."""
    shard_bytes: NDArray[np.int64] | None
    """How much has to be read for each shard."""
    files: tuple[str, ...]
    """Paths or URLs."""
    file_samples: NDArray[np.int64]


def layout_of(info: pb.DatasetInfo) -> DatasetLayout:
    """The layout in a full description."""
    if not info.HasField("layout"):
        sizes = np.full(info.shard_count, info.shard_size, dtype=np.int64)
        sizes[-1] = info.total_samples - info.shard_size * (info.shard_count - 1)
        return DatasetLayout(sizes, None, (), np.zeros(0, np.int64))
    layout = info.layout
    return DatasetLayout(
        np.fromiter(layout.shard_samples, np.int64),
        np.fromiter(layout.shard_bytes, np.int64),
        tuple(layout.root + name for name in layout.files),
        np.fromiter(layout.file_samples, np.int64),
    )


def move_plan(
    description: pb.DatasetDescription,
    join: int | Collection[int],
    leave: Collection[int],
    world_size: int | None,
) -> MovePlan:
    """What would move; without members, a world of ``world_size`` (1 by default) is assumed."""
    info = description.dataset
    layout = layout_of(info)
    now = Membership(world_size or 1, frozenset())
    if description.slot_count:
        now = Membership(description.slot_count, frozenset(description.dead_slots))
    if isinstance(join, Collection):
        joining: Collection[int] = [check_whole("join", rank) for rank in join]
    else:
        joining = lowest_free_slots(now, check_whole("join", join))
    return plan_change(
        SlotTable(info.shard_count, seed=info.seed),
        now,
        join=joining,
        leave=[check_whole("leave", rank) for rank in leave],
        samples=layout.shard_samples,
        size_bytes=layout.shard_bytes,
    )


# Checks


def _absolute(dataset_id: str, path: str | os.PathLike[str]) -> str:
    """The path in canonical form; unchanged for a store that this client cannot open."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path must be a str, not {type(text).__name__}")
    scheme = text.partition("://")[0].lower()
    if not text or (is_remote(text) and scheme not in SCHEMES):
        return text
    try:
        return absolute(text)
    except ShardError as exc:
        raise ShardError(f"dataset {dataset_id!r}: {exc}") from None


def _checked_metadata(metadata: Mapping[str, object]) -> dict[str, str]:
    """Metadata as text; a name close to an argument's is taken for a typing error."""
    for name in metadata:
        near = difflib.get_close_matches(name, ARGUMENTS, n=1, cutoff=0.85)
        if near:
            raise TypeError(
                f"{name} is no argument of register(): did you mean {near[0]}? Other names are "
                "kept as metadata"
            )
    return {key: str(value) for key, value in metadata.items()}


def _count(name: str, dataset_id: str, value: Any, most: int = 2**63 - 1) -> int:
    try:
        return check_whole(name, value, 1, most)
    except ValueError as exc:
        raise ShardValueError(f"dataset {dataset_id!r}: {exc}") from None


def _unreadable_name(dataset_id: str, error: UnicodeEncodeError) -> ShardError:
    return ShardError(
        f"dataset {dataset_id!r}: the name of file {error.object[:200]!r} is not valid UTF-8: "
        "rename it"
    )
