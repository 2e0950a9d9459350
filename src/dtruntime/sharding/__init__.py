"""Assignment of shards to workers, and the order of an epoch: pure functions of their arguments.

A *slot* is a numbered place that a worker takes; a *dead* slot has no worker. :class:`SlotTable`
assigns a dataset's shards to slots, :class:`FileTable` its whole files; :class:`Permutation`
orders them for an epoch; :func:`plan_change` predicts what a change of membership moves;
:class:`ShardManager` and :class:`ConsistentHash` serve workers known by name, without a
coordinator. Read ``assignment`` first.
"""

from .assignment import FileTable, Membership, SlotTable
from .consistent_hash import ConsistentHash
from .hashing import Permutation, shuffled
from .move_plan import MovePlan, fewest_moves, lowest_free_slots, plan_change, plan_moves
from .shard_manager import DatasetParams, ShardManager, ShardRange

__all__ = [
    "ConsistentHash",
    "DatasetParams",
    "FileTable",
    "Membership",
    "MovePlan",
    "Permutation",
    "ShardManager",
    "ShardRange",
    "SlotTable",
    "fewest_moves",
    "lowest_free_slots",
    "plan_change",
    "plan_moves",
    "shuffled",
]
