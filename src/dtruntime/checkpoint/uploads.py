"""Checkpoints on their way from the local tier to the main storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..errors import (
    CheckpointDamagedError,
    ConfigError,
    StorageError,
    StorageNotFoundError,
    StrataError,
)
from ..retry import Backoff
from ..telemetry import EventLog
from .catalog import Entry
from .copying import copy_checkpoint
from .format import Manifest
from .place import Place
from .saving import Saver
from .upkeep import Upkeep

log = EventLog("checkpoint")

ATTEMPTS = 4
"""Whoever waits for an upload is told when so many attempts have failed meanwhile."""
BACKOFF = Backoff(first=0.5, longest=30.0)
WATCH_SECONDS = 1.0
"""How often a rank looks whether another one has brought a checkpoint to the main storage."""
OWNER = "tier.json"
"""In the local tier: which main storage it belongs to."""


@dataclass(slots=True)
class _Job:
    entry: Entry
    checkpoint_id: str
    done: bool = False


class Uploads:
    """Copies checkpoints of the local tier to the main storage, in the order of their commits.

    Every ``every``-th one is due, by its sequence; others are copied when somebody waits for them.
    An upload that fails is tried again for as long as the manager lives, and by the next manager
    that has the same local tier. Of several ranks that share a local tier, the one that writes
    the manifests uploads.
    """

    def __init__(
        self,
        local: Place,
        main: Place,
        upkeep: Upkeep,
        *,
        every: int,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        """``upkeep`` is that of the main storage.

        ``is_first`` says whether this rank goes on with what an earlier process has left.
        """
        self._local = local
        self._main = main
        self._upkeep = upkeep
        self._every = every
        self._is_first = is_first
        self._thread = Saver("strata-uploads")
        self._changed = threading.Condition()
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
        self._jobs: dict[str, _Job] = {}
        self._uploaded: set[str] = set()
        self._dropped: set[str] = set()
        """Those that were dropped locally, by another process that saw to them."""
        self._lost: dict[str, CheckpointDamagedError] = {}
        self._untold: list[CheckpointDamagedError] = []
        self._newest_uploaded = 0
        """The highest local sequence that was uploaded."""
        self._failures = 0
        """How many attempts in a row have failed, and the last one's error."""
        self._trouble: StorageError | None = None
        self._hurry = threading.Event()
        self._given_up = False

    @property
    def is_used(self) -> bool:
        """Whether there may be something to wait for."""
        return self._seen is not None or self._first_own is not None

    @property
    def has_uploaded(self) -> bool:
        """Whether something was uploaded here."""
        return bool(self._uploaded)

    @property
    def damaged_files(self) -> set[str]:
        """Where files of the local tier are that were found to be damaged."""
        with self._changed:
            return {error.file for error in self._lost.values()}

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
            self._thread.submit(self._look_again)
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

    def spares(self, entry: Entry) -> bool:
        """Whether the local tier has to keep a checkpoint because it is not uploaded yet."""
        if self._seen is None:
            return True
        with self._changed:
            return any(job.entry == entry for job in self._jobs.values())

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
        deadline = _deadline(timeout)
        self.begin()
        if not self._copies:
            self._watch(checkpoint_id, deadline)
            return
        job = self._job_of(checkpoint_id)
        if job is not None:
            self._wait(job, deadline)
        with self._changed:
            dropped = checkpoint_id in self._dropped
        if dropped and self._main.catalog.with_id(checkpoint_id) is None:
            raise StorageError(
                f"checkpoint {checkpoint_id} is neither in {self._local.url} nor in "
                f"{self._main.url} any more: another process has dropped it"
            )

    def wait(self, timeout: float | None = None) -> None:
        """Wait for what is due; raises as `wait_for`, once for all, and ``TimeoutError``."""
        deadline = _deadline(timeout)
        self.begin()
        with self._changed:
            jobs = list(self._jobs.values())
        for job in jobs:
            self._wait(job, deadline)
        with self._changed:
            if self._untold:
                raise self._untold.pop()

    def flush(self, timeout: float | None = None) -> None:
        """As `wait`, and for the newest checkpoint also if it was not due."""
        deadline = _deadline(timeout)
        self.begin()
        newest = self._newest()
        if newest is not None:
            self.wait_for(newest.checkpoint_id, timeout)
        self.wait(_left(deadline))

    def close(self) -> None:
        """Upload what is due and the newest, and end; raises when that does not succeed."""
        try:
            if self._copies:
                self.flush()
        finally:
            with self._changed:
                self._given_up = True
                self._changed.notify_all()
            self._hurry.set()
            self._thread.close()

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
                    self._enqueue(entry, self._local.catalog.manifest(entry).checkpoint_id)
                except CheckpointDamagedError as exc:
                    log.error("checkpoint.damaged", step=entry.step, reason=str(exc))
            self._seen = max([seen, *(entry.sequence for entry in fresh)])

    def _job_of(self, checkpoint_id: str) -> _Job | None:
        """The upload of a checkpoint; None when it is done."""
        with self._changed:
            if checkpoint_id in self._lost:
                raise self._told(checkpoint_id)
            if checkpoint_id in self._uploaded | self._dropped:
                return None
            if checkpoint_id in self._jobs:
                return self._jobs[checkpoint_id]
        if self._main.catalog.with_id(checkpoint_id) is not None:
            return None
        manifest = self._local.catalog.with_id(checkpoint_id)
        if manifest is not None:
            entry = Entry(manifest.sequence, manifest.step, manifest.name)
            return self._enqueue(entry, checkpoint_id)
        raise StorageError(
            f"checkpoint {checkpoint_id} was not uploaded, since it was not due, and is not in "
            f"{self._local.url} any more: wait for it earlier, or keep more there (local_keep)"
        )

    def _told(self, checkpoint_id: str) -> CheckpointDamagedError:
        lost = self._lost[checkpoint_id]
        self._untold = [error for error in self._untold if error is not lost]
        return lost

    def _enqueue(self, entry: Entry, checkpoint_id: str) -> _Job:
        with self._changed:
            if checkpoint_id in self._jobs:
                return self._jobs[checkpoint_id]
            job = self._jobs[checkpoint_id] = _Job(entry, checkpoint_id)
        self._thread.submit(lambda: self._run(job))
        return job

    def _wait(self, job: _Job, deadline: float | None) -> None:
        """Wait for an upload; the back-off begins anew, since somebody wants it."""
        with self._changed:
            patience = self._failures + ATTEMPTS
            if self._failures:
                self._hurry.set()
            if not self._changed.wait_for(
                lambda: job.done or self._given_up or self._failures >= patience, _left(deadline)
            ):
                raise TimeoutError(f"checkpoint {job.checkpoint_id} is not in {self._main.url} yet")
            if job.checkpoint_id in self._lost:
                raise self._told(job.checkpoint_id)
            if not job.done:
                why = self._trouble or "the manager was closed"
                raise StorageError(_only_local(self._local, job, why)) from self._trouble

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

    # In the background

    def _look_again(self) -> None:
        """Look at the main storage until it answers."""
        delays = BACKOFF.delays()
        while not self._given_up:
            try:
                self.begin()
                return
            except StrataError as exc:
                log.warning("checkpoint.main_storage_away", place=self._main.url, reason=str(exc))
            if self._hurry.wait(next(delays)):
                self._hurry.clear()
                delays = BACKOFF.delays()

    def _run(self, job: _Job) -> None:
        delays = BACKOFF.delays()
        while not self._given_up and not self._attempt(job):
            if self._hurry.wait(next(delays)):
                self._hurry.clear()
                delays = BACKOFF.delays()

    def _attempt(self, job: _Job) -> bool:
        """Try once; whether nothing is left to try."""
        try:
            late = job.entry.sequence < self._newest_uploaded
            copied = copy_checkpoint(self._local, self._main, job.entry, late=late)
        except Exception as exc:
            return self._failed(job, exc)
        self._local.catalog.floor = max(self._local.catalog.floor, copied.sequence)
        log.info("checkpoint.uploaded", step=job.entry.step, place=self._main.url)
        with self._changed:
            self._newest_uploaded = max(self._newest_uploaded, job.entry.sequence)
            self._uploaded.add(job.checkpoint_id)
            self._failures, self._trouble = 0, None
            self._end(job)
        try:
            self._upkeep.clean()
        except Exception as exc:
            log.error("checkpoint.not_cleaned", place=self._main.url, reason=repr(exc))
        return True

    def _failed(self, job: _Job, error: Exception) -> bool:
        fields = {"step": job.entry.step, "place": self._main.url, "reason": str(error)}
        dropped = isinstance(error, CheckpointDamagedError) and self._is_dropped(job)
        with self._changed:
            if dropped:
                # Whoever has this tier now has uploaded it, or something newer.
                log.info("checkpoint.upload_not_needed", step=job.entry.step)
                self._dropped.add(job.checkpoint_id)
                self._end(job)
                return True
            if not isinstance(error, CheckpointDamagedError):
                self._failures += 1
                self._trouble = error if isinstance(error, StorageError) else _unexpected(error)
                log.warning("checkpoint.upload_failed", attempts=self._failures, **fields)
                self._changed.notify_all()
                return False
            log.error("checkpoint.upload_impossible", **fields)
            lost = CheckpointDamagedError(
                _only_local(self._local, job, error), file=error.file, detail=error.detail
            )
            self._lost[job.checkpoint_id] = lost
            self._untold.append(lost)
            self._end(job)
        return True

    def _is_dropped(self, job: _Job) -> bool:
        """Whether the local tier has lost a checkpoint because another process dropped it."""
        try:
            return not self._local.backend.exists(job.entry.name)
        except StorageError:
            return False

    def _end(self, job: _Job) -> None:
        job.done = True
        del self._jobs[job.checkpoint_id]
        self._changed.notify_all()


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _unexpected(error: Exception) -> StorageError:
    return StorageError(f"the upload failed: {type(error).__name__}: {error}")


def _only_local(local: Place, job: _Job, why: object) -> str:
    return f"the checkpoint of step {job.entry.step} is only in the local tier {local.url}: {why}"
