"""Datasets: their files, samples and shards, and the loaders that read them.

A *dataset* is files; its *index* says where each sample lies; *shards* are runs of samples that
are read at once; *order* says in which sequence, and by which rank, they are read; a *source*
reads shards; a *block* is samples by column; a *batch* is what the training loop gets. Read
``loader`` first, then ``epoch_reader`` (which samples, in which order) and ``prefetch``
(fetching them ahead).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .index import (
        Changes,
        DatasetIndex,
        IndexProgress,
        Shards,
        ShardSpec,
        build_index,
        changes_since,
        index_from_json,
        index_to_json,
        shards,
    )
    from .live_loader import LiveLoader
    from .loader import Loader
    from .loader_state import merge_states
    from .mixture import Mixture
    from .readers import CsvOptions, ParquetOptions, TfrecordOptions
    from .source import DatasetRows, FileSource, NumberSource, Source

_HOMES = {
    "index": (
        "Changes",
        "DatasetIndex",
        "IndexProgress",
        "ShardSpec",
        "Shards",
        "build_index",
        "changes_since",
        "index_from_json",
        "index_to_json",
        "shards",
    ),
    "live_loader": ("LiveLoader",),
    "loader": ("Loader",),
    "loader_state": ("merge_states",),
    "mixture": ("Mixture",),
    "readers": ("CsvOptions", "ParquetOptions", "TfrecordOptions"),
    "source": ("DatasetRows", "FileSource", "NumberSource", "Source"),
}
_PACKAGES = {"pyarrow": "pyarrow", "google_crc32c": "google-crc32c"}
"""What a slimmed install may lack, by the names that it is imported by."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Changes",
    "CsvOptions",
    "DatasetIndex",
    "DatasetRows",
    "FileSource",
    "IndexProgress",
    "LiveLoader",
    "Loader",
    "Mixture",
    "NumberSource",
    "ParquetOptions",
    "ShardSpec",
    "Shards",
    "Source",
    "TfrecordOptions",
    "build_index",
    "changes_since",
    "index_from_json",
    "index_to_json",
    "merge_states",
    "shards",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{home}", __name__), name)
    except ModuleNotFoundError as exc:
        lacking = exc.name or ""
        package = _PACKAGES.get(lacking.partition(".")[0])
        if package is None:
            raise
        raise ModuleNotFoundError(
            f"reading data needs {lacking}, which is not installed: pip install {package}",
            name=lacking,
        ) from exc
