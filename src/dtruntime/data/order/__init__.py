"""In which order an epoch's samples are read, and by whom: pure functions of their arguments.

*Global* order fixes one sequence for the whole job. A position in it is the whole state of
an epoch, whatever the number of workers, loader processes or the batch size. *Affinity*
order keeps a worker on its own shards across epochs, so that caches stay warm; its state is
the list of memberships the epoch has seen, with how far each rank came.

Both shuffle in two steps: the order of the shards, then the samples within windows of
shards. So a worker reads whole shards, and every sample can still end up anywhere.
"""

from .affinity import AffinityOrder, Lanes, Segment, TakenBack
from .lanes import DEFAULT_WINDOW, Lane, Shuffle, Window
from .sequence import GlobalOrder, StrandSpan, spans

__all__ = [
    "DEFAULT_WINDOW",
    "AffinityOrder",
    "GlobalOrder",
    "Lane",
    "Lanes",
    "Segment",
    "Shuffle",
    "StrandSpan",
    "TakenBack",
    "Window",
    "spans",
]
