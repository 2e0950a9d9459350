"""`CheckpointManager`: saves that do not stall training, and verified loads."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from .._background import deadline_after, in_thread, time_left
from ..client import current_orchestrator
from ..client.worker_config import trace_worker
from ..config import Config
from ..errors import ConfigError, StorageError
from ..retention import Retention
from ..storage import StorageBackend, open_backend, resolve_url
from ..storage.backend import FolderBackend
from ..storage.object_client import SCHEMES, shown
from ..storage.urls import backend_options, with_region
from ..types import CheckpointInfo, check_id, check_whole
from .engine import CheckpointEngine, EngineOptions
from .file_format.chunks import Compressor
from .load.checkpoint_loader import CheckpointCopy, CheckpointLoader, ranks_of
from .save.commit import CheckpointCoordinator, FindCoordinator
from .save.handle import Saved, SaveHandle, SavePolicy
from .save.staging import SLAB, StagingPool, memory_of
from .state_dict.rebuilding import shaped_like
from .store.checkpoint_store import CheckpointStore
from .store.writer_lock import WriterLock

R = TypeVar("R")


class CheckpointWriter:
    """Writes and reads checkpoints by name and step; writes return when they are committed."""

    def __init__(self, backend: StorageBackend | str | os.PathLike[str], **options: Any) -> None:
        """``backend`` is where they are; ``options`` are those of `CheckpointManager`.

        A ``StorageBackend`` is used as it is, and not closed.
        """
        self._place = backend if isinstance(backend, StorageBackend) else os.fspath(backend)
        self._options = {"keep_every": 1, **options}
        self._managers: dict[str, CheckpointManager] = {}

    def write_checkpoint(self, name: str, step: int, data: Any) -> Saved:
        """Store bytes or a state dict; returns when it is committed."""
        return self._manager(name).save(data, step).wait()

    def load_checkpoint(self, name: str, step: int | None = None) -> bytes:
        """The bytes of a step, or the newest."""
        return self._manager(name).load_bytes(step)

    def load_state(self, name: str, step: int | None = None) -> Any:
        """The state dict of a step, or the newest."""
        return self._manager(name).load_state(step)

    def close(self) -> None:
        """Release everything."""
        for manager in self._managers.values():
            manager.close()

    def _manager(self, name: str) -> CheckpointManager:
        if name not in self._managers:
            folder = check_id("checkpoint name", name)
            options = dict(self._options)
            if options.get("local_tier") is not None:
                options["local_tier"] = os.path.join(options["local_tier"], folder)
            if isinstance(self._place, StorageBackend):
                place: str | StorageBackend = FolderBackend(self._place, folder)
            else:
                place = f"{self._place.rstrip('/')}/{folder}"
            self._managers[name] = CheckpointManager(place, **options)
        return self._managers[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class CheckpointManager:
    """Checkpoints in one place: a folder, a bucket, or memory for tests.

    `save` returns as soon as the state may be changed again; everything else happens in the
    background, one save after the other. A save that fails raises from its handle, or else from
    the next `save`, `wait` or `close`. Only committed checkpoints are listed and loaded.
    """

    def __init__(  # noqa: PLR0913
        self,
        storage_path: str | os.PathLike[str] | StorageBackend | None = None,
        backend: str | None = None,
        keep_count: int | None = None,
        *,
        path: str | os.PathLike[str] | StorageBackend | None = None,
        orchestrator: CheckpointCoordinator | None = None,
        sharded: bool = False,
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
        local_tier: str | os.PathLike[str] | None = None,
        local_keep: int = 2,
        upload_every: int = 1,
        **storage_options: Any,
    ) -> None:
        """Nothing is read or written before the first use.

        - ``storage_path`` (or ``path``) is a path or a URL (``s3://``, ``gs://``, ``az://``,
          ``file://``). With ``backend="s3"`` a plain path is a prefix in ``CHECKPOINT_BUCKET``.
          It may also be a ``StorageBackend``, which is used as it is, and not closed.
        - The ``keep_count`` newest checkpoints are kept, one for ``keep_every`` so many steps, and
          the ``keep_best`` best by ``metric``.
        - ``compression`` is ``none``, ``gzip`` or ``zstd``; chunks that do not get smaller are
          stored as they are. ``incremental`` makes every save one, ``delta`` stores differences
          from the save before and keeps that one in memory.
        - ``memory_budget`` bounds the memory of saves under way; a save waits while it is used up.
          By default it is a quarter of the machine's memory.
        - Commits are reported through ``orchestrator``; by default the one that is registered when
          something is saved or listed. With ``sharded`` every rank of its job saves its own part
          of each checkpoint.
        - ``local_tier`` is a folder on a fast disk: saves are committed there, and every
          ``upload_every``-th one is copied to ``storage_path`` in the background. The folder keeps
          the ``local_keep`` newest, and those that are still to be copied.
        - `should_save` says yes every ``interval_steps`` and every ``interval_seconds``; without
          either, by the configuration's steps.
        - ``storage_options`` go to the backend: ``endpoint``, ``region`` and the like.
        """
        place = check_place(storage_path, path)
        trace_worker()
        config = Config.load()
        chosen = config.checkpoint
        main = _main_store(place, backend, storage_options, config)
        if delta:
            Compressor("zstd")
        if interval_steps is None and interval_seconds is None:
            interval_steps = chosen.interval_steps
        self.policy = SavePolicy(interval_steps, interval_seconds)
        options = EngineOptions(
            Retention(
                chosen.keep_last_n if keep_count is None else keep_count,
                keep_every,
                keep_best,
                metric,
                higher_is_better,
            ),
            StagingPool(check_budget(memory_budget)),
            Compressor(compression or chosen.compression),
            sharded=sharded,
            incremental=incremental or delta,
            delta=delta,
            exit_seconds=chosen.exit_seconds,
            local_keep=check_whole("local_keep", local_keep, 1),
            upload_every=check_whole("upload_every", upload_every, 1),
        )
        find: FindCoordinator = (
            current_orchestrator.Responsible() if orchestrator is None else lambda: orchestrator
        )
        local = None if local_tier is None else _local_store(local_tier, main)
        self.engine = CheckpointEngine(main, find, options, local)
        """What saves and loads; other formats than state dicts and bytes use it directly."""

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

        Bytes are saved in place and not copied: do not write to a writable buffer before the handle
        is done. ``is_full=False`` stores only what has changed since the last checkpoint.
        """
        request = self.engine.request(step, epoch, is_full, metrics, metadata)
        handle = self.engine.save(request, lambda: memory_of(state_dict))
        self.policy.saved(step)
        return handle

    async def save_async(self, data: Any, step: int, epoch: int = 0, **options: Any) -> SaveHandle:
        """As `save`, with copying in another thread; the handle can be awaited for the commit."""
        return await in_thread(lambda: self.save(data, step, epoch, **options), "strata-stage")

    def estimate_seconds(self, is_full: bool = True) -> float | None:
        """Estimate how long a save takes to be durable, from earlier saves and the last size.

        None before the first one. The estimate is for a save that begins when no other is under
        way; with two tiers, for the local one.
        """
        is_full = is_full and not self.engine.options.incremental
        return self.engine.estimates.seconds(is_full=is_full)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves are committed, and uploads that are due are in the main storage.

        Raises the error of a save that failed unseen, and ``TimeoutError``.
        """
        deadline = deadline_after(timeout)
        self._wait_for_saves(timeout)
        uploads = self.engine.uploads
        if uploads is not None and uploads.is_used:
            uploads.wait(time_left(deadline))

    def flush(self, timeout: float | None = None) -> None:
        """As `wait`, and until the newest checkpoint is in the main storage, due or not."""
        deadline = deadline_after(timeout)
        self._wait_for_saves(timeout)
        if self.engine.uploads is not None:
            self.engine.uploads.flush(time_left(deadline))

    # Loading

    def load_state(
        self,
        step: int | None = None,
        *,
        map_location: Any = None,
        keys: Iterable[str] | None = None,
        rank: int | None = None,
        like: Any = None,
    ) -> Any:
        """Load a state dict: the newest, or that of a step.

        If the newest is damaged, the newest good one is loaded instead, and an error is logged; a
        given step is loaded or raises. ``keys`` names what to restore, such as ``model`` or
        ``model/layer1.weight``: the result is a dict from these names to their values, and nothing
        else is read. ``rank`` loads the part of that rank (see `ranks`) instead of this one's own;
        ``CheckpointNotFoundError`` when it has saved none. With ``like``, an object of the same
        structure, containers get its classes: named tuples, which are tuples otherwise, and
        ``defaultdict``. ``ValueError`` says where the structures differ.
        """
        names = None if keys is None else list(keys)
        whose = None if rank is None else check_whole("rank", rank)
        loader = self.engine.loader
        state = self._load(step, lambda copy: loader.state_of(copy, map_location, names, whose))
        return state if like is None else shaped_like(like, state)

    async def load_state_async(self, step: int | None = None, **options: Any) -> Any:
        """As `load_state`, in another thread."""
        return await in_thread(lambda: self.load_state(step, **options), "strata-load")

    def load_bytes(self, step: int | None = None, *, rank: int | None = None) -> bytes:
        """Load what was saved as bytes: the newest (also for step 0), or that of a step."""
        whose = None if rank is None else check_whole("rank", rank)
        return self._load(step or None, lambda copy: self.engine.loader.bytes_of(copy, whose))

    async def load(self, step: int | None = None) -> bytes:
        """As `load_bytes`, in another thread."""
        return await in_thread(lambda: self.load_bytes(step), "strata-load")

    def load_latest(self) -> CheckpointInfo:
        """The newest checkpoint that is whole; `get_checkpoint` gives its bytes."""
        loader = self._settled()
        return loader.newest_good(loader.verified, own_part=False)

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint, or None; only its manifest is read."""
        return self._settled().latest()

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, or None; nothing but names is read."""
        return self._settled().newest_step()

    def ranks(self, step: int | None = None) -> list[int]:
        """The ranks that saved parts of a checkpoint: the newest, or that of a step."""
        loader = self._settled()
        if step is None:
            return loader.newest_good(ranks_of, own_part=False)
        return loader.of_step(check_whole("step", step), ranks_of)

    def get_checkpoint(self, checkpoint_id: str) -> bytes:
        """The bytes of a checkpoint, by its id."""
        return self.engine.load(checkpoint_id, self.engine.loader.bytes_of)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, ascending."""
        return self._settled().steps()

    async def list_checkpoints(self) -> list[int]:
        """As `steps`, in another thread."""
        return await in_thread(self.steps, "strata-list")

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, in the order of their commits."""
        return self._settled().infos()

    def other_writers(self) -> list[str]:
        """The process ids of other processes that save here at the moment; local disks only."""
        with contextlib.suppress(StorageError):
            # Opening a session lets the others see this process, too; a read-only place has none.
            return self.engine.main.session.other_processes()
        return WriterLock(self.engine.main.backend).other_processes()

    # Closing

    def close(self) -> None:
        """Wait for saves under way, and release everything; raises as `flush` does."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as exc:
            if error is None:
                raise
            error.add_note(f"Closing the checkpoint manager failed too: {exc}")

    def _wait_for_saves(self, timeout: float | None) -> None:
        saves = self.engine.saves
        if not saves.wait_for_saves(timeout):
            raise TimeoutError(f"saves to {saves.url} are still under way after {timeout} s")
        saves.raise_failure()

    def _load(self, step: int | None, read: Callable[[CheckpointCopy], R]) -> R:
        loaded, value = self.engine.load(
            step, lambda copy: (copy.manifest.step, read(copy)), own_part=True
        )
        self.policy.saved(loaded)  # training continues from a step that has a checkpoint
        return value

    def _settled(self) -> CheckpointLoader:
        self.engine.settle()
        return self.engine.loader


def _main_store(
    place: str | StorageBackend, backend: str | None, options: dict[str, Any], config: Config
) -> CheckpointStore:
    """Where checkpoints are; ``ConfigError`` and ``TypeError`` when it cannot be a place."""
    if isinstance(place, StorageBackend):
        for name in [*(["backend"] if backend is not None else []), *options]:
            raise TypeError(f"a StorageBackend is open already: give {name!r} to it")
        return CheckpointStore(place)
    url = resolve_url(place, backend, config.storage)
    check_options(url, options, CheckpointManager)
    opened = open_backend(url, **with_region(url, options, config.storage))
    return CheckpointStore(opened, url, is_owner=True)


def _local_store(tier: str | os.PathLike[str], main: CheckpointStore) -> CheckpointStore:
    """The folder of a local tier; ``ConfigError`` when it cannot be one."""
    path = os.fspath(tier)
    if "://" in path and not path.lower().startswith("file://"):
        raise ConfigError(f"local_tier must be a folder of this machine, not {shown(path)!r}")
    opened = open_backend(path)
    if opened.url == main.backend.url:
        raise ConfigError(f"local_tier and storage_path are the same place: {main.url}")
    return CheckpointStore(opened, path, is_owner=True)


def check_place(storage_path: Any, path: Any) -> str | StorageBackend:
    """The place that one of two arguments names: as text, or a backend."""
    if storage_path is not None and path is not None:
        raise TypeError("give storage_path or path, not both: they are the same")
    place = storage_path if storage_path is not None else path
    if place is None:
        raise TypeError("CheckpointManager needs a storage_path (or path)")
    if isinstance(place, StorageBackend):
        return place
    text = os.fspath(place)
    if not isinstance(text, str):
        raise TypeError(f"storage_path must be a str or a path, not {type(text).__name__}")
    return text


def check_options(url: str, options: Iterable[str], manager: type[Any]) -> None:
    """Make sure that a place can be one, and that its storage takes these options.

    One of the arguments of ``manager`` may have been meant. ``ConfigError`` and ``TypeError``.
    """
    taken = backend_options(url)
    for name in options:
        if name not in taken:
            advice = _advice(name, taken, manager, url)
            raise TypeError(f"CheckpointManager has no option {name!r}{advice}")


def check_budget(memory_budget: Any) -> int:
    """The memory budget; by default a quarter of the machine's memory."""
    if memory_budget is None:
        return max(SLAB, psutil.virtual_memory().total // 4)
    return check_whole("memory_budget", memory_budget, SLAB)


def _advice(name: str, taken: set[str], manager: type[Any], url: str) -> str:
    parameters = inspect.signature(manager).parameters.values()
    own = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    close = difflib.get_close_matches(name, [*own, *taken], 1)
    if close:
        return f": did you mean {close[0]}?"
    takes = ", ".join(sorted(taken)) or "none"
    scheme = url.partition("://")[0].lower()
    if scheme in SCHEMES:
        return (
            f", and {scheme}:// takes {takes}: credentials and other settings of the store go in "
            "config={...}"
        )
    return f", and this storage takes {takes}"
