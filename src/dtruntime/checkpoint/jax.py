"""Pytrees with sharded arrays of JAX: every process saves and loads the shards it has.

::

    save_sharded(manager, train_state, step=100)
    train_state = load_sharded(manager, train_state)

A checkpoint can be loaded into other shardings than it was saved from, on another number of
devices and processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import msgspec
import numpy as np

from .access import access
from .jax_index import MARK, ArrayEntry, Index, Shard, ValueEntry
from .jax_loading import Loading
from .manager import CheckpointManager
from .save.handle import SaveHandle
from .state_dict.numpy_dtypes import encode_dtype


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
    Leaves that are no arrays of JAX are saved by the first process.
    """
    if jax.process_count() > 1 and not access(manager).shared:
        raise ValueError(
            f"JAX runs in {jax.process_count()} processes, and each has to save its shards: use "
            "CheckpointManager(..., sharded=True)"
        )
    entries: list[ArrayEntry | ValueEntry] = []
    shards: list[Any] = []
    values: list[Any] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array | jax.core.Tracer):
            entries.append(_array_entry(name, leaf, shards))
        elif jax.process_index() == 0:
            entries.append(ValueEntry(name, len(values)))
            values.append(leaf)
    index = Index(tuple(entries), jax.process_index(), jax.process_count())
    state = {"index": msgspec.json.encode(index).decode(), "shards": shards, "values": values}
    notes = {**(metadata or {}), MARK: "jax"}
    return manager.save(state, step, epoch, is_full, metrics=metrics, metadata=notes)


def load_sharded(manager: CheckpointManager, target: Any, step: int | None = None) -> Any:
    """Load a pytree as ``target`` wants it, reading only what this process's devices need.

    The leaves of ``target`` say where arrays go: a ``Sharding``, a ``jax.ShapeDtypeStruct`` with
    one, or an array that lies there already; shapes must agree, and elements are converted where
    their types differ. A leaf of numpy gets the whole array, and others the saved value.
    ``step=None`` is the newest sharded checkpoint.

    ``KeyError`` names a leaf that the checkpoint does not have, ``ValueError`` one that does not
    fit, ``CheckpointDamagedError`` a checkpoint of which something is missing.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(target)
    wanted = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    found = access(manager)
    loaded = found.load(
        step,
        lambda manifest: manifest.metadata.get(MARK) == "jax",
        lambda copy: Loading(copy).run(wanted),
    )
    return jax.tree_util.tree_unflatten(structure, loaded)


def _array_entry(name: str, array: Any, shards: list[Any]) -> ArrayEntry:
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
        own.append(Shard(starts, lengths, len(shards)))
        shards.append(data)
    return ArrayEntry(name, array.shape, encode_dtype(np.dtype(array.dtype)), tuple(own), impl)


def _own_shards(array: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Any]]:
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and shard.data.size:
            sides = [
                index.indices(length)
                for index, length in zip(shard.index, array.shape, strict=True)
            ]
            yield tuple(side[0] for side in sides), shard.data.shape, shard.data
