"""`StrataWriter`: torch's distributed checkpoint as a ``StorageWriter``."""

from __future__ import annotations

import dataclasses
import os
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ...errors import StorageError
from ...storage import StorageBackend
from ...types import check_whole
from ..engine import CheckpointEngine, StoredPart
from ..file_format.manifest import (
    PARTS,
    Part,
    PartFile,
    digest_of,
    seal,
)
from ..manager import CheckpointManager
from ..save.handle import SaveHandle, SaveRequest, check_named
from ..save.staging import DeviceSource
from ..state_dict import Buffer
from ..state_dict.buffers import BytesBuffer
from ..state_dict.torch_tensors import TorchBuffer
from ..store.writer_lock import WriterLock
from .metadata import encode, name_of_dtype

KIND = "dcp"


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank sends to the coordinating rank about an item."""

    rank: int
    extent: int
    file: PartFile | None
    """None for the coordinating rank itself."""
    written: int
    """How many bytes the rank stored in total."""
    is_full: bool


class StrataWriter(StorageWriter):
    """Writes one checkpoint of ``torch.distributed.checkpoint``.

    Every rank streams its items into a pack, with a digest for each chunk. The coordinating rank
    then commits the checkpoint atomically: a save that fails or is killed leaves nothing visible,
    and a later save removes its files.
    """

    def __init__(
        self,
        place: CheckpointManager | StorageBackend | str | os.PathLike[str],
        step: int | None = None,
        *,
        epoch: int = 0,
        is_full: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
        weights_only: bool = True,
        **options: Any,
    ) -> None:
        """``place`` is a manager, or a path, URL or backend with a manager's ``options``.

        ``step`` can also be given to ``dcp.save`` as its ``checkpoint_id``. With
        ``is_full=False`` chunks that the newest checkpoint has are not stored again; by default
        the manager decides. A writer may be used again, for one save at a time.

        Values other than tensors are serialised by torch. What a `StrataReader` would refuse is
        refused here, unless both get ``weights_only=False``.
        """
        super().__init__()
        self._arguments: tuple[Any, dict[str, Any]] = place, options
        self._engine = engine_of(place, options, self)
        self._step = None if step is None else check_whole("step", step)
        self._epoch = check_whole("epoch", epoch)
        self._is_full = not self._engine.options.incremental if is_full is None else is_full
        self._metrics = check_named("metrics", metrics, float)
        self._metadata = check_named("metadata", metadata, str)
        self._weights_only = weights_only
        self._save_id = _save_id()
        self._request: SaveRequest | None = None
        self._session: WriterLock | None = None
        self._is_coordinator = False
        self._own: tuple[SaveHandle, StoredPart] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the step of the next save."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)
        self._save_id = _save_id()

    def storage_meta(self) -> StorageMeta | None:
        """DCP's description of a save: the step as its id, and a random token."""
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
        self._engine.store.check_usable()
        self._request = SaveRequest(
            self._step,
            self._epoch,
            self._is_full,
            self._metrics,
            self._metadata,
            self._engine.committer.find(),
        )
        self._is_coordinator = is_coordinator
        if self._own is not None:
            self._own[0].span.end()  # in case that it was never committed
            self._own = None
        if self._session is not None:
            self._session.close()
        # It ends with the save, so that the files of a failed save are known to be abandoned.
        self._session = WriterLock(self._engine.store.backend)
        self._session.open()
        weakref.finalize(self, self._session.close)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: Sequence[Any]) -> list[Any]:
        """Number the ranks."""
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Store this rank's items; returns when they are durable."""
        done: Any = Future()
        with self._reported_at_end():
            done.set_result(self._write(plan, planner))
        return done

    def finish(self, metadata: Any, results: Sequence[Sequence[Any]]) -> None:
        """Commit the checkpoint, report it to the job's coordinator, and apply retention."""
        with self._reported_at_end():
            self._finish(metadata, results)

    def _finish(self, metadata: Any, results: Sequence[Sequence[Any]]) -> None:
        if self._own is None or self._session is None:
            raise StorageError("finish() was called before this rank had written its own part")
        items = [result for rank in results for result in rank]
        if metadata.storage_meta is None:
            metadata.storage_meta = self.storage_meta()
        skeleton = encode(
            metadata, ((r.index, (r.storage_data.rank, r.storage_data.extent)) for r in items)
        )
        handle, stored = self._own
        own = self._store_description(msgspec.structs.replace(stored.part, skeleton=skeleton))
        others = {r.storage_data.file: r.storage_data for r in items if r.storage_data.file}
        parts = tuple(sorted((own, *others), key=lambda one: one.rank))
        full = stored.is_full and all(one.is_full for one in others.values())
        written = stored.written + sum(one.written for one in others.values())
        self._engine.commit(handle, stored, parts, written, full)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a step."""
        return is_step(checkpoint_id)

    def __reduce__(self) -> Any:
        """Support the processes that asynchronous saves may run in."""
        place, options = self._arguments
        if isinstance(place, CheckpointManager | StorageBackend):
            raise TypeError(
                "a StrataWriter with a manager or a backend cannot go to another process: make it "
                "with the path"
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
    def _reported_at_end(self) -> Iterator[None]:
        """Report the failure of an asynchronous save when the process is ending."""
        try:
            yield
        except Exception as exc:
            if shutdown.is_ending:
                place = self._engine.store.url
                shutdown.lose(f"the checkpoint of step {self._step} is not in {place}: {exc}")
            raise

    def _write(self, plan: Any, planner: Any) -> list[Any]:
        assert self._session is not None
        assert self._request is not None
        rank: int = plan.storage_data
        leads = self._is_coordinator
        sources = [source_of(item, planner, self._weights_only) for item in plan.items]
        if not sources and not leads:
            return []
        handle = self._engine.begin_joint_save(self._request)
        stored = self._engine.store_part(handle, KIND, sources, rank, self._session, leads=leads)
        file = None
        if leads:
            self._own = handle, stored
        else:
            file = self._store_description(stored.part)
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=source.nbytes,
                storage_data=Written(rank, number, file, stored.written, stored.is_full),
            )
            for number, (item, source) in enumerate(zip(plan.items, sources, strict=True))
        ]

    def _store_description(self, part: Part) -> PartFile:
        assert self._session is not None
        data = seal(part)
        name = f"{PARTS}/{self._session.tag(f'{self._step:012d}')}{part.rank:05d}.json"
        self._engine.store.backend.write(name, data)
        return PartFile(part.rank, name, digest_of(data), part.pack_files, part.length, KIND)


def engine_of(
    place: CheckpointManager | StorageBackend | str | os.PathLike[str],
    options: dict[str, Any],
    owner: object,
) -> CheckpointEngine:
    """The engine of a manager, or one of its own for a place, closed with the owner."""
    if not isinstance(place, CheckpointManager):
        engine = CheckpointManager(place, **options).engine
        engine.close_with(owner)
        return engine
    if options:
        raise TypeError(f"give {', '.join(options)} to the CheckpointManager, not here")
    return place.engine


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The step that a checkpoint id of DCP stands for; ``ValueError`` when it is none."""
    text = str(checkpoint_id)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"the checkpoint_id of a Strata checkpoint is its step, not {text!r}")
    return int(text)


