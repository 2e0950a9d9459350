"""Export and import of state checkpoints as safetensors files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointDamagedError, StorageError
from ..storage import open_backend
from ..storage.backend import StreamWriter
from ..telemetry import EventLog
from .engine import CheckpointEngine
from .file_format.manifest import Manifest, Part
from .load.checkpoint_loader import CheckpointCopy, is_kind
from .load.pack_reader import PartReader
from .manager import CheckpointManager
from .safetensors_format import (
    METADATA,
    NAMES,
    NUMPY,
    SIZES,
    SafetensorsFile,
    header_of,
    open_file,
    views_of,
)
from .save.handle import Saved
from .state_dict.buffers import Key, dense_strides
from .state_dict.skeleton import (
    LIBRARY,
    ROOT,
    ArrayEntry,
    KeyPath,
    Skeleton,
    decode_dtype,
    outline,
    parse,
    parts_of,
    readable,
)

log = EventLog("checkpoint")

SLAB = 64 * 2**20
"""The size of the copy buffer; only tensors that are not in C order may take more memory."""
MOST_METADATA = 4096
"""Longer values of a file's metadata are not kept."""


def export_safetensors(
    manager: CheckpointManager,
    step: int | None,
    path: str | os.PathLike[str],
    *,
    under: str | None = None,
    progress: Callable[[int], Callable[[int], None]] | None = None,
) -> None:
    """Write the tensors of a state checkpoint to a ``.safetensors`` file or object.

    ``step=None`` is the newest state. Names are the keys joined by dots; ``under="model"`` exports
    only what is below that key, without the prefix. Tensors that shared memory are written once for
    each name and listed in the file's metadata (``strata.shared``), which also has all other values
    as JSON (``strata.values``). The file appears when it is complete. ``progress`` is called with
    the total size, and what it returns with the size of each piece that is written.

    ``TypeError`` names a tensor whose elements safetensors does not have, ``ValueError`` two
    values that would have the same name.
    """
    engine = manager.engine
    copy, part = engine.load(step, lambda copy: (copy, _state_part(engine, copy)), is_one=_is_state)
    leaves = leaves_of(part, under)
    # Wide elements first, so that every tensor lies at a multiple of its elements' size.
    ordered = sorted(leaves.tensors, key=lambda t: (-SIZES[NAMES[t.dtype]], t.name))
    header = header_of(
        {leaf.name: (leaf.dtype, tuple(leaf.entry.shape), leaf.nbytes) for leaf in ordered},
        _metadata(copy.manifest, leaves),
    )
    folder, name = os.path.split(os.fspath(path))
    with open_backend(folder or ".") as target, target.writer(name) as writer:
        writer.write(header)
        total = sum(leaf.nbytes for leaf in ordered)
        advance = progress(total) if progress is not None else _ignore
        _Copying(copy.reader(part), writer, advance).run(ordered)


def _ignore(size: int) -> None:
    """Ignore the progress."""


def import_safetensors(
    manager: CheckpointManager,
    path: str | os.PathLike[str],
    step: int,
    *,
    epoch: int = 0,
    framework: str | None = None,
) -> Saved:
    """Save the tensors of a local ``.safetensors`` file as a state: a dict by their names.

    They become arrays of ``framework``: ``"torch"``, ``"numpy"``, or by default what the file
    says it is from. Its metadata becomes that of the checkpoint. Returns when it is committed.
    ``StorageError`` when the file is invalid; nothing in it is trusted.
    """
    if framework not in (None, "torch", "numpy"):
        raise ValueError(f"framework must be 'torch' or 'numpy', not {framework!r}")
    opened = open_file(path)
    torch = framework == "torch" or (framework is None and opened.metadata.get("format") == "pt")
    state = _as_tensors(opened) if torch else _as_arrays(opened)
    kept = {key: text for key, text in opened.metadata.items() if len(text) <= MOST_METADATA}
    if len(kept) < len(opened.metadata):
        left = sorted(set(opened.metadata) - set(kept))
        log.warning("checkpoint.metadata_left_out", file=os.fspath(path), keys=",".join(left)[:200])
    return manager.save(state, step, epoch, metadata=kept).wait()


def _is_state(manifest: Manifest) -> bool:
    return is_kind(manifest, "state")


def _state_part(engine: CheckpointEngine, copy: CheckpointCopy) -> Part:
    part = engine.loader.part_of(copy)
    if part.kind != "state":
        raise TypeError(f"{copy.title} is bytes, and has no tensors to export")
    return part


