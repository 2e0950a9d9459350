"""torch's distributed checkpoint (DCP), kept in Strata's packs and committed like all others.

::

    dcp.save(state, storage_writer=StrataWriter("checkpoints", step=100))
    dcp.load(state, storage_reader=StrataReader("checkpoints"))

Sharded tensors (FSDP, DTensor) are split and resharded by torch's own planners. `save_sharded`
leaves writing and the commit to a manager, in the background. Read ``sharded_states`` first, then
``writer`` and ``reader``.
"""

from .reader import StrataReader
from .sharded_states import Planning, ShardedCheckpoint, load_sharded, save_sharded
from .writer import StrataWriter

__all__ = [
    "Planning",
    "ShardedCheckpoint",
    "StrataReader",
    "StrataWriter",
    "load_sharded",
    "save_sharded",
]
