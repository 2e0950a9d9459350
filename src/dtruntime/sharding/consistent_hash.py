"""A consistent hash ring, for spreading keys over named nodes without a coordinator."""

from __future__ import annotations

from math import ceil
from operator import index as as_int

import numpy as np
from numpy.typing import NDArray

from dtruntime.errors import ShardError, ShardNotFoundError

from .assignment import Ints, assign_in_rounds
from .hashing import hash_name, mix, mix_array


class ConsistentHash:
    """Maps keys to nodes so that adding or removing a node moves only about its own share.

    Each node has ``virtual_nodes`` points on the ring and takes the keys before them. Loads are
    uneven: with 150 points their standard deviation is about 8% of the mean, plus the randomness
    of the keys. ``load_factor`` bounds :meth:`assign`: no node gets more than that many times the
    mean. :class:`~dtruntime.sharding.SlotTable` balances exactly, given numbered slots instead of
    names.

    The result depends only on the set of nodes, not on the order in which they were added. Not
    thread-safe.
    """

    def __init__(self, virtual_nodes: int = 150, load_factor: float | None = None) -> None:
        self.virtual_nodes = as_int(virtual_nodes)
        self.load_factor = load_factor
        if self.virtual_nodes < 1:
            raise ValueError(f"virtual_nodes must be at least 1, not {virtual_nodes}")
        if load_factor is not None and not 1 <= load_factor < float("inf"):
            raise ValueError(f"load_factor must be a number of at least 1, not {load_factor}")
        self._points: dict[str, NDArray[np.uint64]] = {}
        self._ring: _Ring | None = None

    def __len__(self) -> int:
        return len(self._points)

    def __contains__(self, node: object) -> bool:
        return node in self._points

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes on the ring, sorted."""
        return tuple(sorted(self._points))

    def add_node(self, node: str) -> None:
        """Put ``node`` on the ring; a no-op when it is there."""
        if not _name(node, "node"):
            raise ValueError("the name of a node must not be empty")
        if node not in self._points:
            copies = np.arange(self.virtual_nodes, dtype=np.uint64)
            # Mixed once more than a dataset's name, so that the two may be the same.
            key = np.uint64(mix(hash_name(node)))
            self._points[node] = mix_array(mix_array(copies) ^ key)
            self._ring = None

    def remove_node(self, node: str) -> None:
        """Take ``node`` off the ring; ``ShardNotFoundError`` when it is not there."""
        if _name(node, "node") not in self._points:
            raise ShardNotFoundError(
                f"node {node!r} is not on the ring of {len(self)} nodes: add_node adds it"
            )
        del self._points[node]
        self._ring = None

    def get_node(self, key: str) -> str:
        """Return the node of ``key``; ``ShardError`` when the ring is empty."""
        return self._built(f"key {key!r}").node_after(mix(hash_name(_name(key, "key"))))

    def get_node_for_shard(self, dataset: str, shard: int) -> str:
        """Return the node of one shard; ``ShardError`` when the ring is empty.

        ``load_factor`` does not apply: it bounds all shards together, as :meth:`assign` does.
        """
        shard = as_int(shard)
        if shard < 0:
            raise ValueError(f"a shard's number must not be negative, not {shard}")
        ring = self._built(f"shard {shard} of dataset {dataset!r}")
        return ring.node_after(mix(mix(shard) ^ hash_name(_name(dataset, "dataset"))))

    def assign(self, dataset: str, shard_count: int) -> dict[str, Ints]:
        """Return every node's shards of ``dataset``, in rising order.

        With a ``load_factor``, a shard whose node is full goes to the next node on the ring
        that is not. Raises ``ShardError`` when the ring is empty.
        """
        shard_count = as_int(shard_count)
        if shard_count < 0:
            raise ValueError(f"shard_count must not be negative, not {shard_count}")
        ring = self._built(f"dataset {dataset!r}")
        key = np.uint64(hash_name(_name(dataset, "dataset")))
        points = mix_array(mix_array(np.arange(shard_count, dtype=np.uint64)) ^ key)
        places = np.searchsorted(ring.points, points) % ring.points.size
        if self.load_factor is None:
            owners = ring.owners[places]
        else:
            owners = ring.bounded(places, ceil(self.load_factor * shard_count / len(self)))
        shards = np.argsort(owners, kind="stable")
        ends = np.cumsum(np.bincount(owners, minlength=len(self)))
        return dict(zip(ring.nodes, np.split(shards, ends[:-1]), strict=True))

    def _built(self, what: str) -> _Ring:
        if not self._points:
            raise ShardError(
                f"the ring is empty, so no node can own {what}: add a node with add_node"
            )
        if self._ring is None:
            self._ring = _Ring(self._points)
        return self._ring


class _Ring:
    """The points of all nodes in ring order, and the node, by number, that owns each."""

    def __init__(self, points: dict[str, NDArray[np.uint64]]) -> None:
        self.nodes = tuple(sorted(points))
        every = np.concatenate([points[node] for node in self.nodes])
        order = np.argsort(every, kind="stable")
        self.points = every[order]
        copies = every.size // len(self.nodes)
        self.owners: Ints = order // copies

    def node_after(self, point: int) -> str:
        place = int(self.points.searchsorted(np.uint64(point))) % self.points.size
        return self.nodes[int(self.owners[place])]

    def bounded(self, places: Ints, limit: int) -> Ints:
        """Return an owner for each place, none more than ``limit`` times.

        A place whose owner is full goes on to the next node with room.
        """

        def choose(asking: Ints, room: Ints, _: int) -> Ints:
            is_open = np.flatnonzero(room[self.owners] > 0)
            nearest = np.searchsorted(is_open, places[asking]) % is_open.size
            return self.owners[is_open[nearest]]

        room = np.full(len(self.nodes), limit, dtype=np.int64)
        return assign_in_rounds(places.size, room, choose)


def _name(value: str, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the name of a {what} must be a string, not {type(value).__name__}")
    return value
