"""Saves in the background: from a state in memory to a committed checkpoint."""

from __future__ import annotations

import array
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .._background import deadline_after, time_left
from .._shutdown import shutdown
from ..client import TrainingOrchestrator, current_orchestrator
from ..errors import CheckpointAbortedError, CheckpointDamagedError, StorageError, StrataError
from ..telemetry import EventLog, tracing
from ..types import WorkerState
from .file_format.chunks import ChunkIndex, Compressor, lay_out
from .file_format.manifest import PACKS, Extent, Manifest, Part, is_stored_in_full
from .save.commit import Committer, SaveRequest
from .save.handle import (
    GroupQueue,
    JobThread,
    LentGroups,
    Saved,
    SaveEstimates,
    SaveHandle,
    groups_of,
    watched,
)
from .save.pack_writer import DeltaEncoder, Group, PartWriter
from .save.staging import StagingPool, StagingTurn, staged
from .state_dict import Buffer, flatten
from .store.catalog import files_removed
from .store.checkpoint_store import CheckpointStore, Cleanup
from .upload.uploader import Uploader

log = EventLog("checkpoint")


LEFTOVER_SECONDS = 60.0
"""What a dead process has left of unfinished files is removed when it is older."""


@dataclass(frozen=True, slots=True)
class _Content:
    """A stream on its way."""

    groups: Iterator[Group]
    kind: str
    extents: tuple[Extent, ...] = ()
    skeleton: Any = None
    lent: LentGroups = field(default_factory=LentGroups)


