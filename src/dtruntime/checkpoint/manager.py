"""`CheckpointManager`: saves that do not stall training, and loads that are checked."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import psutil

from ..config import Config
from ..errors import CheckpointNotFoundError, StorageError
from ..storage import StorageBackend, open_backend, resolve_url
from ..telemetry import EventLog
from ..types import CheckpointInfo, check_whole
from .catalog import Catalog
from .codecs import Compressor
from .format import Extent, Manifest, Part
from .known import KnownChunks
from .layout import lay_out
from .policy import SavePolicy
from .reader import PartReader
from .retention import Retention
from .saving import GroupQueue, Saved, SaveHandle, Saver, groups_of, stage, watched
from .sessions import Session
from .staging import SLAB, StagingPool
from .trees import Rebuild, flatten
from .writer import Differ, Group, PartWriter

log = EventLog("checkpoint")

EXIT_SECONDS = 600.0


class Committer(Protocol):
    """Tells a coordinator what was committed."""

    def commit_checkpoint(
        self,
        checkpoint_id: str,
        step: int,
        *,
        epoch: int,
        path: str,
        size_bytes: int,
        is_full: bool,
    ) -> None:
        """Record a checkpoint that is safely stored."""


class CheckpointManager:
    """Checkpoints in one place: a folder, a bucket, or memory for tests.

    `save` returns as soon as the state may be changed again; everything else happens in the
    background, one save after the other. A save that fails raises from its handle, or else from
    the next `save`, `wait` or `close`. Only committed checkpoints are listed and loaded.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str] | None = None,
        backend: str | None = None,
        keep_count: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        orchestrator: Committer | None = None,
        compression: str | None = None,
        incremental: bool = False,
        delta: bool = False,
        keep_every: int | None = None,
        keep_best: int = 0,
        metric: str = "loss",
        higher_is_better: bool = False,
        interval_steps: int | None = None,
        interval_seconds: float | None = None,
        memory_budget: int | None = None,
        **storage_options: Any,
    ) -> None:
        """Nothing is read or written before the first use.

        - ``storage_path`` (or ``path``) is a path or a URL (``s3://``, ``gs://``, ``az://``,
          ``file://``). With ``backend="s3"`` a plain path is a prefix in ``CHECKPOINT_BUCKET``.
        - ``keep_count`` newest checkpoints are kept, and those that ``keep_every`` so many steps
          and ``keep_best`` by ``metric`` ask for.
        - ``compression`` is ``none``, ``gzip`` or ``zstd``; chunks that do not get smaller are
          stored as they are. ``incremental`` makes every save one, ``delta`` stores differences
          from the save before and keeps that one in memory.
        - ``memory_budget`` bounds the memory that saves under way may take; a save waits when
          it is used up. By default it is a quarter of the machine's memory.
        - ``orchestrator`` is told of each commit.
        - ``storage_options`` go to the backend: ``endpoint``, ``region`` and the like.
        """
        place = storage_path if storage_path is not None else path
        if place is None:
            raise TypeError("CheckpointManager needs a storage_path (or path)")
        if storage_path is not None and path is not None:
            raise TypeError("give storage_path or path, not both: they are the same")
        config = Config.load()
        self._url = resolve_url(os.fspath(place), backend, config.storage)
        self._options = storage_options
        chosen = config.checkpoint
        self._retention = Retention(
            chosen.keep_last_n if keep_count is None else keep_count,
            keep_every,
            keep_best,
            metric,
            higher_is_better,
        )
        self._compressor = Compressor(compression or chosen.compression)
        self._incremental = incremental or delta
        self._differ = Differ() if delta else None
        if delta:
            Compressor("zstd")
        self.policy = SavePolicy(
            chosen.interval_steps if interval_steps is None else interval_steps, interval_seconds
        )
        self._pool = StagingPool(memory_budget or _default_budget())
        self._committer = orchestrator
        self._saver = Saver("strata-save")
        self._handles: list[SaveHandle] = []
        self._lock = threading.RLock()
        self._opened: tuple[Catalog, Session] | None = None
        self._known: tuple[Manifest, KnownChunks] | None = None
        self._closed = False
        self._process = os.getpid()
        _finish_at_exit(self)

    # Saving

    def should_save(self, step: int) -> bool:
        """Whether it is time for a checkpoint, by the interval in steps or seconds."""
        return self.policy.should_save(step)

    def save(
        self,
        state_dict: Any,
        step: int,
        epoch: int = 0,
        is_full: bool = True,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SaveHandle:
        """Save a state dict, or anything bytes-like, and return when it may be changed.

        Bytes are saved where they lie and not copied: a buffer that can be written to must not be
        before the handle is done. ``is_full=False`` stores only what has changed since the last
        checkpoint.
        """
        self._check_usable()
        check_whole("step", step)
        check_whole("epoch", epoch)
        self._raise_failure()
        draft = partial(
            Manifest,
            step=step,
            epoch=epoch,
            created_at=time.time(),
            metrics={key: float(value) for key, value in (metrics or {}).items()},
            metadata={key: str(value) for key, value in (metadata or {}).items()},
        )
        handle = SaveHandle(step, self._new_id(step))
        self._hand_over(state_dict, handle, draft, is_full and not self._incremental)
        self.policy.saved(step)
        handle.stall_seconds = time.perf_counter() - handle.started
        return handle

    async def save_async(self, data: Any, step: int, epoch: int = 0, **options: Any) -> SaveHandle:
        """As `save`, with copying in another thread; the handle can be awaited for the commit."""
        return await asyncio.to_thread(self.save, data, step, epoch, **options)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves are committed; raises when one failed that nobody looked at."""
        if not self._saver.wait(timeout):
            raise TimeoutError(f"saves to {self._url} are still under way after {timeout} s")
        self._raise_failure()

    # Loading

    def load_state(
        self,
        step: int | None = None,
        *,
        map_location: Any = None,
        keys: Iterable[str] | None = None,
    ) -> Any:
        """Load a state dict: the newest, or that of a step.

        When the newest is damaged, the newest good one is loaded instead, with a loud warning; a
        step that was asked for by number is loaded or raises. ``keys`` restores only parts.
        """
        return self._load(step, lambda m: self._state_of(m, map_location, keys))

    async def load_state_async(self, step: int | None = None, **options: Any) -> Any:
        """As `load_state`, in another thread."""
        return await asyncio.to_thread(self.load_state, step, **options)

    def load_bytes(self, step: int | None = None) -> bytes:
        """Load what was saved as bytes: the newest (also for step 0), or that of a step."""
        return bytes(self._load(step or None, self._bytes_of))

    async def load(self, step: int | None = None) -> bytes:
        """As `load_bytes`, in another thread."""
        return await asyncio.to_thread(self.load_bytes, step)

    def load_latest(self) -> CheckpointInfo:
        """The newest checkpoint that is whole; `get_checkpoint` gives its bytes."""
        self._settle()

        def checked(manifest: Manifest) -> CheckpointInfo:
            for part in self._catalog.parts(manifest):
                problems = PartReader(self._backend, part, _title(manifest)).verify()
                if problems:
                    raise problems[0]
            return self._info(manifest)

        newest: CheckpointInfo = self._newest_good(checked)
        return newest

    def get_checkpoint(self, checkpoint_id: str) -> bytes:
        """The bytes of a checkpoint, by its id."""
        self._settle()
        for entry in reversed(self._catalog.entries()):
            manifest = self._catalog.manifest(entry)
            if manifest.checkpoint_id == checkpoint_id:
                return bytes(self._bytes_of(manifest))
        raise CheckpointNotFoundError(f"there is no checkpoint {checkpoint_id!r} in {self._url}")

    def steps(self) -> list[int]:
        """The steps of all checkpoints, ascending."""
        self._settle()
        return sorted({entry.step for entry in self._catalog.entries()})

    async def list_checkpoints(self) -> list[int]:
        """As `steps`, in another thread."""
        return await asyncio.to_thread(self.steps)

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, in the order of their commits."""
        self._settle()
        return [self._info(self._catalog.manifest(entry)) for entry in self._catalog.entries()]

    # Closing

    def close(self) -> None:
        """Wait for saves under way, and release everything; raises as `wait` does."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        self._saver.close()
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()
            opened[0].backend.close()
        self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Inside: saving

    def _hand_over(
        self, state: Any, handle: SaveHandle, draft: Callable[..., Manifest], is_full: bool
    ) -> None:
        """Give a save to the background; returns when the state is not needed any more."""
        groups = GroupQueue()
        view = _bytes_like(state)
        if view is not None:
            source: Iterable[Group] = groups_of(view)
            if not view.readonly:
                source = watched(view, groups_of(view), f"the buffer saved at step {handle.step}")
            self._submit(handle, draft, is_full, iter(source), ("bytes", (), None))
            return
        tree = flatten(state)
        layout = lay_out([buffer.nbytes for buffer in tree.buffers])
        extents = tuple(
            Extent(offset, b.nbytes, b.dtype, b.key)
            for offset, b in zip(layout.offsets, tree.buffers, strict=True)
        )
        described = "state", extents, tree.skeleton
        versions = [buffer.version() for buffer in tree.buffers]
        self._submit(handle, draft, is_full, iter(groups), described, groups)
        try:
            stage(layout, tree.buffers, self._pool, groups)
            for buffer, version in zip(tree.buffers, versions, strict=True):
                if buffer.version() != version:
                    raise StorageError(
                        f"{buffer.key} was changed while step {handle.step} was being copied, and "
                        "the checkpoint is not committed: do not train while save() runs"
                    )
        except BaseException as exc:
            groups.end(exc)
            handle.looked_at = True
            raise
        groups.end()

    def _submit(
        self,
        handle: SaveHandle,
        draft: Callable[..., Manifest],
        is_full: bool,
        groups: Any,
        described: tuple[str, tuple[Extent, ...], Any],
        queue: GroupQueue | None = None,
    ) -> None:
        with self._lock:
            self._handles = [h for h in self._handles if not (h.done and h.looked_at)]
            self._handles.append(handle)
        self._saver.submit(lambda: self._run(handle, draft, is_full, groups, described, queue))

    def _run(
        self,
        handle: SaveHandle,
        draft: Callable[..., Manifest],
        is_full: bool,
        groups: Any,
        described: tuple[str, tuple[Extent, ...], Any],
        queue: GroupQueue | None,
    ) -> None:
        """Write and commit one save, in the background."""
        try:
            saved = self._write(handle, draft, is_full, groups, described, queue)
        except BaseException as exc:
            if queue is not None:
                queue.drain()
            if self._differ is not None:
                self._differ.forget()
            error = exc if isinstance(exc, StorageError) else _unexpected(handle.step, exc)
            log.error("checkpoint.failed", step=handle.step, place=self._url, reason=str(error))
            handle.future.set_exception(error)
            return
        handle.future.set_result(saved)

    def _write(
        self,
        handle: SaveHandle,
        draft: Callable[..., Manifest],
        is_full: bool,
        groups: Any,
        described: tuple[str, tuple[Extent, ...], Any],
        queue: GroupQueue | None,
    ) -> Saved:
        catalog, session = self._open()
        known = KnownChunks() if is_full else self._known_chunks()
        kind, extents, skeleton = described
        if self._differ is not None:
            self._differ.begin()
        writer = PartWriter(
            catalog.backend,
            f"{session.tag(f'{handle.step:012d}')}{handle.checkpoint_id[-8:]}.pack",
            compressor=self._compressor,
            known=known,
            differ=self._differ,
            widths=_widths(extents),
        )
        if queue is None:
            writer.write(groups)
        else:
            writer.write(groups, queue.done)
        part = writer.part(0, kind, extents, skeleton)
        try:
            manifest = catalog.commit(
                lambda sequence: draft(
                    checkpoint_id=handle.checkpoint_id,
                    sequence=sequence,
                    is_full=all(pack.file == writer.file for pack in part.packs),
                    size_bytes=part.length,
                    written_bytes=writer.written,
                    parts=(part,),
                )
            )
        except BaseException:
            writer.abort()
            raise
        self._after_commit(manifest, [part])
        return Saved(
            manifest.checkpoint_id,
            manifest.step,
            manifest.size_bytes,
            manifest.written_bytes,
            handle.stall_seconds,
            time.perf_counter() - handle.started,
        )

    def _after_commit(self, manifest: Manifest, parts: list[Part]) -> None:
        """Remember what is stored, tell the coordinator, and clear away what is not kept."""
        self._known = manifest, KnownChunks(parts)
        if self._differ is not None:
            self._differ.end()
        if self._committer is not None:
            self._committer.commit_checkpoint(
                manifest.checkpoint_id,
                manifest.step,
                epoch=manifest.epoch,
                path=self._backend.location(manifest.name),
                size_bytes=manifest.size_bytes,
                is_full=manifest.is_full,
            )
        try:
            self._catalog.retain(self._retention)
            self._sweep()
        except StorageError as exc:
            log.warning("checkpoint.not_cleaned", place=self._url, reason=str(exc))

    def _known_chunks(self) -> KnownChunks:
        """What the newest checkpoint has; nothing when it cannot be read."""
        newest = self._catalog.find()
        if newest is None:
            return KnownChunks()
        if self._known is not None and self._known[0].name == newest.name:
            return self._known[1]
        try:
            manifest = self._catalog.manifest(newest)
            return KnownChunks(self._catalog.parts(manifest))
        except StorageError as exc:
            log.warning("checkpoint.saved_in_full", reason=str(exc))
            return KnownChunks()

    def _sweep(self) -> None:
        catalog, session = self._open()
        deleted = catalog.sweep(session.is_dead)
        session.forget_dead()
        if deleted:
            log.debug("checkpoint.swept", files=len(deleted), place=self._url)

    # Inside: loading

    def _load(self, step: int | None, read: Callable[[Manifest], Any]) -> Any:
        self._settle()
        if step is None:
            return self._newest_good(read)
        entry = self._catalog.find(check_whole("step", step))
        if entry is None:
            there = ", ".join(map(str, self.steps()[-8:])) or "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {self._url} (there: {there})"
            )
        return read(self._catalog.manifest(entry))

    def _newest_good(self, read: Callable[[Manifest], Any]) -> Any:
        """What ``read`` makes of the newest checkpoint, or of the newest that it can be made of."""
        entries = self._catalog.entries()
        if not entries:
            raise CheckpointNotFoundError(f"there is no checkpoint in {self._url}")
        first: StorageError | None = None
        for entry in reversed(entries):
            try:
                found = read(self._catalog.manifest(entry))
            except StorageError as exc:
                first = first or exc
                log.error("checkpoint.damaged", step=entry.step, reason=str(exc))
                continue
            if first is not None:
                log.error("checkpoint.fell_back", to_step=entry.step, place=self._url)
            return found
        assert first is not None
        raise first

    def _bytes_of(self, manifest: Manifest) -> bytearray:
        part = self._one_part(manifest)
        if part.kind != "bytes":
            raise TypeError(f"{_title(manifest)} is a state dict: use load_state()")
        return PartReader(self._backend, part, _title(manifest)).read()

    def _state_of(self, manifest: Manifest, map_location: Any, keys: Iterable[str] | None) -> Any:
        part = self._one_part(manifest)
        if part.kind != "state":
            raise TypeError(f"{_title(manifest)} is bytes, not a state dict: use load()")
        reader = PartReader(self._backend, part, _title(manifest))
        plan = Rebuild(part.skeleton, map_location=map_location, keys=keys)
        reader.read_into((part.extents[i].offset, view) for i, view in plan.destinations())
        return plan.finish()

    def _one_part(self, manifest: Manifest) -> Part:
        return self._catalog.part(manifest.parts[0])

    def _info(self, manifest: Manifest) -> CheckpointInfo:
        return CheckpointInfo(
            checkpoint_id=manifest.checkpoint_id,
            step=manifest.step,
            epoch=manifest.epoch,
            path=self._backend.location(manifest.name),
            size_bytes=manifest.size_bytes,
            is_full=manifest.is_full,
            parts=len(manifest.parts),
            committed_at=manifest.created_at,
            metadata=manifest.metadata,
        )

    # Inside: the rest

    @property
    def _catalog(self) -> Catalog:
        return self._open()[0]

    @property
    def _backend(self) -> StorageBackend:
        return self._open()[0].backend

    def _open(self) -> tuple[Catalog, Session]:
        with self._lock:
            if self._opened is None:
                backend = open_backend(self._url, **self._options)
                self._opened = Catalog(backend), Session(backend)
                self._opened[1].open()
            return self._opened

    def _settle(self) -> None:
        """Wait for saves under way, so that they are seen."""
        self._check_usable()
        self._saver.wait()

    def _check_usable(self) -> None:
        if self._closed:
            raise StorageError(f"the manager of {self._url} is closed")
        if self._process != os.getpid():
            raise StorageError(
                f"the manager of {self._url} was made in process {self._process}, not in this one: "
                "make one here"
            )

    def _raise_failure(self) -> None:
        with self._lock:
            for handle in self._handles:
                if handle.done and not handle.looked_at and handle.future.exception():
                    handle.wait()

    def _new_id(self, step: int) -> str:
        return f"step-{step:012d}-{os.urandom(4).hex()}"


def _title(manifest: Manifest) -> str:
    return f"checkpoint {manifest.checkpoint_id} of step {manifest.step}"


def _bytes_like(state: Any) -> memoryview | None:
    """The bytes of what is saved as it is; arrays are states."""
    if not isinstance(state, bytes | bytearray | memoryview):
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


def _unexpected(step: int, error: BaseException) -> StorageError:
    wrapped = StorageError(f"the checkpoint of step {step} failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _default_budget() -> int:
    return max(SLAB, psutil.virtual_memory().total // 4)


def _finish_at_exit(manager: CheckpointManager) -> None:
    """Let the interpreter end only when saves under way have ended."""
    reference = weakref.ref(manager)

    def finish() -> None:
        alive = reference()
        if alive is not None and alive._process == os.getpid():
            alive._saver.wait(EXIT_SECONDS)

    # Runs before threads may not be started any more, unlike functions of atexit.
    threading._register_atexit(finish)  # type: ignore[attr-defined]
