"""Indexes: which samples a dataset has, in which files they lie, and how it is cut into shards."""

from .build import IndexProgress, build_index
from .dataset_index import Changes, Column, DatasetIndex, changes_since
from .partition import ShardPiece, Shards, ShardSpec, shards
from .rows import DatasetRows
from .stored import index_from_json, index_to_json

__all__ = [
    "Changes",
    "Column",
    "DatasetIndex",
    "DatasetRows",
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
