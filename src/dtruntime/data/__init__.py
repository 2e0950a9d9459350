"""Datasets: their files, samples and shards."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .index import (
        Changes,
        DatasetIndex,
        DatasetRows,
        IndexProgress,
        Shards,
        ShardSpec,
        build_index,
        changes_since,
        index_from_json,
        index_to_json,
        shards,
    )
    from .readers import CsvOptions, ParquetOptions, TfrecordOptions

_HOMES = {
    "index": (
        "Changes",
        "DatasetIndex",
        "DatasetRows",
        "IndexProgress",
        "ShardSpec",
        "Shards",
        "build_index",
        "changes_since",
        "index_from_json",
        "index_to_json",
        "shards",
    ),
    "readers": ("CsvOptions", "ParquetOptions", "TfrecordOptions"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Changes",
    "CsvOptions",
    "DatasetIndex",
    "DatasetRows",
    "IndexProgress",
    "ParquetOptions",
    "ShardSpec",
    "Shards",
    "TfrecordOptions",
    "build_index",
    "changes_since",
    "index_from_json",
    "index_to_json",
    "shards",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
