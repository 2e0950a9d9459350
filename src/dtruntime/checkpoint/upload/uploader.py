"""Which checkpoints of the local tier are brought to the main storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..._background import deadline_after, time_left
from ...errors import (
    CheckpointDamagedError,
    ConfigError,
    StorageError,
    StorageNotFoundError,
    StrataError,
)
from ...retry import Backoff
from ...telemetry import EventLog
from ..file_format.manifest import Manifest
from ..save.handle import JobThread
from ..store.catalog import CatalogEntry
from ..store.checkpoint_store import CheckpointStore, Cleanup
from .checkpoint_copy import copy_checkpoint

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


ATTEMPTS = 4
"""Whoever waits for an upload is told when so many attempts have failed meanwhile."""
BACKOFF = Backoff(first=0.5, longest=30.0)


@dataclass(slots=True)
class CheckpointUpload:
    """A checkpoint that is to be copied, or was."""

    entry: CatalogEntry
    checkpoint_id: str
    done: bool = False


class UploadQueue:
    """Checkpoints on their way from the local tier to the main storage, in the order of asking."""

    def __init__(self, local: CheckpointStore, main: CheckpointStore, upkeep: Cleanup) -> None:
        self._local = local
        self._main = main
        self._upkeep = upkeep
        self._thread = JobThread("strata-uploads")
        self._changed = threading.Condition()
        self._waiting: dict[str, CheckpointUpload] = {}
        self._uploaded: set[str] = set()
        self._dropped: set[str] = set()
        """Those that were dropped locally, by another process that saw to them."""
        self._lost: dict[str, CheckpointDamagedError] = {}
        self._untold: list[CheckpointDamagedError] = []
        self._newest = 0
        """The highest local sequence that was uploaded."""
        self._failures = 0
        """How many attempts in a row have failed, and the last one's error."""
        self._trouble: StorageError | None = None
        self._hurry = threading.Event()
        self._given_up = False
        self.on_busy: Callable[[], None] = lambda: None
        """Is called whenever there is more to do."""

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be tried."""
        return self._thread.is_busy

    def idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to try; whether that is so."""
        return self._thread.wait(timeout)

    def steps(self) -> list[int]:
        """The steps of checkpoints that are not uploaded yet."""
        with self._changed:
            return [upload.entry.step for upload in self._waiting.values()]

    @property
    def has_uploaded(self) -> bool:
        """Whether something was uploaded here."""
        return bool(self._uploaded)

    @property
    def damaged_files(self) -> set[str]:
        """Where files of the local tier are that were found to be damaged."""
        with self._changed:
            return {error.file for error in self._lost.values()}

    def has(self, entry: CatalogEntry) -> bool:
        """Whether a checkpoint is not uploaded yet."""
        with self._changed:
            return any(upload.entry == entry for upload in self._waiting.values())

    def is_over(self, checkpoint_id: str) -> bool:
        """Whether a checkpoint was uploaded, or dropped; raises when it cannot be uploaded."""
        with self._changed:
            if checkpoint_id in self._lost:
                raise self._told(checkpoint_id)
            return checkpoint_id in self._uploaded | self._dropped

    def was_dropped(self, checkpoint_id: str) -> bool:
        """Whether another process has dropped a checkpoint before it was uploaded here."""
        with self._changed:
            return checkpoint_id in self._dropped

    def find(self, checkpoint_id: str) -> CheckpointUpload | None:
        """The upload of a checkpoint that is under way."""
        with self._changed:
            return self._waiting.get(checkpoint_id)

    def add(self, entry: CatalogEntry, checkpoint_id: str) -> CheckpointUpload:
        """Upload a checkpoint behind the others, if that is not under way."""
        with self._changed:
            if checkpoint_id in self._waiting:
                return self._waiting[checkpoint_id]
            upload = self._waiting[checkpoint_id] = CheckpointUpload(entry, checkpoint_id)
        self.persist(lambda: self._attempt(upload))
        return upload

    def persist(self, attempt: Callable[[], bool]) -> None:
        """Try something behind the others until it succeeds, with longer and longer pauses."""
        self._thread.submit(lambda: self._try(attempt))
        self.on_busy()

    def wait(self, upload: CheckpointUpload, deadline: float | None) -> None:
        """Wait for an upload; the back-off begins anew, since somebody wants it.

        ``StorageError`` when several attempts have failed meanwhile or it cannot be uploaded;
        ``TimeoutError`` at the deadline.
        """
        with self._changed:
            patience = self._failures + ATTEMPTS
            if self._failures:
                self._hurry.set()
            if not self._changed.wait_for(
                lambda: upload.done or self._given_up or self._failures >= patience,
                time_left(deadline),
            ):
                raise TimeoutError(
                    f"checkpoint {upload.checkpoint_id} is not in {self._main.url} yet"
                )
            if upload.checkpoint_id in self._lost:
                raise self._told(upload.checkpoint_id)
            if not upload.done:
                why = self._trouble or "the manager was closed"
                raise StorageError(self._only_local(upload, why)) from self._trouble

    def wait_for_all(self, deadline: float | None) -> None:
        """Wait for what is under way; what could not be uploaded is raised once."""
        with self._changed:
            uploads = list(self._waiting.values())
        for upload in uploads:
            self.wait(upload, deadline)
        with self._changed:
            if self._untold:
                raise self._untold.pop()

    def close(self) -> None:
        """Give up what is left, and end the thread."""
        self.give_up()
        self._thread.close()

    def give_up(self) -> None:
        """Try nothing again."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self._hurry.set()

    # In the background

    def _try(self, attempt: Callable[[], bool]) -> None:
        delays = BACKOFF.delays()
        while not self._given_up and not attempt():
            if self._hurry.wait(next(delays)):
                self._hurry.clear()
                delays = BACKOFF.delays()

    def _attempt(self, upload: CheckpointUpload) -> bool:
        """Try once; whether nothing is left to try."""
        try:
            late = upload.entry.sequence < self._newest
            copied = copy_checkpoint(self._local, self._main, upload.entry, late=late)
        except Exception as exc:
            return self._failed(upload, exc)
        self._local.catalog.floor = max(self._local.catalog.floor, copied.sequence)
        log.info("checkpoint.uploaded", step=upload.entry.step, place=self._main.url)
        with self._changed:
            self._newest = max(self._newest, upload.entry.sequence)
            self._uploaded.add(upload.checkpoint_id)
            self._failures, self._trouble = 0, None
            self._end(upload)
        try:
            self._upkeep.clean()
        except Exception as exc:
            log.error("checkpoint.not_cleaned", place=self._main.url, reason=repr(exc))
        return True

    def _failed(self, upload: CheckpointUpload, error: Exception) -> bool:
        fields = {"step": upload.entry.step, "place": self._main.url, "reason": str(error)}
        dropped = isinstance(error, CheckpointDamagedError) and self._is_gone(upload)
        with self._changed:
            if dropped:
                # Whoever has this tier now has uploaded it, or something newer.
                log.info("checkpoint.upload_not_needed", step=upload.entry.step)
                self._dropped.add(upload.checkpoint_id)
                self._end(upload)
                return True
            if not isinstance(error, CheckpointDamagedError):
                self._failures += 1
                self._trouble = error if isinstance(error, StorageError) else _unexpected(error)
                log.warning("checkpoint.upload_failed", attempts=self._failures, **fields)
                self._changed.notify_all()
                return False
            log.error("checkpoint.upload_impossible", **fields)
            lost = CheckpointDamagedError(
                self._only_local(upload, error), file=error.file, detail=error.detail
            )
            self._lost[upload.checkpoint_id] = lost
            self._untold.append(lost)
            self._end(upload)
        return True

    def _is_gone(self, upload: CheckpointUpload) -> bool:
        """Whether the local tier has lost a checkpoint because another process dropped it."""
        try:
            return not self._local.backend.exists(upload.entry.name)
        except StorageError:
            return False

    def _end(self, upload: CheckpointUpload) -> None:
        upload.done = True
        del self._waiting[upload.checkpoint_id]
        self._changed.notify_all()

    def _told(self, checkpoint_id: str) -> CheckpointDamagedError:
        lost = self._lost[checkpoint_id]
        self._untold = [error for error in self._untold if error is not lost]
        return lost

    def _only_local(self, upload: CheckpointUpload, why: object) -> str:
        where = f"the local tier {self._local.url}"
        return f"the checkpoint of step {upload.entry.step} is only in {where}: {why}"


def _unexpected(error: Exception) -> StorageError:
    return StorageError(f"the upload failed: {type(error).__name__}: {error}")
