"""`CheckpointEngine`: saves, commits, loads and lists checkpoints for every way in and out.

`CheckpointManager`, torch's distributed checkpoint, sharded arrays of JAX, safetensors and
Lightning all go through it. Saves are copied in the caller's thread, and written and committed in
one background thread, one after the other.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from .._shutdown import shutdown
from ..client import TrainingOrchestrator
from ..errors import CheckpointAbortedError, StorageError
from ..retention import Retention
from ..telemetry import EventLog, tracing
from ..types import check_whole
from .file_format.chunks import ChunkIndex, Compressor, lay_out
from .file_format.manifest import Manifest, Part, PartFile, is_stored_in_full
from .load.checkpoint_loader import CheckpointCopy, CheckpointLoader, is_kind
from .save.commit import (
    CommittedParts,
    Committer,
    ConditionReporter,
    FindCoordinator,
    SharedCommitter,
    new_id,
)
from .save.handle import (
    Saved,
    SaveEstimates,
    SaveHandle,
    SaveQueue,
    SaveRequest,
    check_named,
)
from .save.pack_writer import DeltaEncoder, PartWriter
from .save.staging import (
    Content,
    GroupQueue,
    Memory,
    StagingPool,
    StagingTurn,
    check_versions,
    extents_of,
    groups_of,
    staged,
    watched,
)
from .state_dict import Buffer
from .store.catalog import files_removed
from .store.checkpoint_store import CheckpointStore, Cleanup
from .store.writer_lock import WriterLock
from .upload.uploader import Uploader

log = EventLog("checkpoint")

C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine saves."""

    retention: Retention
    pool: StagingPool
    compressor: Compressor
    sharded: bool = False
    """Every rank saves its part of each checkpoint."""
    incremental: bool = False
    """Chunks of earlier checkpoints are never stored again."""
    delta: bool = False
    exit_seconds: float = 600.0
    local_keep: int = 2
    upload_every: int = 1


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A rank's part that is stored, and what it took."""

    part: Part
    written: int
    began: float

    @property
    def is_full(self) -> bool:
        """Whether all its chunks were stored with it."""
        return is_stored_in_full(self.part, self.written)


