"""Pytrees with sharded arrays of JAX: every process saves and loads the shards it has.

::

    save_sharded(manager, train_state, step=100)
    train_state = load_sharded(manager, train_state)

A checkpoint can be loaded into other shardings than it was saved from, on another number of
devices and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import jax
import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from ..errors import CheckpointDamagedError
from .file_format.manifest import Part
from .load.array_slices import ByteRun, SliceReader, byte_runs
from .load.checkpoint_loader import CheckpointCopy
from .load.pack_reader import PartReader
from .manager import CheckpointManager
from .save.handle import SaveHandle
from .state_dict import describe, rebuild
from .state_dict.jax_arrays import as_key, with_64_bits
from .state_dict.skeleton import decode_dtype, encode_dtype


def save_sharded(
    manager: CheckpointManager,
    tree: Any,
    step: int,
    epoch: int = 0,
    is_full: bool = True,
    *,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> SaveHandle:
    """Save this process's shards of a pytree; of replicas, the first is saved.

    As `CheckpointManager.save` it returns when the arrays may be changed or donated. When JAX
    runs in several processes all of them must call it, with a manager made by ``sharded=True``.
    Other leaves than arrays of JAX are saved by the first process.
    """
    if jax.process_count() > 1 and not manager.engine.options.sharded:
        raise ValueError(
            f"JAX runs in {jax.process_count()} processes, and each has to save its shards: use "
            "CheckpointManager(..., sharded=True)"
        )
    entries: list[ShardedArrayEntry | ValueEntry] = []
    shards: list[Any] = []
    values: list[Any] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array | jax.core.Tracer):
            entries.append(_array_entry(name, leaf, shards))
        elif jax.process_index() == 0:
            entries.append(ValueEntry(name, len(values)))
            values.append(leaf)
    index = JaxIndex(tuple(entries), jax.process_index(), jax.process_count())
    state = {"index": msgspec.json.encode(index).decode(), "shards": shards, "values": values}
    notes = {**(metadata or {}), MARK: "jax"}
    return manager.save(state, step, epoch, is_full, metrics=metrics, metadata=notes)


def load_sharded(manager: CheckpointManager, target: Any, step: int | None = None) -> Any:
    """Load a pytree in the form of ``target``, reading only what this process's devices need.

    The leaves of ``target`` say where arrays go: a ``Sharding``, a ``jax.ShapeDtypeStruct`` with
    one, or an array that lies there already; shapes must agree, and elements are converted where
    their types differ. A leaf of numpy gets the whole array, and others the saved value.
    ``step=None`` is the newest sharded checkpoint.

    ``KeyError`` names a leaf that the checkpoint does not have, ``ValueError`` one that does not
    fit, ``CheckpointDamagedError`` a checkpoint of which something is missing.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(target)
    wanted = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    loaded = manager.engine.load(
        step,
        lambda copy: Loading(copy).run(wanted),
        is_one=lambda manifest: manifest.metadata.get(MARK) == "jax",
    )
    return jax.tree_util.tree_unflatten(structure, loaded)


def _array_entry(name: str, array: Any, shards: list[Any]) -> ShardedArrayEntry:
    """Describe an array, and add this process's shards of it."""
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"{name} is inside a traced function: save outside of jit and grad")
    if array.is_deleted():
        raise ValueError(f"{name} was deleted or donated: save the array that replaced it")
    impl = None
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    own = []
    for starts, lengths, data in _own_shards(array):
        own.append(ArrayShard(starts, lengths, len(shards)))
        shards.append(data)
    return ShardedArrayEntry(
        name, array.shape, encode_dtype(np.dtype(array.dtype)), tuple(own), impl
    )


def _own_shards(array: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Any]]:
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and shard.data.size:
            sides = [
                index.indices(length)
                for index, length in zip(shard.index, array.shape, strict=True)
            ]
            yield tuple(side[0] for side in sides), shard.data.shape, shard.data


MARK = "strata.arrays"
"""The key in a checkpoint's metadata that marks sharded arrays of JAX."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=64)]


class ArrayShard(Struct, frozen=True, array_like=True):
    """A box of an array."""

    starts: Counts
    lengths: Counts
    number: Count
    """Which of the part's shards it is."""

    def overlap(self, starts: tuple[int, ...], lengths: tuple[int, ...]) -> Overlap | None:
        """The overlap with another box."""
        if not len(starts) == len(lengths) == len(self.starts) == len(self.lengths):
            return None
        sides = list(zip(self.starts, self.lengths, starts, lengths, strict=True))
        first = tuple(max(ours, theirs) for ours, _, theirs, _ in sides)
        last = tuple(min(a + size, b + length) for a, size, b, length in sides)
        if any(stop <= start for start, stop in zip(first, last, strict=True)):
            return None
        return Overlap(
            tuple(at - own for at, own in zip(first, self.starts, strict=True)),
            tuple(at - other for at, other in zip(first, starts, strict=True)),
            tuple(stop - start for start, stop in zip(first, last, strict=True)),
        )


