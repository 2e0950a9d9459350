"""Datasets of a job, where their shards lie, and which ranks read them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...sharding import FileTable, Permutation, SlotTable
from .commands import DatasetRegistered, Refused, RegisterDataset
from .effects import Outbox
from .records import DatasetRecord, IndexRecord, LayoutRecord, copied, unpack
from .roster import Roster

DATASETS_LIMIT = 10_000
SHARDS_LIMIT = 10_000_000
ASSIGNMENTS_LIMIT = 5_000_000
"""Total shards and slots of the cached assignments, at about 40 bytes each. A single larger dataset
is cached too."""
ORDERS_KEPT = 4096
GLOBAL, AFFINITY = ORDERS = ("global", "affinity")
"""How workers read a dataset: the ranks share the batches, or the shards."""

View = tuple[int, frozenset[int]]
"""How many slots there are, and which of them are holes."""
Timer = Callable[[], float]
"""A stopwatch, for metrics alone; no decision depends on it."""

_PARAMETERS = (
    "path",
    "format",
    "total_samples",
    "shard_size",
    "shuffle",
    "seed",
    "exact",
    "metadata",
)
"""What must agree, beside the files, when a dataset is registered again."""


class AssignmentCache:
    """A cache of assignments over all jobs; the least recently used are evicted."""

    def __init__(self, limit: int = ASSIGNMENTS_LIMIT) -> None:
        self._limit = limit
        self._datasets: OrderedDict[int, tuple[Dataset, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.shards = 0

    def __len__(self) -> int:
        return len(self._datasets)

    def use(self, dataset: Dataset, slots: int) -> None:
        """Mark a dataset's assignment to this many slots as used. Thread-safe."""
        key, size = id(dataset), dataset.record.shard_count + slots
        with self._lock:
            _, before = self._datasets.pop(key, (dataset, 0))
            self._datasets[key] = dataset, size
            self.shards += size - before
            while self.shards > self._limit and len(self._datasets) > 1:
                _, (oldest, size) = self._datasets.popitem(last=False)
                self.shards -= size
                oldest.forget_assignment()