class CheckpointEngine:
    """Saves to one store, or to a local tier whose checkpoints are uploaded to the main one."""

    def __init__(
        self,
        main: CheckpointStore,
        find: FindCoordinator,
        options: EngineOptions,
        local: CheckpointStore | None = None,
    ) -> None:
        self.main = main
        self.store = local or main
        """Where saves go."""
        self.options = options
        self.estimates = SaveEstimates()
        reporter = ConditionReporter(find)
        committer = (SharedCommitter if options.sharded else Committer)(self.store, find)
        self.committer = committer
        self.uploads: Uploader | None = None
        if local is None:
            committer.retention = options.retention
            self.cleanup = Cleanup(
                main, options.retention, on_removed=reporter.removed, heal=committer.heal
            )
        else:
            # A checkpoint that one tier drops may be in the other, so nothing is reported.
            self.uploads = Uploader(
                local,
                main,
                Cleanup(main, options.retention),
                every=options.upload_every,
                is_first=lambda: committer.leads,
            )
            self.cleanup = Cleanup(
                local, Retention(options.local_keep), self.uploads.spares, heal=committer.heal
            )
        stores = [main] if local is None else [local, main]
        self.loader = CheckpointLoader(stores, lambda: committer.rank, reporter)
        self._differ = DeltaEncoder() if options.delta else None
        self.saves = SaveQueue(self.store.url, self.uploads, options.exit_seconds)
        self._order = threading.Lock()
        self._closing = threading.Lock()
        self._untidy: bool | None = None
        """Whether there may be something to collect before the next save; None: if it leads."""
        self._cleans = False
        """Whether retention may have something to delete after this save."""
        self._has_committed = False

    # Saving, in the caller's thread

    def request(
        self,
        step: int,
        epoch: int = 0,
        is_full: bool = True,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SaveRequest:
        """Check the arguments of a save; raises what an earlier save failed with."""
        self.store.check_usable()
        self.saves.raise_failure()
        request = SaveRequest(
            check_whole("step", step),
            check_whole("epoch", epoch),
            is_full and not self.options.incremental,
            check_named("metrics", metrics, float),
            check_named("metadata", metadata, str),
            self.committer.find(),
        )
        self.committer.check(request)
        return request

    def save(self, request: SaveRequest, prepare: Callable[[], Memory]) -> SaveHandle:
        """Begin a save of what ``prepare`` returns; returns when that memory may be changed."""
        handle = self._begin(request, self.committer.new_id(request.step))
        with handle.staging():
            self._stage(prepare(), handle)
        return handle

    def _begin(self, request: SaveRequest, checkpoint_id: str) -> SaveHandle:
        self.saves.check_accepted(request.step)
        wait_for_upload = None if self.uploads is None else self.uploads.wait_for
        return SaveHandle(request, checkpoint_id, wait_for_upload)

    def _stage(self, memory: Memory, handle: SaveHandle) -> None:
        if memory.view is not None:
            groups = groups_of(memory.view, steady=memory.steady)
            if not memory.view.readonly:
                groups = watched(memory.view, groups, f"the buffer saved at step {handle.step}")
            handle.stall_seconds = time.perf_counter() - handle.started
            self._submit(handle, Content(memory.kind, groups))
            return
        buffers = memory.buffers
        layout = lay_out([buffer.nbytes for buffer in buffers])
        extents = extents_of(buffers, layout.offsets)
        versions = [buffer.version() for buffer in buffers]
        sources, kept = self._sources(buffers)
        if kept:
            # The device has a copy of its own, which is fetched in the background.
            check_versions(buffers, versions, handle.step)
            with self._in_turn() as turn:
                groups = staged(layout, sources, self.options.pool, turn)
                handle.stall_seconds = time.perf_counter() - handle.started
                self._submit(handle, Content(memory.kind, groups, extents, memory.skeleton))
            return
        queue = GroupQueue()
        with self._in_turn() as turn:
            self._submit(handle, Content(memory.kind, iter(queue), extents, memory.skeleton))
        try:
            for group in staged(layout, sources, self.options.pool, turn, queue.let_go):
                queue.put(group)
            check_versions(buffers, versions, handle.step)
        except BaseException as exc:
            handle.looked_at = True
            queue.end(exc)
            raise
        handle.stall_seconds = time.perf_counter() - handle.started
        queue.end()

    def _sources(self, buffers: Sequence[Buffer]) -> tuple[Sequence[Any], bool]:
        """What to copy from, and whether it stays as it is when the caller goes on."""
        if not any(buffer.device.startswith("cuda") for buffer in buffers):
            return buffers, False
        from .save import cuda

        self.options.pool.pin = cuda.pin
        snapshot = cuda.snapshot(buffers)
        return (cuda.sources(buffers), False) if snapshot is None else (snapshot, True)

    @contextmanager
    def _in_turn(self) -> Iterator[StagingTurn]:
        """A turn to get memory; what is submitted meanwhile is written in the same order."""
        with self._order:
            turn = self.options.pool.turn()
            try:
                yield turn
            except BaseException:
                turn.give_up()
                raise

    def _submit(self, handle: SaveHandle, content: Content) -> None:
        coordinator = handle.request.coordinator
        if isinstance(coordinator, TrainingOrchestrator):
            coordinator.expect_commit(handle.future)
        self.saves.add(handle, lambda: self._run(handle, content))

    # Parts of several ranks that one of them commits

    def begin_joint_save(self, request: SaveRequest) -> SaveHandle:
        """Begin a save whose ranks each `store_part`, and one of which then commits all parts."""
        return self._begin(request, new_id(request.step))

    def store_part(
        self,
        handle: SaveHandle,
        kind: str,
        sources: Sequence[Any],
        rank: int,
        session: WriterLock,
        *,
        leads: bool,
    ) -> StoredPart:
        """Write a rank's part in the thread that saves; returns when it is durable.

        ``sources`` are copied as memory gets free. Files carry the name of ``session``, whose end
        says that they are nobody's unless they were committed. The rank that ``leads`` commits.
        """
        began = time.perf_counter()
        layout = lay_out([source.nbytes for source in sources])
        extents = extents_of(sources, layout.offsets)

        def work(content: Content) -> StoredPart:
            if leads:
                self._prepare()
            writer, part = self._write(handle, content, rank, session, same_rank=True)
            if self._differ is not None:
                self._differ.end()
            stored = StoredPart(part, writer.written, began)
            if not leads:
                self._count(stored)
                handle.span.end()
            return stored

        self.store.check_usable()
        with self.saves.listed(handle):
            with self._in_turn() as turn:
                groups = staged(layout, sources, self.options.pool, turn)
                content = Content(kind, groups, extents, turn=turn)
                stored = self.saves.run(lambda: self._attempt(handle, content, work))
            return stored.result()

    def commit(
        self,
        handle: SaveHandle,
        own: StoredPart,
        parts: tuple[PartFile, ...],
        written: int,
        is_full: bool,
    ) -> None:
        """Commit the parts of all ranks, among them ``own``, behind the saves under way."""
        request = handle.request
        size = sum(part.size_bytes for part in parts)

        def work(_: None) -> None:
            if self.uploads is not None:
                self.uploads.before_save()
            if not is_full or self.uploads is not None:
                self._check_there(parts)
            with tracing.span("save.commit", step=request.step, checkpoint_id=handle.checkpoint_id):
                committed = CommittedParts(parts, size, written, is_full)
                manifest = self.committer.publish(handle.checkpoint_id, request, committed)
            self._count(own)
            self._after_commit(manifest)
            self._cleans = False
            handle.end_span(size, written)
            self.cleanup.clean()

        with self.saves.listed(handle):
            self.run_after_saves(lambda: self._attempt(handle, None, work))

    # The thread that saves

    def run_after_saves(self, job: Callable[[], R]) -> R:
        """Run a job behind the saves that are under way, and wait for its result."""
        self.store.check_usable()
        return self.saves.run(job).result()

    def _attempt(self, handle: SaveHandle, content: C, work: Callable[[C], R]) -> R:
        """Do the background part of a save; when it fails, the save has failed."""
        try:
            with handle.span.current():
                return work(content)
        except BaseException as exc:
            if isinstance(content, Content):
                # First: whoever makes the rest may wait for this memory.
                content.release_rest()
            self._untidy = True
            self.store.catalog.remember_chunks(None)
            if self._differ is not None:
                self._differ.forget()
            error = exc if isinstance(exc, StorageError) else _unexpected(handle.step, exc)
            log.error(
                "checkpoint.failed", step=handle.step, place=self.store.url, reason=str(error)
            )
            handle.span.fail(error)
            handle.span.end()
            handle.future.set_exception(error)
            raise

    def _run(self, handle: SaveHandle, content: Content) -> None:
        with suppress(BaseException):  # the handle has it
            saved = self._attempt(handle, content, lambda content: self._save(handle, content))
            handle.end_span(saved.size_bytes, saved.written_bytes)
            handle.future.set_result(saved)
        if self._cleans:
            # Whoever waits for the checkpoint need not wait for this.
            self._cleans = False
            self.cleanup.clean()

    def _save(self, handle: SaveHandle, content: Content) -> Saved:
        began = time.perf_counter()
        request = handle.request
        self._prepare()
        handle.checkpoint_id = handle.checkpoint_id or self.committer.begin(request)
        rank = self.committer.rank_of(request)
        writer, part = self._write(handle, content, rank, self.store.session)
        try:
            with tracing.span("save.commit", step=request.step, checkpoint_id=handle.checkpoint_id):
                manifest = self.committer.commit(
                    handle.checkpoint_id, request, part, writer.written
                )
        except CheckpointAbortedError as exc:
            if exc.may_be_committed:
                self.store.catalog.abandon([writer.file])
            else:
                writer.abort()
            raise
        except BaseException:
            self.store.catalog.abandon([writer.file])
            raise
        durable = time.perf_counter()
        self._count(StoredPart(part, writer.written, began))
        if self._differ is not None:
            self._differ.end()
        self._after_commit(manifest, part)
        return Saved(
            handle.checkpoint_id,
            request.step,
            part.length,
            writer.written,
            handle.stall_seconds,
            durable - handle.started,
        )

    def _prepare(self) -> None:
        """Learn what the commit has to follow, and collect what dead writers have left."""
        if self.uploads is not None:
            self.uploads.before_save()
        if self.committer.leads if self._untidy is None else self._untidy:
            self._untidy = not self.cleanup.make_room()

    def _write(
        self,
        handle: SaveHandle,
        content: Content,
        rank: int,
        session: WriterLock,
        *,
        same_rank: bool = False,
    ) -> tuple[PartWriter, Part]:
        """Write a part; chunks that the newest checkpoint has are referred to.

        With ``same_rank`` only those that it has of the same rank.
        """
        step = handle.step
        known = ChunkIndex()
        if not handle.request.is_full:
            damaged = self.uploads.damaged_files if self.uploads is not None else ()
            known = self.store.catalog.stored_chunks(rank if same_rank else None, damaged)
        if self._differ is not None:
            self._differ.begin()
        writer = PartWriter(
            self.store.backend,
            f"{session.tag(f'{step:012d}')}{os.urandom(4).hex()}.pack",
            content,
            compressor=self.options.compressor,
            known=known,
            differ=self._differ,
        )
        try:
            with tracing.span("save.write", step=step) as span:
                writer.write()
                span.set(written_bytes=writer.written)
            part = writer.part(rank)
            gone = self.store.catalog.missing([f for f in part.pack_files if f != writer.file])
            if gone:
                raise files_removed(self.store.backend.location(gone[0]))
        except BaseException:
            self.store.catalog.abandon([writer.file])
            raise
        return writer, part

    def _count(self, stored: StoredPart) -> None:
        self.estimates.add(
            stored.part.length,
            stored.written,
            time.perf_counter() - stored.began,
            is_full=stored.is_full,
        )

    def _check_there(self, parts: Iterable[PartFile]) -> None:
        """Make sure that the parts of all ranks, and packs of earlier checkpoints, are there."""
        catalog = self.store.catalog
        gone = catalog.missing({name for part in parts for name in (part.file, *part.packs)})
        if gone:
            raise StorageError(
                f"{catalog.backend.location(gone[0])} is not there although a checkpoint that is "
                "being saved refers to it, and the checkpoint is not committed: save again with "
                "is_full=True, let one job at a time save to a place, and use a local_tier only "
                "where all ranks share its folder"
            )

    def _after_commit(self, manifest: Manifest | None, part: Part | None = None) -> None:
        """Remember what is stored, and upload it if it is due."""
        self._has_committed = True
        self.store.catalog.remember_chunks(manifest, part)
        if manifest is None:
            return
        if self.uploads is not None:
            self.uploads.committed(manifest)
        self._cleans = True

    # Loading

    def settle(self) -> None:
        """Wait for saves under way, and complete commits of ranks that died."""
        self.store.check_usable()
        self.saves.wait_for_saves()
        if self.uploads is not None:
            self.uploads.begin()
        self.committer.heal()

    def load(
        self,
        which: int | str | None,
        read: Callable[[CheckpointCopy], R],
        *,
        is_one: Callable[[Manifest], bool] = lambda manifest: True,
        own_part: bool = False,
    ) -> R:
        """What ``read`` makes of a checkpoint: of a step, of an id, or the newest good one.

        ``is_one`` and ``own_part`` are those of `CheckpointLoader.newest_good`.
        """
        self.settle()

        def noted(copy: CheckpointCopy) -> R:
            value = read(copy)
            self.loader.note(copy)
            return value

        if which is None:
            return self.loader.newest_good(noted, own_part=own_part, is_one=is_one)
        if isinstance(which, str):
            return self.loader.with_id(which, noted)
        return self.loader.of_step(check_whole("step", which), noted)

    def has_kind(self, step: int, kind: str) -> bool:
        """Whether the checkpoint of a step is of a kind."""
        return self.loader.of_step(step, lambda copy: is_kind(copy.manifest, kind))

    # Waiting and closing

    def close(self) -> None:
        """Wait for saves and uploads, and release everything; raises what has failed unseen."""
        if not self.store.is_ours or not self._closing.acquire(blocking=False):
            return
        self.saves.close()
        try:
            self._close_stores()
        finally:
            shutdown.release(self.saves)
            self.saves.raise_failure()

    def close_with(self, owner: object) -> None:
        """Close when an owner is garbage-collected, or else when the process ends."""
        weakref.finalize(owner, self._close_soon).atexit = False
        _closed_at_end.add(self)

    def _close_soon(self) -> None:
        """Close, or let the thread that saves do so, without a lock that others may hold.

        The collector may run wherever memory is allocated, also within `shutdown`.
        """
        if self.saves.is_used:
            self.saves.end_with(self._close_unwatched)
        elif self.uploads is None or not self.uploads.is_used:
            self._close_unwatched()

    def _close_unwatched(self) -> None:
        if not self.store.is_ours or not self._closing.acquire(blocking=False):
            return
        is_held = self.saves.is_used
        try:
            self._close_stores()
        except Exception as exc:
            log.error("checkpoint.not_closed", place=self.store.url, reason=str(exc))
        if is_held:
            shutdown.release(self.saves)

    def _close_stores(self) -> None:
        try:
            if self.uploads is None:
                if self._has_committed:
                    self.cleanup.clean_at_end()
            else:
                self.uploads.close()
                if self.uploads.has_uploaded:
                    self.cleanup.clean(for_good=True)
        finally:
            self.store.close()
            self.main.close()


_closed_at_end: weakref.WeakSet[CheckpointEngine] = weakref.WeakSet()


def _close_all() -> None:
    for engine in list(_closed_at_end):
        try:
            engine.close()
        except Exception as exc:
            log.error("checkpoint.not_closed", place=engine.store.url, reason=str(exc))


shutdown.at_end(_close_all)


def _unexpected(step: int, error: BaseException) -> StorageError:
    wrapped = StorageError(f"the checkpoint of step {step} failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
