"""torch's distributed checkpoint (DCP), kept in Strata's packs and committed like all others.

::

    dcp.save(state, storage_writer=StrataWriter("checkpoints", step=100))
    dcp.load(state, storage_reader=StrataReader("checkpoints"))

Sharded tensors (FSDP, DTensor) are split and resharded by torch's own planners.
"""

from .reader import StrataReader
from .writer import StrataWriter

__all__ = ["StrataReader", "StrataWriter"]
