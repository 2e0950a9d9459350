"""Locks of live writers, which distinguish their files from what dead writers have left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from ...storage.backend import StorageBackend, StoredFile, storage_errors
from ...storage.local_writer import this_host
from ..file_format.manifest import LOCKS

ORPHAN_SECONDS = 6 * 3600.0
"""On stores without locks, an uncommitted file of this age was left by a dead writer."""
COMMIT_WAIT_SECONDS = 10.0
SWEEP_WAIT_SECONDS = 2.0
"""How long a commit, and another sweep, wait for the sweep of a process that may be stopped."""
_POLL_SECONDS = 0.005
_SESSION = re.compile(r"-s([0-9a-f]{12})-")


class WriterLock:
    """A writer and its lock, held as long as its process lives.

    On a local disk it holds a lock that the operating system releases when the process ends,
    however it ends.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.id = secrets.token_hex(6)
        self._backend = backend
        self._lock = -1
        self._process = os.getpid()

    def tag(self, name: str) -> str:
        """A file's name with the writer in it; ``name`` must not contain dashes."""
        return f"{name}-s{self.id}-"

    def open(self) -> None:
        """Take the lock, unless it is held already."""
        if self._lock >= 0 or self._backend.kind != "local":
            return
        path = self._lock_file(self.id)
        with storage_errors("write", str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Under its own name it is never seen unlocked.
            hidden = path.with_suffix(".new")
            self._lock = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, f"{os.getpid()} {this_host()}\n".encode())
            hidden.rename(path)

    def close(self) -> None:
        """Release the lock."""
        lock, self._lock = self._lock, -1
        if lock >= 0 and self._process == os.getpid():
            with contextlib.suppress(FileNotFoundError):
                self._lock_file(self.id).unlink()
            os.close(lock)

    def is_dead(self, file: StoredFile, now: float) -> bool:
        """Whether the writer of a file is dead; ``now`` is by the clock of the store."""
        found = _SESSION.search(file.name)
        if found is None or found[1] == self.id:
            return False
        if self._backend.kind != "local" or self._is_elsewhere(found[1]):
            return now - file.modified > ORPHAN_SECONDS
        return self._is_unlocked(found[1])

    def other_processes(self) -> list[str]:
        """The process ids of other live writers; on a local disk only."""
        if self._backend.kind != "local":
            return []
        found: set[str] = set()
        for path in self._lock_file("x").parent.glob("*.lock"):
            if path.stem != self.id and not self._is_unlocked(path.stem):
                found.add(self._written_by(path.stem)[0])
        return sorted(found - {"", str(os.getpid())})

    def is_alone(self) -> bool:
        """Whether no other writer is alive; never so where that is unknown, off local disks."""
        if self._backend.kind != "local":
            return False
        others = {lock.stem for lock in self._lock_file("x").parent.glob("*.lock")} - {self.id}
        return not any(self._is_elsewhere(one) or not self._is_unlocked(one) for one in others)

    def forget_dead(self) -> None:
        """Remove the lock files of dead writers."""
        if self._backend.kind != "local":
            return
        for path in self._lock_file("x").parent.glob("*.lock"):
            if path.stem == self.id or self._is_elsewhere(path.stem):
                continue
            if self._is_unlocked(path.stem):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _lock_file(self, session: str) -> Path:
        return Path(self._backend.location(f"{LOCKS}/{session}.lock"))

    def _written_by(self, session: str) -> tuple[str, str]:
        """The process and the machine of a writer, from its lock file."""
        try:
            text = self._lock_file(session).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "", ""
        process, _, host = text.strip().partition(" ")
        return process, host

    def _is_elsewhere(self, session: str) -> bool:
        """Whether a writer is on another machine, whose locks may be invisible from here."""
        host = self._written_by(session)[1]
        return bool(host) and host != this_host()

    def _is_unlocked(self, session: str) -> bool:
        try:
            lock = os.open(self._lock_file(session), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False  # of another user: unknown
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(lock)


@contextlib.contextmanager
def sweeping(backend: StorageBackend) -> Iterator[bool]:
    """The context of a sweep; in a local folder, `await_sweeps` of other writers waits for it.

    Yields False when another process has been at it for long, in a folder: it does the work, or
    was stopped, and must not stop all others.
    """
    handle = _open_folder(backend)
    if handle < 0:
        yield True
        return
    try:
        yield _flock_within(handle, fcntl.LOCK_EX, SWEEP_WAIT_SECONDS)
    finally:
        with contextlib.suppress(OSError):
            # A process forked meanwhile shares the lock, and would keep it.
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def await_sweeps(backend: StorageBackend) -> None:
    """Wait for sweeps of a local folder that are under way, for a limited time."""
    handle = _open_folder(backend)
    if handle >= 0:
        _flock_within(handle, fcntl.LOCK_SH, COMMIT_WAIT_SECONDS)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _open_folder(backend: StorageBackend) -> int:
    """A descriptor of a local folder; -1 for other stores."""
    if backend.kind != "local":
        return -1
    try:
        return os.open(backend.location(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1


def _flock_within(handle: int, kind: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:
            return True  # there are no locks here
        else:
            return True