class Pipeline:
    """Takes states in, and commits them one after the other.

    While saves are under way, or have failed untold, it is held as work that has to be finished
    before the process ends (`shutdown`), whether or not anybody else has it.
    """

    def __init__(
        self,
        place: CheckpointStore,
        commits: Committer,
        *,
        pool: StagingPool,
        compressor: Compressor,
        upkeep: Cleanup,
        delta: bool,
        uploads: Uploader | None = None,
        exit_seconds: float = 600.0,
    ) -> None:
        self._place = place
        self._commits = commits
        self.pool = pool
        self.compressor = compressor
        self.upkeep = upkeep
        self.estimates = SaveEstimates()
        self.exit_seconds = exit_seconds
        self._uploads = uploads
        if uploads is not None:
            uploads.queue.on_busy = _holding(self)
        self._not_uploaded: list[str] = []
        self._differ = DeltaEncoder() if delta else None
        self._saver = JobThread("strata-save")
        self._handles: list[SaveHandle] = []
        self._lock = threading.Lock()
        self._order = threading.Lock()
        self._known: tuple[str, ChunkIndex] | None = None
        self._untidy: bool | None = None
        """Whether there may be something to collect before the next save; None: if it leads."""
        self._cleans = False
        """Whether there may be something that is not kept any more after this one."""
        self.has_committed = False

    def take(self, state: Any, wanted: SaveRequest) -> SaveHandle:
        """Begin a save; returns when the state is not needed any more."""
        self._check_accepted(wanted)
        handle = self._handle(wanted)
        with _staging(handle):
            view = _bytes_like(state)
            if view is None:
                tree = flatten(state)
                self._take_buffers("state", tree.skeleton, tree.buffers, wanted, handle)
            else:
                groups = groups_of(view, steady=isinstance(state, bytes))
                if not view.readonly:
                    groups = watched(view, groups, f"the buffer saved at step {wanted.step}")
                handle.stall_seconds = time.perf_counter() - handle.started
                self._submit(handle, wanted, _Content(groups, "bytes"))
        return handle

    def take_planned(
        self, kind: str, plan: Callable[[], tuple[Any, list[Buffer]]], wanted: SaveRequest
    ) -> SaveHandle:
        """As `take`, of a part of some kind, whose skeleton and memory ``plan`` tells."""
        self._check_accepted(wanted)
        handle = self._handle(wanted)
        with _staging(handle):
            skeleton, buffers = plan()
            self._take_buffers(kind, skeleton, buffers, wanted, handle)
        return handle

    def wait_for_saves(self, timeout: float | None = None) -> bool:
        """Wait until no save is under way; whether that is so."""
        with current_orchestrator.doing(WorkerState.CHECKPOINTING):
            return self._saver.wait(timeout)

    def close(self) -> None:
        """Wait, and end the thread."""
        self._saver.close()

    def raise_failure(self) -> None:
        """Raise the error of a save that failed and that nobody looked at."""
        for handle in self._untold():
            handle.wait()

    def _untold(self) -> list[SaveHandle]:
        """Saves that failed, and nobody looked at."""
        with self._lock:
            ended = [handle for handle in self._handles if handle.done and not handle.looked_at]
        return [handle for handle in ended if handle.future.exception() is not None]

    # At the end of the process

    @property
    def is_busy(self) -> bool:
        """Whether a save or an upload is under way."""
        return self._saver.is_busy or (self._uploads is not None and self._uploads.queue.is_busy)

    @property
    def is_needed(self) -> bool:
        """Whether something is under way, has failed untold, or is to be uploaded at the end."""
        left = self._uploads is not None and self._uploads.is_needed
        return left or self.is_busy or bool(self._untold())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is under way; whether that is so."""
        deadline = deadline_after(timeout)
        if not self._saver.wait(timeout):
            return False
        return self._uploads is None or self._uploads.queue.idle(time_left(deadline))

    def finish(self) -> None:
        """Wait for the saves, and bring the newest checkpoint to the main storage."""
        self._saver.wait()
        if self._uploads is None or not self._uploads.is_needed:
            return
        try:
            self._uploads.flush()
        except Exception as exc:
            self._not_uploaded.append(str(exc))
            log.error("checkpoint.not_uploaded", place=self._place.url, reason=str(exc))
            self._uploads.queue.give_up()

    def unfinished(self) -> list[str]:
        """What is under way."""
        with self._lock:
            saves = [handle.step for handle in self._handles if not handle.done]
        uploads = self._uploads.queue.steps() if self._uploads is not None else []
        return [f"the checkpoint of step {step} in {self._place.url}" for step in saves] + [
            f"the upload of the checkpoint of step {step}" for step in uploads
        ]

    def failures(self) -> list[str]:
        """What has failed, and nobody was told before."""
        told = []
        for handle in self._untold():
            handle.looked_at = True
            told.append(_not_stored(handle.step, self._place.url, handle.future.exception()))
        uploads, self._not_uploaded = self._not_uploaded, []
        return told + uploads

    def _check_accepted(self, wanted: SaveRequest) -> None:
        if why := shutdown.refusal():
            self._refuse(wanted, why)

    def _refuse(self, wanted: SaveRequest, why: str) -> NoReturn:
        sentence = _not_stored(wanted.step, self._place.url, why)
        shutdown.lose(sentence)
        raise StorageError(sentence)

    # Staging, in the caller's thread

    def _handle(self, wanted: SaveRequest) -> SaveHandle:
        span = _span(wanted) if tracing.is_on() else tracing.NO_SPAN
        return SaveHandle(wanted.step, self._commits.new_id(wanted.step), self._uploads, span)

    def _take_buffers(
        self,
        kind: str,
        skeleton: Any,
        buffers: list[Buffer],
        wanted: SaveRequest,
        handle: SaveHandle,
    ) -> None:
        layout = lay_out([buffer.nbytes for buffer in buffers])
        extents = tuple(
            Extent(offset, buffer.nbytes, buffer.dtype, buffer.key)
            for offset, buffer in zip(layout.offsets, buffers, strict=True)
        )
        versions = [buffer.version() for buffer in buffers]
        sources, kept = self._sources(buffers)
        if kept:
            # The device has a copy of its own, which is fetched in the background.
            _check_versions(buffers, versions, wanted.step)
            with self._in_turn() as turn:
                groups = staged(layout, sources, self.pool, turn)
                handle.stall_seconds = time.perf_counter() - handle.started
                self._submit(handle, wanted, _Content(groups, kind, extents, skeleton))
            return
        queue = GroupQueue()
        with self._in_turn() as turn:
            self._submit(handle, wanted, _Content(iter(queue), kind, extents, skeleton))
        try:
            for group in staged(layout, sources, self.pool, turn, queue.let_go):
                queue.put(group)
            _check_versions(buffers, versions, wanted.step)
        except BaseException as exc:
            handle.looked_at = True
            queue.end(exc)
            raise
        handle.stall_seconds = time.perf_counter() - handle.started
        queue.end()

    def _sources(self, buffers: list[Buffer]) -> tuple[Sequence[Any], bool]:
        """What to copy from, and whether it stays as it is when the caller goes on."""
        if not any(buffer.device.startswith("cuda") for buffer in buffers):
            return buffers, False
        from .save import cuda

        self.pool.pin = cuda.pin
        snapshot = cuda.snapshot(buffers)
        return (cuda.sources(buffers), False) if snapshot is None else (snapshot, True)

    @contextmanager
    def _in_turn(self) -> Iterator[StagingTurn]:
        """A turn to get memory; what is submitted meanwhile is written in the same order."""
        with self._order:
            turn = self.pool.turn()
            try:
                yield turn
            except BaseException:
                turn.give_up()
                raise

    def _submit(self, handle: SaveHandle, wanted: SaveRequest, content: _Content) -> None:
        if isinstance(wanted.coordinator, TrainingOrchestrator):
            wanted.coordinator.expect_commit(handle.future)
        with self._lock:
            self._handles = [h for h in self._handles if not (h.done and h.looked_at)]
            self._handles.append(handle)
        try:
            self.submit(lambda: self._run(handle, wanted, content))
        except RuntimeError as exc:
            handle.looked_at = True
            self._refuse(wanted, f"the program has ended ({exc}): save before that")

    # Writing, in the background

    def submit(self, job: Callable[[], None]) -> None:
        """Do something in the thread that saves, behind the saves that are under way."""
        self._saver.submit(job)
        shutdown.hold(self)

    def before_save(self) -> None:
        """Learn what the next commit has to follow."""
        if self._uploads is not None:
            self._uploads.before_save()

    def committed(self, manifest: Manifest) -> None:
        """See to a checkpoint that was committed here."""
        if self._uploads is not None:
            self._uploads.committed(manifest)

    def _run(self, handle: SaveHandle, wanted: SaveRequest, content: _Content) -> None:
        try:
            with handle.span.current():
                saved = self._write(handle, wanted, content)
        except BaseException as exc:
            # First: whoever makes the rest may wait for this memory.
            content.lent.done_with_all()
            for group in _rest(content.groups):
                group.done()
            self._untidy = True
            self._known = None
            if self._differ is not None:
                self._differ.forget()
            error = exc if isinstance(exc, StorageError) else _unexpected(wanted.step, exc)
            log.error(
                "checkpoint.failed", step=wanted.step, place=self._place.url, reason=str(error)
            )
            handle.span.fail(error)
            handle.span.end()
            handle.future.set_exception(error)
            return
        handle.span.set(
            checkpoint_id=saved.checkpoint_id,
            size_bytes=saved.size_bytes,
            written_bytes=saved.written_bytes,
        )
        handle.span.end()
        handle.future.set_result(saved)
        if self._cleans:
            # Whoever waits for the checkpoint need not wait for this.
            self._cleans = False
            self.upkeep.clean()

    def _write(self, handle: SaveHandle, wanted: SaveRequest, content: _Content) -> Saved:
        began = time.perf_counter()
        self.before_save()
        if self._commits.leads if self._untidy is None else self._untidy:
            self._tidy()
        handle.checkpoint_id = handle.checkpoint_id or self._commits.begin(wanted)
        known = ChunkIndex() if wanted.is_full else self._known_chunks()
        if self._differ is not None:
            self._differ.begin()
        session = self._place.session
        writer = PartWriter(
            self._place.backend,
            f"{session.tag(f'{wanted.step:012d}')}{os.urandom(4).hex()}.pack",
            compressor=self.compressor,
            known=known,
            differ=self._differ,
            widths=_widths(content.extents),
        )
        try:
            with tracing.span("save.write", step=wanted.step) as span:
                lent = content.lent
                writer.write(lent.track(content.groups), lent.done, lent.done_with_all)
                span.set(written_bytes=writer.written)
            rank = self._commits.rank_of(wanted)
            part = writer.part(rank, content.kind, content.extents, content.skeleton)
            self._check_others(part, writer.file)
            with tracing.span("save.commit", step=wanted.step, checkpoint_id=handle.checkpoint_id):
                manifest = self._commits.commit(handle.checkpoint_id, wanted, part, writer.written)
        except CheckpointAbortedError as exc:
            if exc.may_be_committed:
                self._place.catalog.abandon([writer.file])
            else:
                writer.abort()
            raise
        except BaseException:
            self._place.catalog.abandon([writer.file])
            raise
        durable = time.perf_counter()
        full = is_stored_in_full(part, writer.written)
        self.estimates.add(part.length, writer.written, durable - began, is_full=full)
        self._after_commit(manifest, part)
        return Saved(
            handle.checkpoint_id,
            wanted.step,
            part.length,
            writer.written,
            handle.stall_seconds,
            durable - handle.started,
        )

    def _tidy(self) -> None:
        """Collect what dead writers and failed saves have left, so that there is room."""
        try:
            # Before anything is swept: parts of what was committed must not be taken for leftovers.
            self._commits.heal()
            # Whoever committed the last one may have died before it dropped the one too many.
            self.upkeep.retain()
            self.upkeep.sweep()
            self._place.backend.sweep(LEFTOVER_SECONDS)
        except StrataError as exc:
            log.warning("checkpoint.not_cleaned", place=self._place.url, reason=str(exc))
            return
        self._untidy = False

    def collect_for_good(self) -> None:
        """Collect all that no checkpoint needs; no save of this writer follows.

        Not while others write here, who may refer to it, nor where something may be committed
        whose manifest nobody has written yet.
        """
        if not self.has_committed or not self._place.session.is_alone():
            return
        try:
            is_seen = self._commits.heal()
        except StrataError as exc:
            log.warning("checkpoint.not_cleaned", place=self._place.url, reason=str(exc))
            return
        if is_seen:
            self.upkeep.clean(for_good=True)

    def _check_others(self, part: Part, own: str) -> None:
        """Make sure that packs of earlier checkpoints are there, before others are told of it."""
        catalog = self._place.catalog
        gone = catalog.missing([file for file in part.pack_files if file != own])
        if gone:
            raise files_removed(catalog.backend.location(gone[0]))

    def _after_commit(self, manifest: Manifest | None, part: Part) -> None:
        """Remember what is stored."""
        self.has_committed = True
        if self._differ is not None:
            self._differ.end()
        if manifest is None:
            self._known = None
            return
        # What other ranks have stored is read when it is needed.
        alone = len(manifest.parts) == 1
        self._known = (manifest.name, ChunkIndex([part])) if alone else None
        self.committed(manifest)
        self._cleans = True

    def _known_chunks(self) -> ChunkIndex:
        """What the newest good checkpoint has; nothing when it cannot be read."""
        catalog = self._place.catalog
        newest = catalog.base()
        if newest is None:
            return ChunkIndex()
        if self._known is None or self._known[0] != newest.name:
            try:
                parts = catalog.parts(catalog.manifest(newest))
            except CheckpointDamagedError as exc:
                catalog.note_damage(newest, exc)
                return self._known_chunks()
            except StorageError as exc:
                log.warning("checkpoint.saved_in_full", reason=str(exc))
                return ChunkIndex()
            self._known = newest.name, ChunkIndex(parts)
        known, backend = self._known[1], self._place.backend
        damaged = self._uploads.damaged_files if self._uploads is not None else ()
        there = {file.name: file.size for file in backend.list(PACKS)}
        known.forget_missing({n: s for n, s in there.items() if backend.location(n) not in damaged})
        known.forget(catalog.is_damaged)
        return known


def _holding(pipeline: Pipeline) -> Callable[[], None]:
    """A function that holds a pipeline; what it is given to does not keep the pipeline alive."""
    reference = weakref.ref(pipeline)

    def hold() -> None:
        if (found := reference()) is not None:
            shutdown.hold(found)

    return hold


def _span(wanted: SaveRequest) -> tracing.Span:
    """The span of a save, with who saves."""
    worker = current_orchestrator.current()
    identity = {} if worker is None or not worker.is_registered else worker.described()
    return tracing.span(
        "save", step=wanted.step, epoch=wanted.epoch, is_full=wanted.is_full, **identity
    )


@contextmanager
def _staging(handle: SaveHandle) -> Iterator[None]:
    """The part of a save that keeps the caller; what fails here ends the save."""
    try:
        with (
            current_orchestrator.doing(WorkerState.CHECKPOINTING),
            handle.span.current(),
            tracing.span("save.stage", step=handle.step),
        ):
            yield
    except BaseException as exc:
        handle.span.fail(exc)
        handle.span.end()
        raise


def _rest(groups: Iterator[Group]) -> Iterator[Group]:
    """Groups that are still to come after a failure, as far as they come."""
    try:
        yield from groups
    except BaseException as exc:
        log.debug("checkpoint.abandoned", reason=str(exc))


def _check_versions(buffers: list[Buffer], before: list[object], step: int) -> None:
    for buffer, version in zip(buffers, before, strict=True):
        if buffer.version() != version:
            raise StorageError(
                f"{buffer.key} was changed while step {step} was being copied, and the checkpoint "
                "is not committed: do not train while save() runs"
            )


def _bytes_like(state: Any) -> memoryview | None:
    """The bytes of what is saved as it is; arrays are states."""
    if not isinstance(state, bytes | bytearray | memoryview | mmap.mmap | array.array):
        return None
    view = memoryview(state)
    if not view.c_contiguous:
        raise ValueError("a memoryview must be contiguous to be saved")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _widths(extents: tuple[Extent, ...]) -> Callable[[int], int]:
    """How large the elements are at a place of the stream."""
    starts = [extent.offset for extent in extents]

    def width(offset: int) -> int:
        number = bisect_right(starts, offset) - 1
        return _itemsize(extents[number].dtype) if number >= 0 else 1

    return width


def _itemsize(dtype: str) -> int:
    bits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


def _not_stored(step: int, url: str, why: object) -> str:
    return f"the checkpoint of step {step} is not in {url}: {why}"


def _unexpected(step: int, error: BaseException) -> StorageError:
    wrapped = StorageError(f"the checkpoint of step {step} failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