class Overlap(Struct, frozen=True):
    """A box that lies in two others."""

    inside: tuple[int, ...]
    """Where it begins in the first."""
    at: tuple[int, ...]
    """Where it begins in the second."""
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.lengths)


class ShardedArrayEntry(Struct, frozen=True, forbid_unknown_fields=True, tag="array"):
    """A leaf that is an array of JAX."""

    name: str
    shape: Counts
    dtype: str | dict[str, Any]
    shards: tuple[ArrayShard, ...]
    impl: str | None = None
    """The implementation of random keys."""


class ValueEntry(Struct, frozen=True, forbid_unknown_fields=True, tag="value"):
    """A leaf other than an array."""

    name: str
    number: Count
    """Which of the part's values it is."""


class JaxIndex(Struct, frozen=True, forbid_unknown_fields=True):
    """What one process saved."""

    entries: tuple[ShardedArrayEntry | ValueEntry, ...]
    process: Count
    processes: Count


ROOM = 2**30
"""How many bytes are read into host memory before they go to their devices."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets of a box, and its lengths."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """An array with the shards of all processes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    impl: str | None
    shards: list[tuple[int, ArrayShard]]
    """Each with the rank of its part."""


class Loading:
    """One load of a checkpoint."""

    def __init__(self, copy: CheckpointCopy) -> None:
        self._copy = copy
        self._title = copy.title
        if copy.manifest.metadata.get(MARK) != "jax":
            raise TypeError(f"{self._title} was not saved by save_sharded: use load_state()")
        self._parts = {part.rank: part for part in copy.parts()}
        self._arrays: dict[str, _Stored] = {}
        self._values: dict[str, tuple[int, int]] = {}
        self._buffers: dict[int, dict[str, int]] = {}
        self._read_indexes()
        self._reads = SliceReader(self._reader)

    def run(self, wanted: Sequence[tuple[str, Any]]) -> list[Any]:
        """The values of leaves, each in the form of its target."""
        loaded: list[Any] = []
        pending: list[Callable[[], Any]] = []
        taken = 0
        for name, target in wanted:
            makes, size = self._begin(name, target)
            pending.append(makes)
            taken += size
            if taken >= ROOM:
                loaded += self._settle(pending)
                pending, taken = [], 0
        return loaded + self._settle(pending)

    def _settle(self, pending: Iterable[Callable[[], Any]]) -> list[Any]:
        self._reads.finish()
        with with_64_bits():
            return [make() for make in pending]

    def _begin(self, name: str, target: Any) -> tuple[Callable[[], Any], int]:
        """Begin to read a leaf; returns what makes it afterwards, and its size in bytes."""
        stored = self._arrays.get(name)
        if stored is None:
            value = self._value(name)
            return lambda: value, 0
        dtype = _check_target(name, target, stored)
        if isinstance(target, np.ndarray):
            whole = self._box(name, stored, ((0,) * len(stored.shape), stored.shape))
            return lambda: whole.astype(dtype, copy=False), whole.nbytes
        sharding = _sharding_of(name, target, stored)
        places = sharding.addressable_devices_indices_map(stored.shape)
        boxes = {device: _box_of(index, stored.shape) for device, index in places.items()}
        memory = {box: self._box(name, stored, box) for box in set(boxes.values())}

        def make() -> Any:
            arrays = [
                jax.device_put(memory[box].astype(dtype, copy=False), device)
                for device, box in boxes.items()
            ]
            array = jax.make_array_from_single_device_arrays(stored.shape, sharding, arrays)
            return array if stored.impl is None else as_key(array, stored.impl)

        return make, sum(array.nbytes for array in memory.values())

    def _box(self, name: str, stored: _Stored, box: Box) -> NDArray[Any]:
        """Memory for a box, which is filled when reading is finished."""
        starts, lengths = box
        memory = np.empty(lengths, stored.dtype)
        there = 0
        for rank, shard in stored.shards:
            overlap = shard.overlap(starts, lengths)
            if overlap is not None:
                there += overlap.size
                sides = zip(overlap.at, overlap.lengths, strict=True)
                place: Any = (*(slice(at, at + length) for at, length in sides), ...)
                offset = self._offset(name, rank, shard, stored.dtype.itemsize)
                pieces = byte_runs(
                    shard.lengths, overlap.inside, overlap.lengths, stored.dtype.itemsize
                )
                for piece in pieces:
                    self._read(rank, offset, piece, memory[place])
        if there != prod(lengths):
            raise CheckpointDamagedError(
                f"{self._title} has {there} of the {prod(lengths)} elements of {name} at "
                f"{list(starts)}: did all processes save?"
            )
        return memory

    def _read(self, rank: int, offset: int, piece: ByteRun, target: NDArray[Any]) -> None:
        # An ellipsis keeps what has no dimensions left an array.
        index: Any = (*piece.at, ...)
        part = target[index]
        if piece.dense and part.flags.c_contiguous:
            flat = part.reshape(-1).view(np.uint8)
            self._reads.into(rank, offset + piece.start, flat.data)
            return

        def settle(memory: NDArray[np.uint8]) -> None:
            steps = tuple(step * part.dtype.itemsize for step in piece.steps)
            part[...] = np.ndarray(piece.shape, part.dtype, memory.data, strides=steps)

        self._reads.aside(rank, offset + piece.start, piece.nbytes, settle)

    def _offset(self, name: str, rank: int, shard: ArrayShard, itemsize: int) -> int:
        number = self._buffers[rank].get(f"shards/{shard.number}")
        extents = self._parts[rank].extents
        if number is None or number >= len(extents):
            raise CheckpointDamagedError(f"{self._title} lacks a shard of {name}")
        extent = extents[number]
        if extent.length != prod(shard.lengths) * itemsize:
            raise CheckpointDamagedError(
                f"{self._title} has {extent.length} bytes for {list(shard.lengths)} of {name}"
            )
        return extent.offset

    def _reader(self, rank: int) -> PartReader:
        return self._copy.reader(self._parts[rank])

    def _value(self, name: str) -> Any:
        if name not in self._values:
            known = ", ".join([*self._arrays, *self._values][:20])
            raise KeyError(f"{self._title} has no {name}: it has {known}")
        rank, number = self._values[name]
        return self._rebuilt(rank, f"values/{number}")

    def _rebuilt(self, rank: int, key: str) -> Any:
        """One value of a part's state."""
        part, reader = self._parts[rank], self._reader(rank)

        def read(number: int, memory: memoryview) -> None:
            reader.read_into([(part.extents[number].offset, memory)])

        return rebuild(part.skeleton, read, keys=[key])[key]

    def _read_indexes(self) -> None:
        """Combine the indexes of all processes."""
        indexes = {}
        try:
            for rank, part in self._parts.items():
                self._buffers[rank] = _buffers(part)
                indexes[rank] = msgspec.json.decode(self._rebuilt(rank, "index"), type=JaxIndex)
            for rank, index in indexes.items():
                for entry in index.entries:
                    self._add(rank, entry)
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as exc:
            raise CheckpointDamagedError(f"{self._title} is damaged: {exc}") from exc
        expected = max(index.processes for index in indexes.values())
        if len({index.process for index in indexes.values()}) < expected:
            raise CheckpointDamagedError(
                f"{self._title} has the parts of {len(indexes)} of {expected} processes"
            )

    def _add(self, rank: int, entry: ShardedArrayEntry | ValueEntry) -> None:
        if isinstance(entry, ValueEntry):
            self._values[entry.name] = rank, entry.number
            return
        stored = _Stored(entry.shape, decode_dtype(entry.dtype), entry.impl, [])
        known = self._arrays.setdefault(entry.name, stored)
        if (known.shape, known.dtype, known.impl) != (stored.shape, stored.dtype, stored.impl):
            raise ValueError(f"processes saved {entry.name} in two shapes or types")
        known.shards.extend((rank, shard) for shard in entry.shards)


