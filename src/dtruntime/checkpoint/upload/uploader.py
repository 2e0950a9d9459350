"""Copies checkpoints from the local tier to the main storage in the background."""

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
"""How often a rank checks whether another one has uploaded a checkpoint."""
OWNER = "tier.json"
"""A file in the local tier that names the main storage it belongs to."""
ATTEMPTS = 4
"""Waiting for an upload fails after this many failed attempts."""
BACKOFF = Backoff(first=0.5, longest=30.0)


@dataclass(slots=True)
class Upload:
    """A checkpoint that is being copied, or was."""

    entry: CatalogEntry
    checkpoint_id: str
    is_uploaded: bool = False
    is_dropped: bool = False
    """It was deleted from the local tier by another process, which has uploaded it or a newer."""
    error: CheckpointDamagedError | None = None
    """Why it can never be uploaded."""
    is_error_seen: bool = False

    @property
    def is_done(self) -> bool:
        """Whether no further attempt is made."""
        return self.is_uploaded or self.is_dropped or self.error is not None


class Uploader:
    """Copies checkpoints of the local tier to the main storage, in the order of their commits.

    Every ``every``-th one is due, by its sequence; others are copied when somebody waits for them.
    A failed upload is repeated as long as the manager lives, and by the next manager with the same
    local tier. Of several ranks that share a local tier, the one that writes manifests uploads.
    """

    def __init__(
        self,
        local: CheckpointStore,
        main: CheckpointStore,
        cleanup: Cleanup,
        *,
        every: int,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        """``cleanup`` is that of the main storage.

        ``is_first`` says whether this rank continues uploads of an earlier process.
        """
        self._local = local
        self._main = main
        self._cleanup = cleanup
        self._every = every
        self._is_first = is_first
        self._scanning = threading.Lock()
        self._seen: int | None = None
        """The highest local sequence that was considered; None before the main storage was."""
        self._first_own: int | None = None
        """The first sequence that was committed here before that."""
        self._is_away = False
        """Whether the main storage did not answer, and is asked again in the background."""
        self._is_marked = False
        self._copies = False
        """Whether this rank uploads."""
        self._thread = JobThread("strata-uploads")
        self._changed = threading.Condition()
        self._uploads: dict[str, Upload] = {}
        self._newest = 0
        """The highest local sequence that was uploaded."""
        self._failures = 0
        """How many attempts in a row have failed."""
        self._last_error: StorageError | None = None
        self._hurry = threading.Event()
        self._given_up = False
        self.on_busy: Callable[[], None] = lambda: None
        """Called whenever there is more to do."""

    @property
    def is_used(self) -> bool:
        """Whether there may be something to wait for."""
        return self._seen is not None or self._first_own is not None

    @property
    def is_needed(self) -> bool:
        """Whether this rank has to upload the newest checkpoint at the end."""
        return self._copies

    @property
    def is_busy(self) -> bool:
        """Whether attempts are still to be made."""
        return self._thread.is_busy

    @property
    def has_uploaded(self) -> bool:
        """Whether this uploader has uploaded something."""
        with self._changed:
            return any(upload.is_uploaded for upload in self._uploads.values())

    @property
    def damaged_files(self) -> set[str]:
        """The locations of damaged files in the local tier."""
        with self._changed:
            return {upload.error.file for upload in self._uploads.values() if upload.error}

    def steps(self) -> list[int]:
        """The steps of checkpoints that are not uploaded yet."""
        return [upload.entry.step for upload in self._pending()]

    def idle(self, timeout: float | None = None) -> bool:
        """Wait until no attempt is left to make; whether that is so."""
        return self._thread.wait(timeout)

    # What the engine calls

    def before_save(self) -> None:
        """Make sure that local sequences follow those of the main storage."""
        try:
            if not self._is_away:
                self.begin()
        except StorageError as exc:
            if not self._local.catalog.entries():
                raise
            # The local tier has followed the main storage so far, and continues from there.
            log.warning("checkpoint.main_storage_away", place=self._main.url, reason=str(exc))
            self._is_away = True
            self._persist(self._scan_again)
        if not self._is_marked:
            owner = {"main": self._main.backend.url}
            self._local.backend.create(OWNER, msgspec.json.encode(owner))
            self._is_marked = True

    def committed(self, manifest: Manifest) -> None:
        """Upload a local checkpoint if it is due, after those before it."""
        self._copies = True
        if self._seen is None:
            self._first_own = min(self._first_own or manifest.sequence, manifest.sequence)
        else:
            self._upload_due()

    def spares(self, entry: CatalogEntry) -> bool:
        """Whether the local tier has to keep a checkpoint that is not uploaded yet."""
        return self._seen is None or any(upload.entry == entry for upload in self._pending())

    def begin(self) -> None:
        """Look at the main storage once, and continue what an earlier process has left.

        ``StorageError`` when the main storage fails.
        """
        with self._scanning:
            if self._seen is not None:
                return
            self._check_owner()
            newest = self._main.catalog.find()
            sequence = newest.sequence if newest else 0
            self._local.catalog.floor = sequence
            self._seen = min(sequence, (self._first_own or sequence + 1) - 1)
        if self._is_first() or self._copies:
            self._copies = True
            self._upload_due(newest=True)

    # Waiting

    def wait_for(self, checkpoint_id: str, timeout: float | None = None) -> None:
        """Wait until a checkpoint is in the main storage; it is uploaded even if it was not due.

        ``StorageError`` when several attempts have failed meanwhile or it cannot be uploaded,
        ``TimeoutError``.
        """
        deadline = deadline_after(timeout)
        self.begin()
        if not self._copies:
            self._watch(checkpoint_id, deadline)
            return
        upload = self._upload_of(checkpoint_id)
        if upload is None:
            return
        self._wait_until_done(upload, deadline)
        if upload.is_dropped and self._main.catalog.with_id(checkpoint_id) is None:
            raise StorageError(
                f"checkpoint {checkpoint_id} is neither in {self._local.url} nor in "
                f"{self._main.url} any more: another process has dropped it"
            )

    def wait(self, timeout: float | None = None) -> None:
        """Wait for what is due; raises as `wait_for`, each error once."""
        deadline = deadline_after(timeout)
        self.begin()
        for upload in self._pending():
            self._wait_until_done(upload, deadline)
        with self._changed:
            for upload in self._uploads.values():
                self._raise_error(upload, again=False)

    def flush(self, timeout: float | None = None) -> None:
        """As `wait`, and for the newest checkpoint even if it was not due."""
        deadline = deadline_after(timeout)
        self.begin()
        newest = self._newest_local()
        if newest is not None:
            self.wait_for(newest.checkpoint_id, timeout)
        self.wait(time_left(deadline))

    def close(self) -> None:
        """Upload what is due and the newest, and end; raises when that fails."""
        try:
            if self._copies:
                self.flush()
        finally:
            self.give_up()
            self._thread.close()

    def give_up(self) -> None:
        """Make no further attempts."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self._hurry.set()

    def _pending(self) -> list[Upload]:
        with self._changed:
            return [upload for upload in self._uploads.values() if not upload.is_done]

    def _wait_until_done(self, upload: Upload, deadline: float | None) -> None:
        """Wait for an upload; the back-off starts over, since somebody needs it."""
        with self._changed:
            patience = self._failures + ATTEMPTS
            if self._failures and not upload.is_done:
                self._hurry.set()
            if not self._changed.wait_for(
                lambda: upload.is_done or self._given_up or self._failures >= patience,
                time_left(deadline),
            ):
                raise TimeoutError(
                    f"checkpoint {upload.checkpoint_id} is not in {self._main.url} yet"
                )
            self._raise_error(upload)
            if not upload.is_done:
                why = self._last_error or "the manager was closed"
                raise StorageError(self._only_local(upload, why)) from self._last_error

    def _raise_error(self, upload: Upload, *, again: bool = True) -> None:
        if upload.error is not None and (again or not upload.is_error_seen):
            upload.is_error_seen = True
            raise upload.error

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

    # Which checkpoints

    def _check_owner(self) -> None:
        """Refuse a folder that has the checkpoints of another main storage."""
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

    def _newest_local(self) -> Manifest | None:
        """The newest local checkpoint; none when it cannot be read, and so not uploaded."""
        newest = self._local.catalog.find()
        return None if newest is None else self._manifest(newest)

    def _manifest(self, entry: CatalogEntry) -> Manifest | None:
        try:
            return self._local.catalog.manifest(entry)
        except CheckpointDamagedError as exc:
            log.error("checkpoint.damaged", step=entry.step, reason=str(exc))
            return None

    def _upload_due(self, *, newest: bool = False) -> None:
        """Upload those of the local checkpoints that were not seen yet and are due."""
        with self._scanning:
            seen = self._seen or 0
            fresh = [entry for entry in self._local.catalog.entries() if entry.sequence > seen]
            for entry in fresh:
                if entry.sequence % self._every and not (newest and entry is fresh[-1]):
                    continue
                if (manifest := self._manifest(entry)) is not None:
                    self._add(entry, manifest.checkpoint_id)
            self._seen = max([seen, *(entry.sequence for entry in fresh)])

    def _upload_of(self, checkpoint_id: str) -> Upload | None:
        """The upload of a checkpoint, begun if need be; None when there is nothing to do."""
        with self._changed:
            upload = self._uploads.get(checkpoint_id)
        if upload is not None:
            return upload
        if self._main.catalog.with_id(checkpoint_id) is not None:
            return None
        manifest = self._local.catalog.with_id(checkpoint_id)
        if manifest is not None:
            return self._add(CatalogEntry.of(manifest), checkpoint_id)
        raise StorageError(
            f"checkpoint {checkpoint_id} was not uploaded, since it was not due, and is not in "
            f"{self._local.url} any more: wait for it earlier, or keep more there (local_keep)"
        )

    def _add(self, entry: CatalogEntry, checkpoint_id: str) -> Upload:
        with self._changed:
            if checkpoint_id in self._uploads:
                return self._uploads[checkpoint_id]
            upload = self._uploads[checkpoint_id] = Upload(entry, checkpoint_id)
        self._persist(lambda: self._attempt(upload))
        return upload

    # In the background

    def _persist(self, attempt: Callable[[], bool]) -> None:
        """Repeat something behind the other uploads until it succeeds, with growing pauses."""
        self._thread.submit(lambda: self._repeat(attempt))
        self.on_busy()

    def _repeat(self, attempt: Callable[[], bool]) -> None:
        delays = BACKOFF.delays()
        while not self._given_up and not attempt():
            if self._hurry.wait(next(delays)):
                self._hurry.clear()
                delays = BACKOFF.delays()

    def _scan_again(self) -> bool:
        try:
            self.begin()
        except StrataError as exc:
            log.warning("checkpoint.main_storage_away", place=self._main.url, reason=str(exc))
            return False
        return True

    def _attempt(self, upload: Upload) -> bool:
        """Try once; whether no further attempt is needed."""
        try:
            late = upload.entry.sequence < self._newest
            copied = copy_checkpoint(self._local, self._main, upload.entry, late=late)
        except Exception as exc:
            return self._failed(upload, exc)
        self._local.catalog.floor = max(self._local.catalog.floor, copied.sequence)
        log.info("checkpoint.uploaded", step=upload.entry.step, place=self._main.url)
        with self._changed:
            self._newest = max(self._newest, upload.entry.sequence)
            self._failures, self._last_error = 0, None
            upload.is_uploaded = True
            self._changed.notify_all()
        try:
            self._cleanup.clean()
        except Exception as exc:
            log.error("checkpoint.not_cleaned", place=self._main.url, reason=repr(exc))
        return True

    def _failed(self, upload: Upload, error: Exception) -> bool:
        fields = {"step": upload.entry.step, "place": self._main.url, "reason": str(error)}
        is_damaged = isinstance(error, CheckpointDamagedError)
        is_dropped = is_damaged and self._is_gone(upload)
        with self._changed:
            if is_dropped:
                log.info("checkpoint.upload_not_needed", step=upload.entry.step)
                upload.is_dropped = True
            elif isinstance(error, CheckpointDamagedError):
                log.error("checkpoint.upload_impossible", **fields)
                upload.error = CheckpointDamagedError(
                    self._only_local(upload, error), file=error.file, detail=error.detail
                )
            else:
                self._failures += 1
                self._last_error = error if isinstance(error, StorageError) else _unexpected(error)
                log.warning("checkpoint.upload_failed", attempts=self._failures, **fields)
            self._changed.notify_all()
        return is_damaged

    def _is_gone(self, upload: Upload) -> bool:
        """Whether another process has deleted a checkpoint from the local tier."""
        try:
            return not self._local.backend.exists(upload.entry.name)
        except StorageError:
            return False

    def _only_local(self, upload: Upload, why: object) -> str:
        where = f"the local tier {self._local.url}"
        return f"the checkpoint of step {upload.entry.step} is only in {where}: {why}"


def _unexpected(error: Exception) -> StorageError:
    return StorageError(f"the upload failed: {type(error).__name__}: {error}")
