"""State checkpoints to and from files of the safetensors format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import StorageError
from ..storage import open_backend
from ..storage.backend import StreamWriter
from ..telemetry import EventLog
from .access import Access, access, is_kind
from .file_format.manifest import Manifest, Part
from .load.pack_reader import PartReader
from .manager import CheckpointManager
from .safetensors_format import NAMES, NUMPY, SIZES, Opened, header_of, open_file, views_of
from .safetensors_leaves import Leaves, TensorLeaf, leaves_of
from .save.handle import Saved
from .state_dict.numpy_dtypes import decode_dtype
from .store.tiers import Copy

log = EventLog("checkpoint")

SLAB = 64 * 2**20
"""So much is read before it is written; only tensors that are not in C order may take more."""
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

    ``step=None`` is the newest state. Names are the keys joined by dots; ``under="model"`` takes
    what lies in there only, by the rest of the names. Tensors that were one are written once for
    each name. The file's metadata says so (``strata.shared``), and has all values that are no
    tensors as JSON (``strata.values``). The file is there when it is complete. ``progress`` is
    told how many bytes there are, and returns what is told of each few that are written.

    ``TypeError`` names a tensor whose elements safetensors does not have, ``ValueError`` two
    values that would have the same name.
    """
    found = access(manager)
    copy, part = found.load(step, _is_state, lambda copy: (copy, _state_part(found, copy)))
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
    """Nobody wants to know."""


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
    ``StorageError`` when the file is not sound; nothing of it is trusted.
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


def _state_part(found: Access, copy: Copy) -> Part:
    part = found.loads.part_of(copy)
    if part.kind != "state":
        raise TypeError(f"{copy.title} is bytes, and has no tensors to export")
    return part


def _metadata(manifest: Manifest, leaves: Leaves) -> dict[str, str]:
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
    """Cut bytes so that the first piece fills the room that is left, and others a slab."""
    at = 0
    while at < nbytes:
        size = min(room or SLAB, nbytes - at)
        yield at, size
        at, room = at + size, SLAB


def _as_tensors(opened: Opened) -> dict[str, Any]:
    try:
        from .torch_views import tensor_on
    except ImportError as exc:
        raise ModuleNotFoundError(
            "the file has tensors of torch: install dtruntime[torch], or use framework='numpy'"
        ) from exc
    return {tensor.name: tensor_on(view, tensor.dtype, tensor.shape)
            for tensor, view in views_of(opened)}  # fmt: skip


def _as_arrays(opened: Opened) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tensor, view in views_of(opened):
        try:
            dtype = decode_dtype(_numpy_name(tensor.dtype))
        except ValueError as exc:
            raise StorageError(f"{tensor.name!r:.80} cannot be an array of numpy: {exc}") from exc
        found[tensor.name] = np.ndarray(tensor.shape, dtype, view if view.nbytes else None)
    return found


def _numpy_name(name: str) -> str:
    """A type as the trees write it: numpy's own by their codes, those of ml_dtypes by name."""
    return np.dtype(name).newbyteorder("<").str if name in NUMPY else name
