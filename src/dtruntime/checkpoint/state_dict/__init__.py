"""State dicts as a description in JSON and flat memory, and back; never by pickle."""

from ..trees.outline import Described, describe
from ..trees.places import MapLocation
from .buffers import Buffer
from .flatten import Tree, flatten
from .rebuild import Rebuild, rebuild

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
