"""Indexes: the samples of a dataset, the files that contain them, and its shards.

``dataset_index`` has the index, its JSON form and the shards; ``build`` makes an index of files
and caches it on disk. Read ``dataset_index`` first.
"""

from .build import IndexProgress, build_index
from .dataset_index import (
    Changes,
    DatasetIndex,
    Shards,
    ShardSpec,
    changes_since,
    index_from_json,
    index_to_json,
    shards,
)

__all__ = [
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
]
