"""Building the index of a dataset: each file is read once, and again only when it changes.

Indexes are cached on disk, in ``$STRATA_CACHE_DIR/index`` or ``~/.cache/strata/index``. A cache
file that cannot be read, understood or written is treated as absent.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
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
    """The progress of indexing; files that were indexed before do not count."""

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
    """Return the index of the files at ``path``.

    Files that were indexed before on this machine and have not changed are not read again.
    ``workers`` is the number of threads (by default a few per processor); ``progress`` is called
    from the calling thread while they work.

    Raises ``ShardNotFoundError`` when there is no file, ``ShardError`` when a file is corrupt, of
    another format, or has other columns than the rest, and ``StorageError`` when a store fails.
    """
    options = default_options(format) if options is None else options
    if format != options.__struct_config__.tag:
        raise ValueError(f"{type(options).__name__} are not the options of format {format!r}")
    reader = reader_for(options)
    pool = _Pool(reader, workers, progress)
    place = absolute(path)
    stats = expand(place, reader.suffixes)
    cached = load_cached(place, options) if use_cache else None
    if cached is not None and [file.stat for file in cached.files] == stats:
        return cached
    by_stat = {file.stat: file for file in cached.files} if cached is not None else {}
    by_stat |= pool.index([stat for stat in stats if stat not in by_stat])
    files = tuple(by_stat[stat] for stat in stats)
    index = DatasetIndex(place, options, files, _common_schema(reader, files, pool))
    if not index.total_samples:
        raise ShardError(
            f"{place} has {len(files)} files and no samples in them: check that the right files "
            "were written"
        )
    if cached is not None:
        log.info("index.changed", path=place, changes=str(changes_since(cached, index)))
    if use_cache:
        save_cached(index)
    return index


class _Pool:
    """Threads that index files, and their progress."""

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
        """Index files; the first error stops it."""
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
        """Return the merged schema as changed by each file."""
        with ThreadPool(self._workers, thread_name_prefix="strata-index") as threads:
            return list(threads.map(lambda file: self._reader.settle(file, schema), files))

    def _advance(self, count: int) -> None:
        if self._stopped:
            raise CancelledError
        with self._lock:
            self._bytes_done += count

    def _watch(self, futures: dict[FileStat, Future[IndexedFile]]) -> None:
        """Wait for all and report progress; raise the first error."""
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


def _common_schema(reader: Reader, files: tuple[IndexedFile, ...], pool: _Pool) -> pa.Schema:
    """Return a schema that fits all files; ``ShardError`` when there is none."""
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
    """The error that names the first file with other columns."""
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
    """The folder of cached indexes."""
    root = os.environ.get("STRATA_CACHE_DIR")
    return Path(root).expanduser() / "index" if root else Path.home() / ".cache/strata/index"


def cache_file(path: str, options: Options) -> Path:
    """The cache file of the index of a path with these options."""
    key = hashlib.sha256(path.encode() + b"\0" + msgspec.json.encode(options)).hexdigest()
    return cache_folder() / f"{key[:32]}.json"


def load_cached(path: str, options: Options) -> DatasetIndex | None:
    """Return the cached index of a path, which may be out of date."""
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
    """Cache an index; readers see the old file or the complete new one."""
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