class Dataset:
    """A registered dataset and its assignment to slots."""

    def __init__(
        self,
        record: DatasetRecord,
        timer: Timer = lambda: 0.0,
        cache: AssignmentCache | None = None,
    ) -> None:
        self.record = record
        self.read_order = ""
        """One of `ORDERS`, as the last reader said; empty: unknown."""
        self._cache = AssignmentCache() if cache is None else cache
        self.assignment_seconds: float | None = None
        """How long the newest assignment took to compute; None: there was none."""
        self._timer = timer
        self.forget_assignment()

    def forget_assignment(self) -> None:
        """Free what can be computed again."""
        self._assigned_to: View | None = None
        self._table = SlotTable(self.record.shard_count, seed=self.record.seed)
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._orders_of: View | None = None
        self._ordered = 0

    def owners(self, view: View) -> NDArray[np.int32]:
        """The slot of every shard. Thread-safe."""
        self._cache.use(self, view[0])
        if view == self._assigned_to:
            return self._table.owners(*view)
        started = self._timer()
        owners = self._table.owners(*view)
        self.assignment_seconds = self._timer() - started
        self._assigned_to = view
        return owners

    def order(self, rank: int, epoch: int, view: View) -> NDArray[np.int64]:
        """The shards of a rank in the order of an epoch."""
        full = len(self._orders) > ORDERS_KEPT or self._ordered > 2 * self.record.shard_count
        if view != self._orders_of or full:
            self._orders, self._ordered = {}, 0
            self._orders_of = view
        order = self._orders.get((rank, epoch))
        if order is None:
            order = self._orders[rank, epoch] = self._compute(rank, epoch, view)
            self._ordered += len(order)
        return order

    def load(self, rank: int, view: View) -> int:
        """How many shards a rank has. Thread-safe."""
        self.owners(view)
        return self._table.load_of(rank, *view)

    def shard_in_order(self, rank: int, epoch: int, view: View, index: int) -> DatasetShard:
        """One shard of a rank by its position in an epoch, without computing the whole order."""
        count = self.load(rank, view)
        if self.record.shuffle:
            index = Permutation(count, self.record.seed, epoch, rank)[index]
        return self.shard(self._table.shard_at(index, rank, *view))

    def shard(self, shard_id: int) -> DatasetShard:
        """Where a shard lies."""
        return next(self.shards([shard_id]))

    def shards(self, shard_ids: ArrayLike) -> Iterator[DatasetShard]:
        """Where each of these shards lies."""
        if self._layout is not None:
            return self._layout.shards(shard_ids)
        return (self._unseen(int(shard_id)) for shard_id in np.asarray(shard_ids))

    def files(self, rank: int, epoch: int, view: View) -> list[File]:
        """The whole files of a rank in the order of an epoch. Thread-safe.

        Where nobody has read the files, each shard is one.
        """
        record = self.record
        if record.layout is None:
            shards = self.shards(self.order(rank, epoch, view))
            return [File(path, None) for shard in shards for path in shard.file_paths]
        numbers = self._shuffled(self._file_table.files_of(rank, *view), rank, epoch)
        assert self._layout is not None
        return self._layout.files(numbers)

    @property
    def seen(self) -> bool:
        """Whether a client has read the files."""
        return self.record.layout is not None

    @property
    def file_count(self) -> int:
        """How many files there are; 0 for a dataset of sample numbers."""
        record = self.record
        if record.layout is not None:
            return len(record.layout.files)
        return record.shard_count if record.path else 0

    @cached_property
    def _file_table(self) -> FileTable:
        layout = self.record.layout
        assert layout is not None
        return FileTable(unpack(layout.file_samples, len(layout.files)))

    @cached_property
    def _layout(self) -> ShardLocator | None:
        layout = self.record.layout
        return None if layout is None else ShardLocator(layout)

    def _unseen(self, shard_id: int) -> DatasetShard:
        record = self.record
        start = shard_id * record.shard_size
        end = min(start + record.shard_size, record.total_samples)
        return DatasetShard(shard_id, start, end, self._files(shard_id))

    def shard_samples(self) -> NDArray[np.int64]:
        """How many samples each shard has."""
        record = self.record
        if record.layout is not None:
            return unpack(record.layout.shard_samples, record.layout.shard_count)
        counts = np.full(record.shard_count, record.shard_size, dtype=np.int64)
        counts[-1] = record.total_samples - record.shard_size * (record.shard_count - 1)
        return counts

    def _compute(self, rank: int, epoch: int, view: View) -> NDArray[np.int64]:
        self.owners(view)
        return self._shuffled(self._table.shards_of(rank, *view), rank, epoch)

    def _shuffled(self, numbers: NDArray[np.int64], rank: int, epoch: int) -> NDArray[np.int64]:
        """Shards or files of a rank in the order of an epoch."""
        if not self.record.shuffle:
            return numbers
        permutation = Permutation(len(numbers), self.record.seed, epoch, rank)
        return numbers[permutation.slice(0, len(numbers))]

    def _files(self, shard_id: int) -> tuple[str, ...]:
        record = self.record
        if not record.path:
            return ()
        return (f"{record.path.rstrip('/')}/shard_{shard_id}.{record.format}",)


