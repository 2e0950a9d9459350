"""`StrataWriter`: where torch's distributed checkpoint is written to."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from torch.distributed.checkpoint.metadata import StorageMeta
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
from ..save.staging import staged
from ..store.writer_lock import WriterLock
from .items import BytesSource, TensorSource, source_of
from .metadata import encode

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
