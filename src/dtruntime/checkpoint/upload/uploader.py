"""Which checkpoints of the local tier are brought to the main storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from ..._background import deadline_after, time_left
from ...errors import (
    CheckpointDamagedError,
    ConfigError,
    StorageError,
    StorageNotFoundError,
    StrataError,
)
from ...telemetry import EventLog
from ..file_format.manifest import Manifest
from ..store.catalog import CatalogEntry
from ..store.checkpoint_store import CheckpointStore
from ..store.cleanup import Cleanup
from .upload_queue import CheckpointUpload, UploadQueue

log = EventLog("checkpoint")

WATCH_SECONDS = 1.0
"""How often a rank looks whether another one has brought a checkpoint to the main storage."""
OWNER = "tier.json"
"""In the local tier: which main storage it belongs to."""


class Uploader:
    """Copies checkpoints of the local tier to the main storage, in the order of their commits.

    Every ``every``-th one is due, by its sequence; others are copied when somebody waits for them.
    An upload that fails is tried again for as long as the manager lives, and by the next manager
    that has the same local tier. Of several ranks that share a local tier, the one that writes
    the manifests uploads.
    """

    def __init__(
        self,
        local: CheckpointStore,
        main: CheckpointStore,
        upkeep: Cleanup,
        *,
        every: int,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        """``upkeep`` is that of the main storage.

        ``is_first`` says whether this rank goes on with what an earlier process has left.
        """
        self._local = local
        self._main = main
        self._queue = UploadQueue(local, main, upkeep)
        self._every = every
        self._is_first = is_first
        self._looking = threading.Lock()
        self._seen: int | None = None
        """Local checkpoints up to this sequence have been seen to; None: the main storage has not
        been looked at."""
        self._first_own: int | None = None
        """The first sequence that was committed here before it had been."""
        self._is_away = False
        """Whether the main storage did not answer, and is looked at in the background."""
        self._is_marked = False
        self._copies = False
        """Whether this rank uploads."""

    @property
    def is_used(self) -> bool:
        """Whether there may be something to wait for."""
        return self._seen is not None or self._first_own is not None

    @property
    def is_needed(self) -> bool:
        """Whether the newest checkpoint has to be brought to the main storage here."""
        return self._copies

    @property
    def queue(self) -> UploadQueue:
        """What is on its way."""
        return self._queue

    @property
    def has_uploaded(self) -> bool:
        """Whether something was uploaded here."""
        return self._queue.has_uploaded

    @property
    def damaged_files(self) -> set[str]:
        """Where files of the local tier are that were found to be damaged."""
        return self._queue.damaged_files

    # What the pipeline tells

    def before_save(self) -> None:
        """Make sure that what is committed locally follows what the main storage has."""
        try:
            if not self._is_away:
                self.begin()
        except StorageError as exc:
            if not self._local.catalog.entries():
                raise
            # This tier has followed the main storage so far: that is where it goes on.
            log.warning("checkpoint.main_storage_away", place=self._main.url, reason=str(exc))
            self._is_away = True
            self._queue.persist(self._look)
        if not self._is_marked:
            owner = {"main": self._main.backend.url}
            self._local.backend.create(OWNER, msgspec.json.encode(owner))
            self._is_marked = True

    def committed(self, manifest: Manifest) -> None:
        """Upload a checkpoint of the local tier if it is due, after those before it."""
        self._copies = True
        if self._seen is None:
            self._first_own = min(self._first_own or manifest.sequence, manifest.sequence)
        else:
            self._see_to_new_ones()

    def spares(self, entry: CatalogEntry) -> bool:
        """Whether the local tier has to keep a checkpoint because it is not uploaded yet."""
        return self._seen is None or self._queue.has(entry)

    def begin(self) -> None:
        """Learn what the main storage has, and go on with what an earlier process has left.

        It does nothing when it has been done. ``StorageError`` when the main storage fails.
        """
        with self._looking:
            if self._seen is not None:
                return
            self._check_owner()
            newest = self._main.catalog.find()
            there = newest.sequence if newest else 0
            self._local.catalog.floor = there
            self._seen = min(there, (self._first_own or there + 1) - 1)
        if self._is_first() or self._copies:
            self._copies = True
            self._see_to_new_ones(newest=True)

    # Waiting

    def wait_for(self, checkpoint_id: str, timeout: float | None = None) -> None:
        """Wait until a checkpoint is in the main storage; it is uploaded if it was not due."""
        deadline = deadline_after(timeout)
        self.begin()
        if not self._copies:
            self._watch(checkpoint_id, deadline)
            return
        upload = self._upload_of(checkpoint_id)
        if upload is not None:
            self._queue.wait(upload, deadline)
        dropped = self._queue.was_dropped(checkpoint_id)
        if dropped and self._main.catalog.with_id(checkpoint_id) is None:
            raise StorageError(
                f"checkpoint {checkpoint_id} is neither in {self._local.url} nor in "
                f"{self._main.url} any more: another process has dropped it"
            )

    def wait(self, timeout: float | None = None) -> None:
        """Wait for what is due; raises as `wait_for`, once for all, and ``TimeoutError``."""
        deadline = deadline_after(timeout)
        self.begin()
        self._queue.wait_for_all(deadline)

    def flush(self, timeout: float | None = None) -> None:
        """As `wait`, and for the newest checkpoint also if it was not due."""
        deadline = deadline_after(timeout)
        self.begin()
        newest = self._newest()
        if newest is not None:
            self.wait_for(newest.checkpoint_id, timeout)
        self.wait(time_left(deadline))

    def close(self) -> None:
        """Upload what is due and the newest, and end; raises when that does not succeed."""
        try:
            if self._copies:
                self.flush()
        finally:
            self._queue.close()

    # Which checkpoints

    def _check_owner(self) -> None:
        """Refuse a folder that has the checkpoints of something else."""
        try:
            owner = msgspec.json.decode(self._local.backend.read(OWNER), type=dict[str, str])
        except StorageNotFoundError:
            return
        except msgspec.MsgspecError as exc:
            where = self._local.backend.location(OWNER)
            raise StorageError(f"{where} is damaged: {exc}; delete it") from exc
        if owner.get("main") != self._main.backend.url:
            raise ConfigError(
                f"the local tier {self._local.url} belongs to {owner.get('main')}, not to "
                f"{self._main.backend.url}: use another folder, or delete "
                f"{self._local.backend.location(OWNER)} if that is the same storage"
            )

    def _newest(self) -> Manifest | None:
        """The newest local checkpoint; none when it cannot be read, and so cannot be uploaded."""
        newest = self._local.catalog.find()
        try:
            return self._local.catalog.manifest(newest) if newest is not None else None
        except CheckpointDamagedError as exc:
            log.error("checkpoint.damaged", step=newest.step if newest else 0, reason=str(exc))
            return None

    def _see_to_new_ones(self, *, newest: bool = False) -> None:
        """Upload those of the local checkpoints that were not seen yet and are due."""
        with self._looking:
            seen = self._seen or 0
            fresh = [entry for entry in self._local.catalog.entries() if entry.sequence > seen]
            for entry in fresh:
                if entry.sequence % self._every and not (newest and entry is fresh[-1]):
                    continue
                try:
                    self._queue.add(entry, self._local.catalog.manifest(entry).checkpoint_id)
                except CheckpointDamagedError as exc:
                    log.error("checkpoint.damaged", step=entry.step, reason=str(exc))
            self._seen = max([seen, *(entry.sequence for entry in fresh)])

    def _upload_of(self, checkpoint_id: str) -> CheckpointUpload | None:
        """The upload of a checkpoint; None when it is done."""
        upload = self._queue.find(checkpoint_id)
        if upload is not None:
            return upload
        if self._queue.is_over(checkpoint_id):
            return None
        if self._main.catalog.with_id(checkpoint_id) is not None:
            return None
        manifest = self._local.catalog.with_id(checkpoint_id)
        if manifest is not None:
            return self._queue.add(CatalogEntry.of(manifest), checkpoint_id)
        raise StorageError(
            f"checkpoint {checkpoint_id} was not uploaded, since it was not due, and is not in "
            f"{self._local.url} any more: wait for it earlier, or keep more there (local_keep)"
        )

    def _watch(self, checkpoint_id: str, deadline: float | None) -> None:
        """Wait until another rank has uploaded a checkpoint."""
        while self._main.catalog.with_id(checkpoint_id) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"checkpoint {checkpoint_id} is not in {self._main.url} yet")
            if self._local.catalog.with_id(checkpoint_id) is None:
                raise StorageError(
                    f"checkpoint {checkpoint_id} is neither in {self._local.url} nor in "
                    f"{self._main.url}: it was not due, and was dropped"
                )
            time.sleep(WATCH_SECONDS)

    def _look(self) -> bool:
        """Look at the main storage in the background; whether it answers."""
        try:
            self.begin()
        except StrataError as exc:
            log.warning("checkpoint.main_storage_away", place=self._main.url, reason=str(exc))
            return False
        return True