class Datasets:
    """The datasets of one job."""

    def __init__(
        self,
        roster: Roster,
        timer: Timer = lambda: 0.0,
        cache: AssignmentCache | None = None,
    ) -> None:
        self._roster = roster
        self._timer = timer
        self._cache = AssignmentCache() if cache is None else cache
        self._by_id: dict[str, Dataset] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def records(self) -> list[DatasetRecord]:
        """All of them, by id."""
        return [self._by_id[key].record for key in sorted(self._by_id)]

    def find(self, dataset_id: str) -> DatasetRecord | None:
        """The dataset, if it is registered."""
        dataset = self._by_id.get(dataset_id)
        return None if dataset is None else dataset.record

    def get(self, dataset_id: str) -> Dataset:
        """The dataset, or a refusal."""
        dataset = self._by_id.get(dataset_id)
        if dataset is None:
            names = ", ".join(sorted(self._by_id)[:8]) or "none"
            raise Refused(
                "unknown_dataset",
                f"dataset {dataset_id!r} is not registered in job {self._roster.job!r} "
                f"(registered: {names}): call DatasetRegistry.register() first",
            )
        return dataset

    def register(self, c: RegisterDataset, out: Outbox) -> DatasetRegistered:
        """Register a dataset; the same again is a no-op, another one of this id is refused."""
        record = copied(c, DatasetRecord, registered_at=out.now)
        existing = self._by_id.get(c.dataset_id)
        if existing is not None:
            self._check_same(existing.record, record)
            return DatasetRegistered(c.dataset_id, existing.record.shard_count, created=False)
        self._check_limits(record)
        self.restore(record)
        out.put(self._roster.job, record)
        if c.index:
            out.put(self._roster.job, IndexRecord(c.index), c.dataset_id)
        out.emit(
            self._roster.job,
            "dataset.registered",
            dataset=c.dataset_id,
            samples=record.total_samples,
            shards=record.shard_count,
        )
        return DatasetRegistered(c.dataset_id, record.shard_count, created=True)

    def remove(self, dataset_id: str, out: Outbox) -> None:
        """Forget a dataset and the index of its files."""
        out.delete(self._roster.job, self._by_id.pop(dataset_id).record)
        out.delete(self._roster.job, IndexRecord(b""), dataset_id)

    def shared(self, dataset_id: str, rank: int, world_hint: int = 0) -> tuple[Dataset, View]:
        """A dataset and the ranks that share it, ``rank`` among them."""
        dataset = self.get(dataset_id)
        view = self._roster.view()
        if not view[0]:
            view = self._roster.world_size or world_hint or 1, frozenset()
        if rank >= view[0] or rank in view[1]:
            raise Refused(
                "unknown_rank",
                f"rank {rank} of job {self._roster.job!r} is not present: "
                f"{view[0] - len(view[1])} of {view[0]} ranks are",
            )
        return dataset, view

    def restore(self, record: DatasetRecord) -> None:
        """Restore a stored dataset."""
        self._by_id[record.dataset_id] = Dataset(record, self._timer, self._cache)

    def _check_limits(self, record: DatasetRecord) -> None:
        if len(self._by_id) >= DATASETS_LIMIT:
            raise Refused("too_many_datasets", f"a job has at most {DATASETS_LIMIT} datasets")
        if record.shard_size < 1 or record.total_samples < 1:
            raise Refused(
                "invalid",
                f"dataset {record.dataset_id!r} cannot have {record.total_samples} samples in "
                f"shards of {record.shard_size}",
            )
        if record.shard_count > SHARDS_LIMIT:
            raise Refused(
                "invalid",
                f"dataset {record.dataset_id!r} would have {record.shard_count} shards, more than "
                f"{SHARDS_LIMIT}: use a larger shard_size",
            )

    def _check_same(self, old: DatasetRecord, new: DatasetRecord) -> None:
        conflicts = [
            f"{field}: registered {getattr(old, field)!r}, given {getattr(new, field)!r}"
            for field in _PARAMETERS
            if getattr(old, field) != getattr(new, field)
        ]
        conflicts += differences(old.layout, new.layout)
        if conflicts:
            raise Refused(
                "dataset_conflict",
                f"dataset {old.dataset_id!r} is already registered with other parameters "
                f"in job {self._roster.job!r} ({'; '.join(conflicts)}): use the same parameters or "
                "another id; for another run, another job (STRATA_JOB or job=); or remove what is "
                f"registered ('strata datasets rm {old.dataset_id} --job {self._roster.job}', "
                f"'strata jobs rm {self._roster.job}')",
            )


