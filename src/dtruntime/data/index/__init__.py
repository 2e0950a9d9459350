"""Indexes: which samples a dataset has, in which files they lie, and how it is cut into shards.

``dataset_index`` is the index and its JSON form; ``build`` makes one of files and keeps it on
disk. Read ``dataset_index`` first.
"""

from .build import IndexProgress, build_index
from .dataset_index import (
    Changes,
    Column,
    DatasetIndex,
    ShardPiece,
    Shards,
    ShardSpec,
    changes_since,
    index_from_json,
    index_to_json,
    shards,
)

__all__ = [
    "Changes",
    "Column",
    "DatasetIndex",
    "IndexProgress",
    "ShardPiece",
    "ShardSpec",
    "Shards",
    "build_index",
    "changes_since",
    "index_from_json",
    "index_to_json",
    "shards",
]
