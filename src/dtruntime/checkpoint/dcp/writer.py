"""`StrataWriter`: where torch's distributed checkpoint is written to."""

from __future__ import annotations

import dataclasses
import os
import pickle
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..._shutdown import shutdown
from ...errors import CheckpointDamagedError, StorageError
from ...telemetry import EventLog
from ...types import check_whole
from ..access import Access, access, manager_of
from ..file_format.chunks import ChunkIndex, lay_out
from ..file_format.manifest import (
    PARTS,
    Extent,
    Manifest,
    Part,
    PartFile,
    digest_of,
    is_stored_in_full,
    seal,
)
from ..manager import CheckpointManager, check_named
from ..save.handle import LentGroups
from ..save.pack_writer import PartWriter
from ..save.staging import DeviceSource, staged
from ..state_dict import Buffer
from ..state_dict.buffers import BytesBuffer
from ..state_dict.torch_tensors import TorchBuffer
from ..store.writer_lock import WriterLock
from .metadata import encode, name_of_dtype

log = EventLog("checkpoint")

KIND = "dcp"


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank tells the coordinator of an item."""

    rank: int
    extent: int
    file: PartFile | None
    """None of the coordinator itself."""
    written: int
    """How many bytes the rank had to store, in all."""
    is_full: bool


class StrataWriter(StorageWriter):
    """Writes one checkpoint of ``torch.distributed.checkpoint``.

    Every rank streams its items into a pack, with a digest for each chunk. The checkpoint is
    committed by the coordinating rank, at the end and at once: one that fails or is killed leaves
    nothing that anybody sees, and its files are cleared away by a later save.
    """

    def __init__(
        self,
        place: CheckpointManager | str | os.PathLike[str],
        step: int | None = None,
        *,
        epoch: int = 0,
        is_full: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
        weights_only: bool = True,
        **options: Any,
    ) -> None:
        """``place`` is a manager, or a path or URL with a manager's ``options``.

        ``step`` can also be given to ``dcp.save`` as its ``checkpoint_id``. With
        ``is_full=False`` chunks that the newest checkpoint has are not stored again; by default
        the manager decides. A writer may be used again, for one save at a time.

        Values that are no tensors are serialised by torch. What a `StrataReader` would refuse is
        refused here, unless both are told ``weights_only=False``.
        """
        super().__init__()
        self._arguments: tuple[Any, dict[str, Any]] = place, options
        manager, ours = manager_of(place, options)
        self._access: Access = access(manager)
        self._step = None if step is None else check_whole("step", step)
        self._epoch = check_whole("epoch", epoch)
        self._is_full = not self._access.incremental if is_full is None else is_full
        self._metrics = check_named("metrics", metrics, float)
        self._metadata = check_named("metadata", metadata, str)
        self._weights_only = weights_only
        self._save_id = _save_id()
        self._session: WriterLock | None = None
        self._is_coordinator = False
        self._own: tuple[Part, int] | None = None
        if ours:
            weakref.finalize(self, manager.close)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step of the next save."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)
        self._save_id = _save_id()

    def storage_meta(self) -> StorageMeta | None:
        """What DCP notes of a save: its step as the id, and a token of its own."""
        return StorageMeta(
            checkpoint_id=None if self._step is None else str(self._step), save_id=self._save_id
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save."""
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "a checkpoint in Strata is committed by one rank for all: save with "
                "use_collectives=True"
            )
        if self._step is None:
            raise ValueError("StrataWriter needs the step: StrataWriter(place, step=...)")
        self._access.place.check_usable()
        self._is_coordinator = is_coordinator
        self._own = None
        if self._session is not None:
            self._session.close()
        # It ends with the save, so that what a failed one left is known to be nobody's.
        self._session = WriterLock(self._access.place.backend)
        self._session.open()
        weakref.finalize(self, self._session.close)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: Sequence[Any]) -> list[Any]:
        """Number the ranks."""
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Store this rank's items; returns when they are durable."""
        done: Any = Future()
        with self._told_at_the_end():
            done.set_result(self._write(plan, planner))
        return done

    def finish(self, metadata: Any, results: Sequence[Sequence[Any]]) -> None:
        """Commit the checkpoint, tell the coordinator of the job, and clear old ones away."""
        with self._told_at_the_end():
            self._finish(metadata, results)

    def _finish(self, metadata: Any, results: Sequence[Sequence[Any]]) -> None:
        if self._own is None or self._session is None:
            raise StorageError("finish() was called before this rank had written its own part")
        told = [result for rank in results for result in rank]
        if metadata.storage_meta is None:
            metadata.storage_meta = self.storage_meta()
        skeleton = encode(
            metadata, ((r.index, (r.storage_data.rank, r.storage_data.extent)) for r in told)
        )
        part, written = self._own
        own = self._store_part(msgspec.structs.replace(part, skeleton=skeleton))
        others = {r.storage_data.file: r.storage_data for r in told if r.storage_data.file}
        parts = tuple(sorted((own, *others), key=lambda one: one.rank))
        full = is_stored_in_full(part, written) and all(one.is_full for one in others.values())
        written += sum(one.written for one in others.values())
        self._access.in_turn(lambda: self._commit(parts, written, full))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a step."""
        try:
            step_of(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    def __reduce__(self) -> Any:
        """Go to the process that an asynchronous save may be made in."""
        place, options = self._arguments
        if isinstance(place, CheckpointManager):
            raise TypeError(
                "a StrataWriter with a manager cannot go to another process: make it with the path"
            )
        settings = {
            "epoch": self._epoch,
            "is_full": self._is_full,
            "metrics": self._metrics,
            "metadata": self._metadata,
            "weights_only": self._weights_only,
            **options,
        }
        return _made, (os.fspath(place), self._step, settings)

    @contextmanager
    def _told_at_the_end(self) -> Iterator[None]:
        """Tell of a failure when nobody can look at an asynchronous save any more."""
        try:
            yield
        except Exception as exc:
            if shutdown.is_ending:
                place = self._access.place.url
                shutdown.lose(f"the checkpoint of step {self._step} is not in {place}: {exc}")
            raise

    def _write(self, plan: Any, planner: Any) -> list[Any]:
        assert self._session is not None
        rank: int = plan.storage_data
        sources = [source_of(item, planner, self._weights_only) for item in plan.items]
        if not sources and not self._is_coordinator:
            return []
        part, written = self._store(rank, sources)
        file, full = None, is_stored_in_full(part, written)
        if self._is_coordinator:
            self._own = part, written
        else:
            file = self._store_part(part)
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=source.nbytes,
                storage_data=Written(rank, number, file, written, full),
            )
            for number, (item, source) in enumerate(zip(plan.items, sources, strict=True))
        ]

    def _store(self, rank: int, sources: Sequence[BytesSource | TensorSource]) -> tuple[Part, int]:
        """Write a pack; nothing is left of it when that fails."""
        assert self._session is not None
        access = self._access
        known = ChunkIndex() if self._is_full else access.in_turn(lambda: self._known(rank))
        layout = lay_out([source.nbytes for source in sources])
        extents = tuple(
            Extent(offset, source.nbytes, source.dtype, source.key)
            for offset, source in zip(layout.offsets, sources, strict=True)
        )
        writer = PartWriter(
            access.place.backend,
            f"{self._session.tag(f'{self._step:012d}')}{rank:05d}.pack",
            compressor=access.compressor,
            known=known,
        )
        lent, pool = LentGroups(), access.pool
        with pool.turn() as turn, closing(staged(layout, sources, pool, turn)) as groups:
            try:
                writer.write(lent.track(groups), lent.done, lent.done_with_all)
            finally:
                lent.done_with_all()
        return writer.part(rank, KIND, extents, None), writer.written

    def _known(self, rank: int) -> ChunkIndex:
        """What the newest checkpoint has of the same rank; nothing when it cannot be read."""
        catalog = self._access.place.catalog
        newest = catalog.base()
        if newest is None:
            return ChunkIndex()
        try:
            parts = [part for part in catalog.manifest(newest).parts if part.rank == rank]
            known = ChunkIndex([catalog.part(part) for part in parts])
            known.forget(catalog.is_damaged)
            return known
        except CheckpointDamagedError as exc:
            catalog.note_damage(newest, exc)
            return self._known(rank)
        except StorageError as exc:
            log.warning("checkpoint.saved_in_full", rank=rank, reason=str(exc))
            return ChunkIndex()

    def _store_part(self, part: Part) -> PartFile:
        assert self._session is not None
        data = seal(part)
        name = f"{PARTS}/{self._session.tag(f'{self._step:012d}')}{part.rank:05d}.json"
        self._access.place.backend.write(name, data)
        return PartFile(part.rank, name, digest_of(data), part.pack_files, part.length, KIND)

    def _commit(self, parts: tuple[PartFile, ...], written: int, full: bool) -> None:
        assert self._step is not None
        step, checkpoint_id = self._step, f"step-{self._step:012d}-{os.urandom(4).hex()}"
        self._access.before_save()
        if not full:
            self._check_there(name for part in parts for name in part.packs)
        if self._access.has_tiers:
            self._check_there(part.file for part in parts)
        manifest = self._access.place.catalog.commit(
            lambda sequence: Manifest(
                checkpoint_id=checkpoint_id,
                sequence=sequence,
                step=step,
                epoch=self._epoch,
                is_full=full,
                created_at=time.time(),
                size_bytes=sum(part.size_bytes for part in parts),
                written_bytes=written,
                parts=parts,
                metrics=self._metrics,
                metadata=self._metadata,
            )
        )
        self._access.announce(manifest)
        self._access.committed(manifest)
        self._access.clean()

    def _check_there(self, names: Iterable[str]) -> None:
        """Make sure that parts of all ranks and packs of earlier checkpoints are there."""
        catalog = self._access.place.catalog
        gone = catalog.missing(set(names))
        if gone:
            raise StorageError(
                f"{catalog.backend.location(gone[0])} is not there although a checkpoint that is "
                "being saved refers to it, and the checkpoint is not committed: save again with "
                "is_full=True, let one job at a time save to a place, and use a local_tier only "
                "where all ranks share its folder"
            )


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The step that a checkpoint id of DCP means; ``ValueError`` when it is none."""
    text = str(checkpoint_id)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"the checkpoint_id of a Strata checkpoint is its step, not {text!r}")
    return int(text)