class DatasetShard(NamedTuple):
    """A range of samples and the files that hold it."""

    shard_id: int
    start: int
    end: int
    file_paths: tuple[str, ...]
    row_starts: tuple[int, ...] = ()
    """The first row in each file; empty when it is not known."""
    row_counts: tuple[int, ...] = ()


class File(NamedTuple):
    """A whole file."""

    path: str
    rows: int | None
    """None when it is not known."""


class ShardLocator:
    """Finds shards in files."""

    def __init__(self, record: LayoutRecord) -> None:
        self._record = record
        self._shards = _bounds(unpack(record.shard_samples, record.shard_count))
        self._files = _bounds(unpack(record.file_samples, len(record.files)))

    def shards(self, shard_ids: ArrayLike) -> Iterator[DatasetShard]:
        """Where each of these shards lies."""
        ids = np.asarray(shard_ids, dtype=np.int64)
        starts, ends = self._shards[ids], self._shards[ids + 1]
        first = np.searchsorted(self._files, starts, side="right") - 1
        last = np.searchsorted(self._files, ends, side="left")
        rows = (starts - self._files[first]).tolist()
        root, files = self._record.root, self._record.files
        columns = (column.tolist() for column in (ids, starts, ends, first, last))
        for row, shard in zip(rows, zip(*columns, strict=True), strict=True):
            shard_id, start, end, number, behind = shard
            if behind - number == 1:
                yield DatasetShard(
                    shard_id, start, end, (root + files[number],), (row,), (end - start,)
                )
            else:
                yield self._spanning(*shard)

    def files(self, numbers: ArrayLike) -> list[File]:
        """Some files, by their numbers."""
        root, files = self._record.root, self._record.files
        chosen = np.asarray(numbers, dtype=np.int64)
        rows = self._files[chosen + 1] - self._files[chosen]
        pairs = zip(chosen.tolist(), rows.tolist(), strict=True)
        return [File(root + files[number], count) for number, count in pairs]

    def _spanning(self, shard_id: int, start: int, end: int, first: int, last: int) -> DatasetShard:
        """A shard that spans several files, some of which may be empty."""
        paths, rows, counts = [], [], []
        bounds = self._files[first : last + 1].tolist()
        for number in range(first, last):
            begin, stop = bounds[number - first], bounds[number - first + 1]
            low, high = max(start, begin), min(end, stop)
            if low < high:
                paths.append(self._record.root + self._record.files[number])
                rows.append(low - begin)
                counts.append(high - low)
        return DatasetShard(shard_id, start, end, tuple(paths), tuple(rows), tuple(counts))


def differences(known: LayoutRecord | None, given: LayoutRecord | None) -> Iterable[str]:
    """How the given files differ from the registered ones, for error messages.

    A client that has not read the files gives none, and contradicts nothing.
    """
    if given is None or known == given:
        return
    if known is None:
        yield (
            f"files: registered without any having been seen, given {_files(given)}, which are "
            "cut into shards differently"
        )
        return
    if known.options != given.options:
        yield f"options: registered {known.options}, given {given.options}"
    if known.fingerprint != given.fingerprint:
        yield (
            f"the files differ: registered {_files(known)} (fingerprint {known.fingerprint}), "
            f"given {_files(given)} (fingerprint {given.fingerprint})"
        )
    elif known.root != given.root:
        yield f"folder of the files: registered {known.root!r}, given {given.root!r}"
    elif known.shard_samples != given.shard_samples:
        yield (
            f"shards: registered {known.shard_count}, given {given.shard_count} that are cut "
            "differently (another version of Strata?)"
        )


def _bounds(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts)))


def _files(layout: LayoutRecord) -> str:
    return f"{len(layout.files)} files of {layout.total_bytes} bytes"