def _metadata(manifest: Manifest, leaves: TensorLeaves) -> dict[str, str]:
    found = {"step": str(manifest.step), "epoch": str(manifest.epoch)}
    if leaves.tensors and all(t.entry.kind in ("torch", "parameter") for t in leaves.tensors):
        found["format"] = "pt"
    keys = {t.name: t.entry.impl for t in leaves.tensors if t.entry.impl is not None}
    notes: dict[str, Any] = {
        "strata.values": leaves.values,
        "strata.shared": leaves.shared,
        "strata.random_keys": keys,
    }
    return found | {name: json.dumps(note) for name, note in notes.items() if note}


class _Copying:
    """Copies tensors from a part to a file, many small ones at a time."""

    def __init__(
        self, reader: PartReader, writer: StreamWriter, advance: Callable[[int], None]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._advance = advance
        self._slab = memoryview(bytearray(SLAB))
        self._wanted: list[tuple[int, memoryview]] = []
        self._used = 0

    def run(self, leaves: Sequence[TensorLeaf]) -> None:
        for leaf in leaves:
            if leaf.plain:
                self._add(leaf.buffer[0] + leaf.entry.offset, leaf.nbytes)
            else:
                self._flush()
                memory = np.empty(leaf.buffer[1], np.uint8)
                self._reader.read_into([(leaf.buffer[0], memory.data)])
                self._writer.write(leaf.assemble(memory))
                self._advance(leaf.nbytes)
        self._flush()

    def _add(self, offset: int, nbytes: int) -> None:
        for at, size in _pieces(nbytes, SLAB - self._used):
            if self._used + size > SLAB:
                self._flush()
            self._wanted.append((offset + at, self._slab[self._used : self._used + size]))
            self._used += size

    def _flush(self) -> None:
        self._reader.read_into(self._wanted)
        self._writer.write(self._slab[: self._used])
        self._advance(self._used)
        self._wanted, self._used = [], 0


def _pieces(nbytes: int, room: int) -> Iterator[tuple[int, int]]:
    """Cut bytes so that the first piece fills the remaining room, and others a slab."""
    at = 0
    while at < nbytes:
        size = min(room or SLAB, nbytes - at)
        yield at, size
        at, room = at + size, SLAB


def _as_tensors(opened: SafetensorsFile) -> dict[str, Any]:
    try:
        from .state_dict.torch_tensors import tensor_on
    except ImportError as exc:
        raise ModuleNotFoundError(
            "the file has tensors of torch: install dtruntime[torch], or use framework='numpy'"
        ) from exc
    return {tensor.name: tensor_on(view, tensor.dtype, tensor.shape)
            for tensor, view in views_of(opened)}  # fmt: skip


def _as_arrays(opened: SafetensorsFile) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tensor, view in views_of(opened):
        try:
            dtype = decode_dtype(_numpy_name(tensor.dtype))
        except ValueError as exc:
            raise StorageError(f"{tensor.name!r:.80} cannot be an array of numpy: {exc}") from exc
        found[tensor.name] = np.ndarray(tensor.shape, dtype, view if view.nbytes else None)
    return found


def _numpy_name(name: str) -> str:
    """A dtype as skeletons spell it: numpy's own by their codes, those of ml_dtypes by name."""
    return np.dtype(name).newbyteorder("<").str if name in NUMPY else name


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """An array of the state, and its location in the part."""

    name: str
    number: int
    """The number of the array in the state; one array may have several names."""
    dtype: str
    entry: ArrayEntry
    buffer: tuple[int, int]
    """The offset and length of its buffer in the part's stream."""

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return prod(self.entry.shape) * SIZES[NAMES[self.dtype]]

    @property
    def plain(self) -> bool:
        """Whether a file has the same bytes as the part."""
        entry = self.entry
        size = SIZES[NAMES[self.dtype]]
        dense = entry.strides is None or entry.strides == list(dense_strides(entry.shape, size))
        return dense and not (entry.conj or entry.neg or _swapped(entry))

    def assemble(self, memory: NDArray[np.uint8]) -> bytes:
        """The bytes in a file of an array that is not plain, from its buffer."""
        size = SIZES[NAMES[self.dtype]]
        strides = self.entry.strides or dense_strides(self.entry.shape, size)
        dtype = _numpy_dtype(self.dtype, size)
        if _swapped(self.entry):
            dtype = dtype.newbyteorder(">")
        array: NDArray[Any] = np.ndarray(
            tuple(self.entry.shape), dtype, memory.data, self.entry.offset, tuple(strides)
        )
        if self.entry.conj:
            array = array.conj()
        if self.entry.neg:
            array = -array
        return array.astype(dtype.newbyteorder("<")).tobytes()


@dataclass(frozen=True, slots=True)
class TensorLeaves:
    """The leaves of a state."""

    tensors: list[TensorLeaf]
    values: dict[str, Any]
    """Everything else, as JSON."""
    shared: list[list[str]]
    """Groups of names of tensors that shared memory."""


def leaves_of(part: Part, under: str | None = None) -> TensorLeaves:
    """All leaves; with ``under`` only those below that key, without the prefix.

    ``TypeError`` and ``ValueError`` name what safetensors cannot represent.
    """
    try:
        skeleton = parse(part.skeleton)
        found = list(_named(skeleton, under))
    except ValueError as exc:
        raise CheckpointDamagedError(str(exc)) from exc
    if under is not None and not found:
        raise KeyError(f"the state has nothing under {under!r}")
    names = Counter(name for name, _ in found)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None or METADATA in names:
        raise ValueError(
            f"two values of the state would both be called {twice or METADATA!r} in a safetensors "
            "file, where names are keys joined by dots: rename one"
        )
    tensors = [_tensor(name, node[1], skeleton, part) for name, node in found if _is_array(node)]
    values = {name: node for name, node in found if not _is_array(node)}
    return TensorLeaves(tensors, values, _shared(tensors))


def _is_array(node: Any) -> bool:
    return type(node) is list and len(node) == 2 and node[0] == "array"


def _named(skeleton: Skeleton, under: str | None) -> Iterator[tuple[str, Any]]:
    nodes = skeleton.nodes
    prefix = "" if under is None else f"{under}."
    for node, (_, place, key) in zip(nodes, outline(nodes), strict=True):
        if type(node) is list and parts_of(node):
            continue
        name = _dotted(place, key)
        if name == under:
            yield name.rpartition(".")[2], node
        elif name.startswith(prefix):
            yield name.removeprefix(prefix), node


def _dotted(place: KeyPath | None, key: Key) -> str:
    keys: list[str] = []
    while place is not None:
        keys.append(readable(key))
        key, place = place.key, place.parent
    return ".".join(reversed(keys)) or ROOT


def _tensor(name: str, number: Any, skeleton: Skeleton, part: Part) -> TensorLeaf:
    if type(number) is not int or not 0 <= number < len(skeleton.arrays):
        raise CheckpointDamagedError(f"{name!r:.80} is array {number!r:.40} of the state")
    entry = skeleton.arrays[number]
    dtype = _dtype_name(entry)
    if dtype not in NAMES:
        raise TypeError(
            f"{name!r} has elements of type {dtype}, which safetensors does not have: convert it "
            "before saving, or export another part of the state with under="
        )
    if entry.buffer is None:
        return TensorLeaf(name, number, dtype, entry, (0, 0))
    extent = part.extents[entry.buffer]
    leaf = TensorLeaf(name, number, dtype, entry, (extent.offset, extent.length))
    if leaf.plain and entry.offset + leaf.nbytes > extent.length:
        raise CheckpointDamagedError(f"{name!r:.80} does not fit its {extent.length} bytes")
    return leaf


def _dtype_name(entry: ArrayEntry) -> str:
    if LIBRARY[entry.kind] in {"numpy", "jax"}:
        dtype = decode_dtype(entry.dtype)
        return dtype.name if dtype.names is None and not dtype.shape else str(dtype)
    return str(entry.dtype)


def _swapped(entry: ArrayEntry) -> bool:
    return isinstance(entry.dtype, str) and entry.dtype.startswith(">")


def _numpy_dtype(name: str, size: int) -> np.dtype[Any]:
    """The dtype itself if numpy has it, else an integer of the same size."""
    return np.dtype(name if name in NUMPY else f"u{size}")


def _shared(tensors: list[TensorLeaf]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for leaf in tensors:
        if leaf.entry.buffer is not None:
            groups.setdefault(leaf.entry.buffer, []).append(leaf.name)
    return [names for names in groups.values() if len(names) > 1]
