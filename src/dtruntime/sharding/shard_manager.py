"""Shard assignment for workers known by name, in one process, without a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index as as_int

import numpy as np
from numpy.typing import NDArray

from dtruntime.errors import ShardError, ShardNotFoundError

from .assignment import MAX_COUNT, SlotTable
from .hashing import Permutation


@dataclass(frozen=True, slots=True)
class ShardRange:
    """One shard of a dataset and the samples in it, ``end_index`` excluded."""

    shard_id: int
    start_index: int
    end_index: int

    def __len__(self) -> int:
        return self.end_index - self.start_index


@dataclass(frozen=True, slots=True)
class DatasetParams:
    """How a dataset is divided into shards, and in which order they are read."""

    total_samples: int
    shard_size: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if as_int(self.total_samples) < 0:
            raise ValueError(f"total_samples must not be negative, not {self.total_samples}")
        if as_int(self.shard_size) < 1:
            raise ValueError(f"shard_size must be at least 1, not {self.shard_size}")
        if self.shard_count > MAX_COUNT:
            raise ValueError(
                f"{self.total_samples} samples in shards of {self.shard_size} make "
                f"{self.shard_count} shards, over {MAX_COUNT}: choose a larger shard_size"
            )
        as_int(self.seed)

    @property
    def shard_count(self) -> int:
        """The number of shards; the last may be smaller than the others."""
        return -(-self.total_samples // self.shard_size)


class ShardManager:
    """Which worker reads which shards in which epoch.

    ``ShardManager("imagenet", 1000)`` serves one dataset of 1,000 shards through
    :meth:`assign_shards`; ``ShardManager()`` serves any number of datasets registered with
    :meth:`register_dataset_params`.

    Workers are declared with :meth:`add_worker` and :meth:`remove_worker`; each holds a slot,
    and a newcomer takes the lowest free one, so that it inherits its predecessor's shards.
    Without either call, each worker that asks is admitted, and the shares of the earlier ones
    shrink: declare all workers first where that matters.

    A worker keeps its shards from epoch to epoch while the membership stays the same. With
    ``shuffle`` the order changes with each epoch; two shards keep their relative order whoever
    reads them. Not thread-safe.
    """

    def __init__(
        self,
        dataset_id: str | None = None,
        shard_count: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if (dataset_id is None) != (shard_count is None):
            raise TypeError("give both dataset_id and shard_count, or neither")
        self._datasets: dict[str, DatasetParams] = {}
        self._tables: dict[str, SlotTable] = {}
        self._slots: dict[str, int] = {}
        self._holes: set[int] = set()
        self._declared = False
        self._only = dataset_id
        if dataset_id is not None and shard_count is not None:
            self.register_dataset_params(dataset_id, shard_count, 1, shuffle, seed)

    @property
    def workers(self) -> dict[str, int]:
        """Each worker's slot."""
        return dict(self._slots)

    @property
    def datasets(self) -> dict[str, DatasetParams]:
        """The registered datasets."""
        return dict(self._datasets)

    def add_worker(self, worker_id: str) -> int:
        """Let a worker join in the lowest free slot and return its slot.

        A worker that is a member keeps its slot.
        """
        slot = self._admit(_identifier(worker_id, "worker_id"))
        self._declared = True
        return slot

    def remove_worker(self, worker_id: str) -> None:
        """Let a worker leave; its shards go to the others until another takes its slot.

        Raises ``ShardNotFoundError`` when it is not a member.
        """
        slot = self._member(_identifier(worker_id, "worker_id"))
        self._declared = True
        del self._slots[worker_id]
        self._holes.add(slot)
        while self._slot_count - 1 in self._holes:
            self._holes.remove(self._slot_count - 1)

    def register_dataset_params(
        self,
        dataset_id: str,
        total_samples: int,
        shard_size: int,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        """Register a dataset by its size alone.

        Registering the same again is a no-op; ``ShardError`` when it differs from what is
        registered under that id.
        """
        _identifier(dataset_id, "dataset_id")
        params = DatasetParams(total_samples, shard_size, shuffle, seed)
        registered = self._datasets.setdefault(dataset_id, params)
        if registered != params:
            raise ShardError(
                f"dataset {dataset_id!r} is registered as {registered}, not as {params}: "
                "register the other under another id"
            )

    def assign_shards(self, epoch: int, worker_id: str) -> list[int]:
        """Return the numbers of a worker's shards of the manager's one dataset, in read order.

        Raises ``ShardNotFoundError`` for an unknown worker once workers have been declared.
        """
        if self._only is None:
            raise ShardError(
                "this manager has no dataset of its own: make it as ShardManager(dataset_id, "
                "shard_count), or ask get_shard_for_worker for a registered dataset"
            )
        shards: list[int] = self._in_order(self._only, worker_id, epoch).tolist()
        return shards

    def get_shard_for_worker(self, dataset_id: str, worker_id: str, epoch: int) -> list[ShardRange]:
        """Return a worker's shards of a registered dataset, in the order to read them.

        Raises ``ShardNotFoundError`` for an unknown dataset, and for an unknown worker once
        workers have been declared.
        """
        shards = self._in_order(dataset_id, worker_id, epoch).tolist()
        params = self._datasets[dataset_id]
        size, total = params.shard_size, params.total_samples
        return [ShardRange(i, i * size, min((i + 1) * size, total)) for i in shards]

    def _in_order(self, dataset_id: str, worker_id: str, epoch: int) -> NDArray[np.int64]:
        params, table = self._dataset(dataset_id)
        if as_int(epoch) < 0:
            raise ValueError(f"epoch must not be negative, not {epoch}")
        _identifier(worker_id, "worker_id")
        slot = self._member(worker_id) if self._declared else self._admit(worker_id)
        shards = table.shards_of(slot, self._slot_count, self._holes)
        if not params.shuffle:
            return shards
        order = Permutation(params.shard_count, params.seed, epoch)
        return shards[np.argsort(order.indices(shards))]

    def _dataset(self, dataset_id: str) -> tuple[DatasetParams, SlotTable]:
        params = self._datasets.get(_identifier(dataset_id, "dataset_id"))
        if params is None:
            raise ShardNotFoundError(
                f"dataset {dataset_id!r} is not registered: register_dataset_params registers it"
            )
        if dataset_id not in self._tables:
            self._tables[dataset_id] = SlotTable(params.shard_count, seed=params.seed)
        return params, self._tables[dataset_id]

    @property
    def _slot_count(self) -> int:
        return len(self._slots) + len(self._holes)

    def _member(self, worker_id: str) -> int:
        if worker_id not in self._slots:
            raise ShardNotFoundError(
                f"worker {worker_id!r} is not a member: add_worker lets it join"
            )
        return self._slots[worker_id]

    def _admit(self, worker_id: str) -> int:
        if worker_id not in self._slots:
            slot = min(self._holes, default=self._slot_count)
            self._holes.discard(slot)
            self._slots[worker_id] = slot
        return self._slots[worker_id]


def _identifier(value: str, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {type(value).__name__}")
    if not value:
        raise ValueError(f"{what} must not be empty")
    return value
