"""What a caller wants registered, and what its files say about it."""

from __future__ import annotations

import asyncio
import difflib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .._background import abandonable
from ..config import Config
from ..errors import ShardError, ShardValueError, StorageError, install_command
from ..rpc.gen import coordinator_pb2 as pb
from ..storage.data_files import look
from ..storage.object_client import SCHEMES
from ..storage.urls import absolute, is_remote
from ..telemetry import EventLog
from ..types import check_flag, check_id, check_whole
from .dataset_descriptions import add_layout, index_in, options_in, options_text, unreadable_name

if TYPE_CHECKING:
    from ..data.index import DatasetIndex, IndexProgress
    from ..data.readers import Options

log = EventLog("datasets")

PROBE_SECONDS = 6.0
"""How long a store may keep a registration waiting that says how many samples there are."""
OPTIONAL_PACKAGES = ("pyarrow", "obstore", "google_crc32c")
NAMES_SHOWN = 5
ARGUMENTS = ("total_samples", "shard_size", "shuffle", "seed", "exact", "options", "progress")
"""Of a registration, that may be left out."""

Progress = Callable[["IndexProgress"], None]


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """The arguments of a registration, checked."""

    dataset_id: str
    path: str
    """Absolute; empty for a dataset without files."""
    format: str
    total_samples: int | None
    """None: to be counted."""
    shard_size: int
    shuffle: bool
    seed: int
    exact: bool = False
    options: Options | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def checked(  # noqa: PLR0913
        cls,
        dataset_id: str,
        total_samples: int | None,
        shard_size: int | None,
        *,
        path: str | os.PathLike[str] = "",
        format: str = "",
        shuffle: bool,
        seed: int = 0,
        exact: bool = False,
        options: Options | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> DatasetSpec:
        """Check everything that can be checked without looking at files."""
        check_id("dataset", dataset_id)
        size = Config.load().dataset.default_shard_size if shard_size is None else shard_size
        if total_samples is not None:
            total_samples = _count("total_samples", dataset_id, total_samples)
        return cls(
            dataset_id=dataset_id,
            path=_place(dataset_id, path),
            format=format,
            total_samples=total_samples,
            shard_size=_count("shard_size", dataset_id, size, 2**32 - 1),
            shuffle=check_flag("shuffle", shuffle),
            seed=check_whole("seed", seed, most=2**64 - 1),
            exact=check_flag("exact", exact),
            options=options,
            metadata=_described(metadata or {}),
        )

    @classmethod
    def of(cls, info: pb.DatasetInfo) -> DatasetSpec:
        """What a dataset was registered with."""
        return cls(
            dataset_id=info.dataset_id,
            path=info.path,
            format=info.format,
            total_samples=info.total_samples,
            shard_size=info.shard_size,
            shuffle=info.shuffle,
            seed=info.seed,
            exact=info.exact,
            options=options_in(info),
            metadata=dict(info.metadata),
        )

    def message(self, job: str, total_samples: int) -> pb.DatasetInfo:
        """The request, without anything about the files."""
        return pb.DatasetInfo(
            dataset_id=self.dataset_id,
            path=self.path,
            format=self.format,
            total_samples=total_samples,
            shard_size=self.shard_size,
            shuffle=self.shuffle,
            seed=self.seed,
            exact=self.exact,
            metadata=self.metadata,
            job=job,
        )

    def agrees_with(self, known: pb.DatasetInfo) -> bool:
        """Whether a registered dataset has the same parameters; its files are not looked at."""
        total = known.total_samples if self.total_samples is None else self.total_samples
        mine = self.message(known.job, total)
        theirs = pb.DatasetInfo()
        theirs.CopyFrom(known)
        for name in ("layout", "index", "shard_count"):
            theirs.ClearField(name)
        return bool(mine == theirs)

    def check_options(self, known: pb.DatasetInfo) -> None:
        """Raise when the registered files are read with other options."""
        given, registered = options_text(self.options), known.layout.options
        if known.HasField("layout") and given != registered:
            raise ShardError(
                f"dataset {self.dataset_id!r} is already registered with other options (registered "
                f"{registered or 'none'}, given {given or 'none'}): use the same, or another id"
            )


@dataclass(frozen=True, slots=True)
class RegisteredDataset:
    """A dataset as a coordinator has it, for the case that it loses its state."""

    spec: DatasetSpec
    fingerprint: str
    """Of its files; empty where nobody has seen them."""
    state_id: str
    """The coordinator's state that has it."""

    @classmethod
    def of(cls, info: pb.DatasetInfo, state_id: str) -> RegisteredDataset:
        """A dataset that is described, or registered, in a state of the coordinator."""
        return cls(DatasetSpec.of(info), info.layout.fingerprint, state_id)

    async def request(self, job: str) -> pb.DatasetInfo:
        """What registers it again; `ShardError` when its files have changed since."""
        request = self.spec.message(job, self.spec.total_samples or 0)
        if self.fingerprint:
            index = await index_files(self.spec, None)
            if index is None or index.fingerprint != self.fingerprint:
                raise ShardError(
                    f"dataset {self.spec.dataset_id!r} cannot be registered again with a "
                    "coordinator that has lost its state: the files at "
                    f"{self.spec.path} have changed since they were registered; begin with "
                    "another dataset id, or restore the coordinator's state ('strata state "
                    "restore COPY')"
                )
            await asyncio.to_thread(add_layout, request, index)
        return request


async def index_files(wanted: DatasetSpec, progress: Progress | None) -> DatasetIndex | None:
    """Index the files; none when they cannot be seen here but the samples' number is given."""
    try:
        if wanted.total_samples is not None:
            await _probe(wanted.path)
    except (ShardError, StorageError) as exc:
        _warn_unseen(wanted, str(exc))
        return None
    except ImportError as exc:
        _warn_unseen(wanted, _lacking(exc))
        return None
    index = await _build_until_cancelled(wanted, progress)
    if index is not None and wanted.total_samples not in (None, index.total_samples):
        raise ShardError(
            f"dataset {wanted.dataset_id!r}: total_samples is {wanted.total_samples}, but the "
            f"files at {wanted.path} have {index.total_samples} samples: correct it, or leave it "
            "out"
        )
    return index


async def index_registered_files(info: pb.DatasetInfo) -> DatasetIndex:
    """Index the files of a registered dataset; `ShardError` when they are not those."""
    if not info.path:
        raise ShardError(f"dataset {info.dataset_id!r} has no files that could be indexed")
    wanted = replace(DatasetSpec.of(info), total_samples=None)
    index = await index_files(wanted, None)
    assert index is not None
    if info.HasField("layout") and index.fingerprint != info.layout.fingerprint:
        raise await asyncio.to_thread(changed_files, wanted, info, index)
    if index.total_samples != info.total_samples:
        raise ShardError(
            f"dataset {info.dataset_id!r} was registered with {info.total_samples} samples, "
            f"but its files at {info.path} have {index.total_samples}"
        )
    return index


def changed_files(wanted: DatasetSpec, known: pb.DatasetInfo, index: DatasetIndex) -> ShardError:
    """The error for files that are not the registered ones; ``known`` is described in full."""
    from ..data.index import changes_since

    old = index_in(known)
    changes = str(changes_since(old, index)) if old else _changes(known.layout, index)
    where = (
        "" if is_remote(wanted.path) else " (copies on several machines need the same file times)"
    )
    return ShardError(
        f"dataset {wanted.dataset_id!r}: the files at {wanted.path} are not those that were "
        f"registered: {changes}. Restore them{where}, or register them under another id"
    )


def _changes(layout: pb.DatasetLayout, index: DatasetIndex) -> str:
    """What can be said without the registered index: names and numbers of samples."""
    before = {
        layout.root + name: samples
        for name, samples in zip(layout.files, layout.file_samples, strict=True)
    }
    after = {file.url: file.samples for file in index.files}
    found = {
        "changed": [url for url in after if before.get(url, after[url]) != after[url]],
        "added": [url for url in after if url not in before],
        "removed": [url for url in before if url not in after],
    }
    parts = [
        f"{len(urls)} {what} ({', '.join(urls[:NAMES_SHOWN])}{', ...' * (len(urls) > NAMES_SHOWN)})"
        for what, urls in found.items()
        if urls
    ]
    return "; ".join(parts) or "the content of some differs"


async def _build_until_cancelled(
    wanted: DatasetSpec, progress: Progress | None
) -> DatasetIndex | None:
    cancelled = threading.Event()

    def tell(state: IndexProgress) -> None:
        if progress is not None:
            progress(state)
        if cancelled.is_set():
            raise CancelledError

    try:
        return await asyncio.to_thread(_build, wanted, tell)
    except asyncio.CancelledError:
        # The interpreter's exit waits for the thread.
        cancelled.set()
        raise


def _build(wanted: DatasetSpec, progress: Progress | None) -> DatasetIndex | None:
    try:
        from ..data.index import build_index

        return build_index(wanted.path, wanted.format, options=wanted.options, progress=progress)
    except UnicodeEncodeError as exc:
        raise unreadable_name(wanted.dataset_id, exc) from exc
    except ImportError as exc:
        reason = _lacking(exc)
        if wanted.total_samples is not None:
            _warn_unseen(wanted, reason)
            return None
        raise ShardError(
            f"dataset {wanted.dataset_id!r}: its samples cannot be counted, since {reason}; or "
            "give total_samples"
        ) from exc


def _lacking(error: ImportError) -> str:
    """What to install; other import errors are raised again."""
    if (error.name or "").partition(".")[0] not in OPTIONAL_PACKAGES:
        raise error
    name = error.name or ""
    return f"{name} is not installed: {install_command(name)}"


async def _probe(path: str) -> None:
    """Raise unless something can be seen at ``path``; a store is not waited for long."""
    if not is_remote(path):
        await asyncio.to_thread(look, path)
        return
    try:
        await asyncio.wait_for(abandonable(lambda: look(path), "strata-probe"), PROBE_SECONDS)
    except TimeoutError:
        raise StorageError(f"{path} could not be reached within {PROBE_SECONDS:g} s") from None


def _warn_unseen(wanted: DatasetSpec, reason: str) -> None:
    log.warning(
        "dataset.unseen",
        dataset=wanted.dataset_id,
        path=wanted.path,
        reason=reason,
        files=f"{wanted.path}/shard_*.{wanted.format}",
    )


def _place(dataset_id: str, path: str | os.PathLike[str]) -> str:
    """The path in its one spelling; that of a foreign store as it is."""
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


def _described(metadata: Mapping[str, object]) -> dict[str, str]:
    """What else is to be known of a dataset; a mistyped argument is none of it."""
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
