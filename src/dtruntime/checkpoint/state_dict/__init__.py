"""State dicts as a description in JSON (the skeleton) and flat memory (the buffers), and back; never
by pickle. Read `flatten`, then `skeleton`, then `rebuild`; `*_arrays`, `torch_tensors` and
`python_bytes` know one library's values each.
"""

from .buffers import Buffer
from .flatten import Tree, flatten
from .rebuild import MapLocation, Rebuild, rebuild
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
