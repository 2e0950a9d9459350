"""State dicts as a description in JSON and flat memory, and back; never by pickle."""

from .buffers import Buffer
from .flattening import Tree, flatten
from .outline import Described, describe
from .places import MapLocation
from .rebuilding import Rebuild, rebuild

__all__ = [
    "Buffer",
    "Described",
    "MapLocation",
    "Rebuild",
    "Tree",
    "describe",
    "flatten",
    "rebuild",
]