def is_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint id of DCP is a step."""
    try:
        step_of(checkpoint_id)
    except (TypeError, ValueError):
        return False
    return True


def _save_id() -> str:
    return os.urandom(16).hex()


def _made(place: str, step: int | None, settings: dict[str, Any]) -> StrataWriter:
    return StrataWriter(place, step, **settings)


class BytesSource:
    """A value that torch serialised."""

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
    """A tensor, resolved when it is copied: a planner may have to make it."""

    def __init__(self, item: Any, planner: Any) -> None:
        self.key = name_of(item.index)
        properties, sizes = item.tensor_data.properties, item.tensor_data.chunk.sizes
        self.dtype = name_of_dtype(properties.dtype, self.key)
        self.nbytes = prod(sizes) * properties.dtype.itemsize
        self._item = item
        self._planner = planner
        self._bytes: Any = None

    def copy_part(self, first: int, target: memoryview) -> None:
        """Copy bytes; the tensor is released with the last ones."""
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
    """The source of an item's bytes; ``TypeError`` if ``weights_only`` loads would refuse it."""
    if item.type == WriteItemType.BYTE_IO:
        return BytesSource(item, planner, weights_only)
    return TensorSource(item, planner)


def _check_loadable(value: Any, key: str) -> None:
    """Make sure that torch's restricted unpickler loads a value."""
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
    """Raise ``TypeError`` unless `buffer_of` supports an item."""
    if item.type == WriteItemType.BYTE_IO:
        raise TypeError(
            f"{item.index.fqn} is no tensor: save plain values with CheckpointManager.save, or "
            "through torch.distributed.checkpoint with StrataWriter"
        )
    name_of_dtype(item.tensor_data.properties.dtype, item.index.fqn)


def buffer_of(item: Any, planner: Any) -> Buffer:
    """The buffer of an item that is a tensor."""
    tensor = _in_order(item, planner)
    dtype = name_of_dtype(tensor.dtype, item.index.fqn)
    buffer: Buffer
    if tensor.numel():
        size, device = tensor.nbytes, str(tensor.device)
        start = tensor.data_ptr()
        buffer = TorchBuffer(tensor, 0, size, dtype, tensor.element_size(), device, start)
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
    """A readable name: that of the value, and the offset of a shard."""
    if index.offset is None or not any(index.offset):
        return str(index.fqn)
    return f"{index.fqn}[{','.join(map(str, index.offset))}]"
