"""State dicts as JSON (the skeleton) and flat memory (the buffers), and back; never by pickle.

Read ``flattening`` first, then ``skeleton`` and ``rebuilding``; ``*_arrays``, ``torch_tensors`` and
``python_bytes`` know one library's values each.
"""

from .buffers import Buffer
from .flattening import Tree, flatten
from .rebuilding import MapLocation, Rebuild, rebuild
from .skeleton import Described, describe

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
