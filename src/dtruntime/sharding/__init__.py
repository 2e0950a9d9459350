"""Who reads which shards, and in which order: pure functions of their arguments.

:class:`SlotTable` deals a dataset's shards to numbered slots, :class:`FileTable` its whole files;
:class:`Permutation` orders them for an epoch, :func:`plan_change` says beforehand what a change of
membership moves.
:class:`ShardManager` and :class:`ConsistentHash` serve workers known by name where there is no
coordinator.
"""

from .files import FileTable
from .manager import DatasetParams, ShardManager, ShardRange
from .membership import Membership
from .permutation import Permutation, shuffled
from .plan import MovePlan, fewest_moves, lowest_free_slots, plan_change, plan_moves
from .ring import ConsistentHash
from .slots import SlotTable

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
