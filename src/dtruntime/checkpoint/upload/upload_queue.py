"""Uploads one after the other, each tried until it succeeds or cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..._background import time_left
from ...errors import CheckpointDamagedError, StorageError
from ...retry import Backoff
from ...telemetry import EventLog
from ..save.handle import JobThread
from ..store.catalog import CatalogEntry
from ..store.checkpoint_store import CheckpointStore
from ..store.cleanup import Cleanup
from .checkpoint_copy import copy_checkpoint

log = EventLog("checkpoint")

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