def _buffers(part: Part) -> dict[str, int]:
    """The numbers of the buffers of a part's state, by their keys."""
    if part.kind != "state":
        raise TypeError(f"a part of rank {part.rank} is not a state")
    return {one.key: one.buffer for one in describe(part.skeleton) if one.buffer is not None}


def _box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    sides = [side.indices(length) for side, length in zip(index, shape, strict=True)]
    return tuple(start for start, _, _ in sides), tuple(stop - start for start, stop, _ in sides)


def _check_target(name: str, target: Any, stored: _Stored) -> np.dtype[Any]:
    """The dtype of the target; ``ValueError`` when the target has another shape."""
    if stored.impl is not None:
        return stored.dtype
    shape = getattr(target, "shape", None)
    if shape is not None and tuple(shape) != stored.shape:
        raise ValueError(f"{name} was saved with shape {stored.shape}, and is wanted as {shape}")
    dtype = getattr(target, "dtype", None)
    return stored.dtype if dtype is None else np.dtype(dtype)


def _sharding_of(name: str, target: Any, stored: _Stored) -> Any:
    if isinstance(target, jax.sharding.Sharding):
        found: Any = target
    else:
        is_key = isinstance(target, jax.Array) and stored.impl is not None
        found = getattr(jax.random.key_data(target) if is_key else target, "sharding", None)
    if found is None and isinstance(target, jax.ShapeDtypeStruct):
        found = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if found is None:
        raise ValueError(
            f"{name} is an array, and its target a {type(target).__name__}: give a Sharding, a "
            "jax.ShapeDtypeStruct, an array of JAX or one of numpy"
        )
    return found
