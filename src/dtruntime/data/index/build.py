"""Making the index of a dataset: every file once, and again only when it changes.

Indexes kept on disk between runs, in ``$STRATA_CACHE_DIR/index`` or ``~/.cache/strata/index``.

The cache is a convenience: what cannot be read, understood or written is treated as absent.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import (
    FIRST_EXCEPTION,
    CancelledError,
    Future,
    wait,
)
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import msgspec
import pyarrow as pa

from ..._background import ThreadPool, usable_cores
from ...errors import ShardError
from ...storage import FileStat, expand
from ...storage.urls import absolute
from ...telemetry import EventLog
from ..readers import IndexedFile, Options, Reader, SchemaConflict, default_options, reader_for
from .dataset_index import DatasetIndex, changes_since, index_from_json, index_to_json

log = EventLog("data.index")
PROGRESS_SECONDS = 0.2
MAX_WORKERS = 16


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How far indexing has come; files that had been indexed before do not count."""

    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int


Progress = Callable[[IndexProgress], None]


def build_index(
    path: str | os.PathLike[str],
    format: str,
    *,
    options: Options | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    use_cache: bool = True,
) -> DatasetIndex:
    """Return the index of the files that ``path`` names.

    Files that were indexed before on this machine and have not changed are not read again.
    ``workers`` threads work side by side (by default a few for each processor); ``progress`` is
    called from the calling thread while they do.

    Raises ``ShardNotFoundError`` when nothing is there, ``ShardError`` when a file is corrupt, of
    another format, or has other columns than the rest, and ``StorageError`` when a store fails.
    """
    chosen = default_options(format) if options is None else options
    if format != chosen.__struct_config__.tag:
        raise ValueError(f"{type(chosen).__name__} are not the options of format {format!r}")
    reader = reader_for(chosen)
    pool = _Pool(reader, workers, progress)
    place = absolute(path)
    stats = expand(place, reader.suffixes)
    known = load_cached(place, chosen) if use_cache else None
    if known is not None and [file.stat for file in known.files] == stats:
        return known
    files = _files(stats, known, pool)
    index = DatasetIndex(place, chosen, files, _settled(reader, files, pool))
    if not index.total_samples:
        raise ShardError(
            f"{place} has {len(files)} files and no samples in them: check that the right files "
            "were written"
        )
    if known is not None:
        log.info("index.changed", path=place, changes=str(changes_since(known, index)))
    if use_cache:
        save_cached(index)
    return index


def _files(
    stats: list[FileStat], known: DatasetIndex | None, pool: _Pool
) -> tuple[IndexedFile, ...]:
    """Index the files that are not known as they are."""
    files = {file.stat: file for file in known.files} if known is not None else {}
    files |= pool.index([stat for stat in stats if stat not in files])
    return tuple(files[stat] for stat in stats)


class _Pool:
    """Threads that index files, and count how far they are."""

    def __init__(self, reader: Reader, workers: int | None, progress: Progress | None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._reader = reader
        self._workers = workers or min(MAX_WORKERS, 4 * usable_cores())
        self._progress = progress
        self._bytes_done = 0
        self._stopped = False
        self._lock = threading.Lock()

    def index(self, stats: list[FileStat]) -> dict[FileStat, IndexedFile]:
        """Index files; the first error ends it."""
        if not stats:
            return {}
        with ThreadPool(self._workers, thread_name_prefix="strata-index") as threads:
            index_file = self._reader.index_file
            futures = {stat: threads.submit(index_file, stat, self._advance) for stat in stats}
            try:
                self._watch(futures)
            except BaseException:
                self._stopped = True
                threads.shutdown(wait=True, cancel_futures=True)
                raise
        return {stat: future.result() for stat, future in futures.items()}

    def settle(self, files: Iterable[IndexedFile], schema: pa.Schema) -> list[pa.Schema]:
        """Return what each file makes of a merged schema."""
        with ThreadPool(self._workers, thread_name_prefix="strata-index") as threads:
            return list(threads.map(lambda file: self._reader.settle(file, schema), files))

    def _advance(self, count: int) -> None:
        if self._stopped:
            raise CancelledError
        with self._lock:
            self._bytes_done += count

    def _watch(self, futures: dict[FileStat, Future[IndexedFile]]) -> None:
        """Wait for all, telling the progress; raise the first error."""
        total = sum(stat.size for stat in futures)
        pending = set(futures.values())
        while pending:
            timeout = PROGRESS_SECONDS if self._progress else None
            done, pending = wait(pending, timeout, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if self._progress:
                finished = len(futures) - len(pending)
                self._progress(IndexProgress(finished, len(futures), self._bytes_done, total))


def _settled(reader: Reader, files: tuple[IndexedFile, ...], pool: _Pool) -> pa.Schema:
    """Return columns that fit all files; ``ShardError`` when there are none."""
    filled = [file for file in files if file.schema.names]
    if not filled:
        return pa.schema([])
    merged = filled[0].schema
    for file in filled[1:]:
        if file.schema is merged or file.schema.equals(merged):
            continue
        try:
            merged = reader.merge(merged, file.schema)
        except SchemaConflict as exc:
            raise _conflict(reader, filled, file, exc) from exc
    differing = [file for file in filled if not file.schema.equals(merged)]
    return reduce(reader.merge, pool.settle(differing, merged), merged)


def _conflict(
    reader: Reader, files: list[IndexedFile], odd: IndexedFile, error: SchemaConflict
) -> ShardError:
    """Name the first file that a file does not agree with."""
    for file in files:
        try:
            reader.merge(file.schema, odd.schema)
        except SchemaConflict as exc:
            return ShardError(
                f"{file.url} and {odd.url} do not have the same columns: {exc}. Index them as two "
                "datasets, or write one of them again"
            )
    return ShardError(f"{odd.url} does not have the columns of the other files: {error}")


def cache_folder() -> Path:
    """Where indexes are kept."""
    root = os.environ.get("STRATA_CACHE_DIR")
    return Path(root).expanduser() / "index" if root else Path.home() / ".cache/strata/index"


def cache_file(path: str, options: Options) -> Path:
    """Where the index of a place is kept when it is read with these options."""
    key = hashlib.sha256(path.encode() + b"\0" + msgspec.json.encode(options)).hexdigest()
    return cache_folder() / f"{key[:32]}.json"


def load_cached(path: str, options: Options) -> DatasetIndex | None:
    """Return the kept index of a place, which may be out of date."""
    file = cache_file(path, options)
    try:
        index = index_from_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        log.debug("index.cache_unreadable", file=str(file), reason=str(exc))
        return None
    return index if index.path == path and index.options == options else None


def save_cached(index: DatasetIndex) -> None:
    """Keep an index; readers see the old file or the complete one."""
    file = cache_file(index.path, index.options)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=file.parent, prefix=".index-")
        try:
            with os.fdopen(handle, "wb") as sink:
                sink.write(index_to_json(index))
            os.replace(partial, file)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as exc:
        log.debug("index.cache_unwritable", file=str(file), reason=str(exc))
