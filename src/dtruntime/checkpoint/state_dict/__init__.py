"""State dicts as JSON (the skeleton) and flat memory (the buffers), and back; never by pickle.

Read ``flattening`` first, then ``skeleton`` and ``rebuilding``. The values of one library each are
known to ``numpy_arrays``, ``torch_tensors``, ``jax_arrays`` and ``python_bytes``.
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