def _save_id() -> str:
    return os.urandom(16).hex()


def _made(place: str, step: int | None, settings: dict[str, Any]) -> StrataWriter:
    return StrataWriter(place, step, **settings)


class BytesSource:
    """What torch serialised."""

    dtype = "uint8"

    def __init__(self, item: Any, planner: Any, weights_only: bool) -> None:
        """``TypeError`` when ``weights_only`` loads would refuse it."""
        self.key: str = item.index.fqn
        value = planner.resolve_data(item)
        if weights_only:
            _check_loadable(value, self.key)
        self._data = value.getbuffer()
        self.nbytes: int = self._data.nbytes

    def memory(self) -> memoryview:
        """The bytes."""
        found: memoryview = self._data
        return found


class TensorSource(DeviceSource):
    """A tensor, asked for when it is copied: a planner may have to make it."""

    def __init__(self, item: Any, planner: Any) -> None:
        self.key = name_of(item.index)
        properties, sizes = item.tensor_data.properties, item.tensor_data.chunk.sizes
        self.dtype = name_of_dtype(properties.dtype, self.key)
        self.nbytes = prod(sizes) * properties.dtype.itemsize
        self._item = item
        self._planner = planner
        self._bytes: Any = None

    def copy_part(self, first: int, target: memoryview) -> None:
        """Copy bytes; the tensor is let go with the last ones."""
        if self._bytes is None:
            self._bytes = self._resolve()
        stop = first + target.nbytes
        torch.frombuffer(target, dtype=torch.uint8).copy_(self._bytes[first:stop])
        if stop == self.nbytes:
            self._bytes = None

    def wait(self) -> None:
        """Do nothing: the bytes were copied at once."""

    def _resolve(self) -> Any:
        return _in_order(self._item, self._planner).view(-1).view(torch.uint8)


