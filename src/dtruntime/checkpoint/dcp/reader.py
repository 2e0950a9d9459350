"""`StrataReader`: torch's distributed checkpoint as a ``StorageReader``."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...errors import CheckpointDamagedError, StorageError
from ...storage import StorageBackend
from ...types import check_whole
from ..file_format.manifest import Extent, Manifest, Part, PartFile
from ..load.array_slices import ByteRun, SliceReader, byte_runs
from ..load.checkpoint_loader import CheckpointCopy, is_kind
from ..load.pack_reader import PartReader
from ..manager import CheckpointManager
from .metadata import decode
from .writer import KIND, engine_of, is_step, step_of


class StrataReader(StorageReader):
    """Reads a checkpoint of ``torch.distributed.checkpoint``.

    Every rank reads what its own part of the state needs, in parallel and straight into its
    tensors where they lie in host memory, and checks each chunk against its digest.
    """

    def __init__(
        self,
        place: CheckpointManager | StorageBackend | str | os.PathLike[str],
        step: int | None = None,
        *,
        weights_only: bool = True,
        **options: Any,
    ) -> None:
        """``place`` is a manager, or a path, URL or backend with a manager's ``options``.

        ``step=None`` is the newest distributed checkpoint whose description is not damaged. Values
        other than tensors were serialised by torch: ``weights_only=True`` loads them by torch's
        restricted unpickler and refuses what that does not load; ``weights_only=False`` unpickles
        anything, which may run code.
        """
        super().__init__()
        self._engine = engine_of(place, options, self)
        self._step = None if step is None else check_whole("step", step)
        self._weights_only = weights_only
        self._copy: CheckpointCopy | None = None
        self._metadata: Any = None
        self._parts: dict[int, Part] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the step of the next load."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self) -> Any:
        """Find the checkpoint, and describe it to DCP."""
        self._copy, self._parts = None, {}
        self._metadata = self._engine.load(self._step, self._described, is_one=_is_one)
        self._metadata.storage_meta.load_id = os.urandom(16).hex()
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begin a load."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: Any) -> Any:
        """Add the id of the checkpoint that this rank has found."""
        return dataclasses.replace(plan, storage_data=self._found.manifest.checkpoint_id)

    def prepare_global_plan(self, plans: Sequence[Any]) -> list[Any]:
        """Check that all ranks have found the same checkpoint."""
        found = sorted({plan.storage_data for plan in plans})
        if len(found) > 1:
            raise StorageError(
                f"the ranks have found different checkpoints ({', '.join(found)}) because one was "
                "saved meanwhile: load with step="
            )
        return list(plans)

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Fill the planned tensors; returns when that is done."""
        reads = SliceReader(self._reader)
        targets = []
        for item in sorted(plan.items, key=lambda item: self._place(item.storage_index)):
            if item.type == LoadItemType.BYTE_IO:
                self._read_bytes(item, planner, reads)
            else:
                target = planner.resolve_tensor(item).detach()
                self._read_tensor(item, target, reads)
                targets.append((item, target))
        reads.finish()
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Any = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a step."""
        return is_step(checkpoint_id)

    @property
    def _found(self) -> CheckpointCopy:
        assert self._copy is not None, "read_metadata() comes first"
        return self._copy

    def _described(self, copy: CheckpointCopy) -> Any:
        if not _is_one(copy.manifest):
            raise TypeError(
                f"{copy.title} was not saved by torch's distributed checkpoint: load it with "
                "CheckpointManager.load_state() or load()"
            )
        for named in copy.manifest.parts:
            part = copy.part(named)
            if part.skeleton is not None:
                self._copy, self._parts = copy, {part.rank: part}
                return decode(part.skeleton, copy.title)
        raise CheckpointDamagedError(f"{copy.title} is damaged: it has no description")

    def _part(self, rank: int) -> Part:
        if rank not in self._parts:
            named = _part_of_rank(self._found.manifest, rank)
            self._parts[rank] = self._found.part(named)
        return self._parts[rank]

    def _reader(self, rank: int) -> PartReader:
        return self._found.reader(self._part(rank))

    def _place(self, index: Any) -> tuple[int, int]:
        place: tuple[int, int] | None = self._metadata.storage_data.get(index)
        if place is None:
            raise CheckpointDamagedError(f"{self._found.title} is damaged: it lacks {index.fqn}")
        return place

    def _extent(self, index: Any) -> tuple[int, Extent]:
        rank, number = self._place(index)
        extents = self._part(rank).extents
        if number >= len(extents):
            raise CheckpointDamagedError(
                f"{self._found.title} is damaged: {index.fqn} is extent {number} of {len(extents)}"
            )
        return rank, extents[number]

    def _read_tensor(self, item: Any, target: Any, reads: SliceReader) -> None:
        index = item.storage_index
        rank, extent = self._extent(index)
        entry = self._metadata.state_dict_metadata[index.fqn]
        dtype = entry.properties.dtype
        sizes = next(tuple(c.sizes) for c in entry.chunks if c.offsets == index.offset)
        if torch.Size(sizes).numel() * dtype.itemsize != extent.length:
            raise CheckpointDamagedError(
                f"{self._found.title} is damaged: {extent.length} bytes are no {list(sizes)} of "
                f"{dtype} for {index.fqn}"
            )
        if target.shape != item.lengths:
            raise ValueError(
                f"{index.fqn}: the planner wants {list(item.lengths)} in {list(target.shape)}"
            )
        for piece in byte_runs(sizes, item.storage_offsets, item.lengths, dtype.itemsize):
            _read_piece(rank, extent.offset, piece, dtype, target, reads)

    def _read_bytes(self, item: Any, planner: Any, reads: SliceReader) -> None:
        name = item.storage_index.fqn
        rank, extent = self._extent(item.storage_index)

        def settle(memory: Any) -> None:
            value = io.BytesIO(memory)
            planner.load_bytes(item, self._harmless(value, name) if self._weights_only else value)

        reads.aside(rank, extent.offset, extent.length, settle)

    def _harmless(self, value: io.BytesIO, name: str) -> io.BytesIO:
        """The same value, loaded by torch's restricted unpickler and serialised again.

        DCP's planner unpickles without restriction, so it gets this copy.
        """
        try:
            plain = torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as exc:
            raise StorageError(
                f"{name!r} of {self._found.title} is neither a tensor nor a plain value: allow "
                "its type by torch.serialization.add_safe_globals, or, if you trust whoever can "
                f"write to {self._engine.store.url}, use StrataReader(..., weights_only=False): "
                f"{exc}"
            ) from exc
        copy = io.BytesIO()
        torch.save(plain, copy)
        copy.seek(0)
        return copy


def _is_one(manifest: Manifest) -> bool:
    return is_kind(manifest, KIND)


def _part_of_rank(manifest: Manifest, rank: int) -> Part | PartFile:
    for part in manifest.parts:
        if part.rank == rank:
            return part
    raise CheckpointDamagedError(
        f"checkpoint {manifest.checkpoint_id} is damaged: it refers to a part of rank {rank}, and "
        "has none"
    )


def _read_piece(
    rank: int, offset: int, piece: ByteRun, dtype: Any, target: Any, reads: SliceReader
) -> None:
    part = target[piece.at] if piece.at else target
    if piece.dense and part.is_cpu and part.dtype == dtype and part.is_contiguous():
        flat = part.view(-1).view(torch.uint8)
        reads.into(rank, offset + piece.start, memoryview(flat.numpy()))
        return

    def settle(memory: Any) -> None:
        stored = torch.from_numpy(memory).view(dtype)
        part.copy_(torch.as_strided(stored, piece.shape, piece.steps))

    reads.aside(rank, offset + piece.start, piece.nbytes, settle)
