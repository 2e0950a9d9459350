"""State dicts as JSON (the skeleton) and flat memory (the buffers), and back; never by pickle.

Read ``flattening`` first, then ``skeleton`` and ``rebuilding``. ``numpy_arrays``, ``torch_tensors``
and ``jax_arrays`` handle the values of one library each.
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