def source_of(item: Any, planner: Any, weights_only: bool) -> BytesSource | TensorSource:
    """The bytes of an item; ``TypeError`` when ``weights_only`` loads would refuse it."""
    if item.type == WriteItemType.BYTE_IO:
        return BytesSource(item, planner, weights_only)
    return TensorSource(item, planner)


def _check_loadable(value: Any, key: str) -> None:
    """Make sure that torch's restricted unpickler takes a value."""
    at = value.tell()
    value.seek(0)
    try:
        torch.load(value, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as exc:
        raise TypeError(
            f"{key!r} is neither a tensor nor a plain value, and StrataReader would refuse to load "
            "it: convert it (to a tensor, a number, text, or lists and dicts of those), allow its "
            "type by torch.serialization.add_safe_globals here and where it is loaded, or, if only "
            "people you trust can write to that place, use StrataWriter(..., weights_only=False) "
            f"and StrataReader(..., weights_only=False): {_first_line(exc)}"
        ) from exc
    finally:
        value.seek(at)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def check_item(item: Any) -> None:
    """Make sure that `buffer_of` can take an item; ``TypeError`` when it is not such a tensor."""
    if item.type == WriteItemType.BYTE_IO:
        raise TypeError(
            f"{item.index.fqn} is no tensor: save plain values with CheckpointManager.save, or "
            "through torch.distributed.checkpoint with StrataWriter"
        )
    name_of_dtype(item.tensor_data.properties.dtype, item.index.fqn)


def buffer_of(item: Any, planner: Any) -> Buffer:
    """The memory of an item that is a tensor, as the pipeline takes it."""
    tensor = _in_order(item, planner)
    dtype = name_of_dtype(tensor.dtype, item.index.fqn)
    buffer: Buffer
    if tensor.numel():
        size, device = tensor.nbytes, str(tensor.device)
        start = tensor.data_ptr()
        buffer = TorchBuffer(tensor, 0, dtype, tensor.element_size(), device, start, size)
    else:
        buffer = BytesBuffer(b"", 0)
        buffer.dtype = dtype
    buffer.key = name_of(item.index)
    return buffer


def _in_order(item: Any, planner: Any) -> Any:
    """The tensor of an item, as it was planned and in C order."""
    tensor = planner.resolve_data(item).detach()
    dtype, sizes = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
        raise StorageError(
            f"{name_of(item.index)} was planned as {list(sizes)} of {dtype}, and is now "
            f"{list(tensor.shape)} of {tensor.dtype}: do not change the state while it is saved"
        )
    return tensor.resolve_conj().resolve_neg().contiguous()


def name_of(index: Any) -> str:
    """A readable name: that of the value, and where a shard begins."""
    if index.offset is None or not any(index.offset):
        return str(index.fqn)
    return f"{index.fqn}[{','.join(map(str, index.offset))}]"
