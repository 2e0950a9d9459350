"""Indexes kept on disk between runs, in ``$STRATA_CACHE_DIR/index`` or ``~/.cache/strata/index``.

The cache is a convenience: what cannot be read, understood or written is treated as absent.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from ...telemetry import EventLog
from ..readers import Options
from .dataset_index import DatasetIndex
from .stored import index_from_json, index_to_json

log = EventLog("data.index")


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
