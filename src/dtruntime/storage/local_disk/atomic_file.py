"""Local files that are being written, and what is left of those whose writers died."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from ..local_folders import Folders
from ..names import PARTIAL

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_ATTEMPTS = 32


class PartialFile:
    """A file in its folder under a name that nobody reads, until it is published.

    Its lock tells that its writer is alive; from when it is held, the name says on which machine.
    Methods raise ``OSError``.
    """

    def __init__(self, folders: Folders, parts: Sequence[str]) -> None:
        self._name = parts[-1]
        self._partial = PARTIAL + os.urandom(8).hex()
        self._folder, self.handle = self._begin(folders, parts[:-1])
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mark()

    def publish(self) -> None:
        """Make the content durable, then visible in place of what has the name."""
        flush(self.handle)
        os.replace(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def publish_new(self) -> bool:
        """The same if nothing has the name; False if something has."""
        flush(self.handle)
        try:
            os.link(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return False
        os.unlink(self._partial, dir_fd=self._folder)
        os.fsync(self._folder)
        return True

    def close(self) -> None:
        """End; of a file that was not published nothing is left. It does not raise."""
        if self._folder < 0:
            return
        with suppress(OSError):
            os.unlink(self._partial, dir_fd=self._folder)
        os.close(self.handle)
        os.close(self._folder)
        self.handle = self._folder = -1

    def _mark(self) -> None:
        """Let the name say whose lock it is: under that name it is never seen unlocked."""
        host = this_host()
        if host:
            marked = f"{PARTIAL}{host}-{self._partial.removeprefix(PARTIAL)}"
            folder = self._folder
            os.rename(self._partial, marked, src_dir_fd=folder, dst_dir_fd=folder)
            self._partial = marked

    def _begin(self, folders: Folders, above: Sequence[str]) -> tuple[int, int]:
        for attempt in range(_ATTEMPTS):
            folder = -1
            try:
                folder = folders.make(above)
                return folder, os.open(self._partial, _NEW, 0o666, dir_fd=folder)
            except BaseException as exc:
                if folder >= 0:
                    os.close(folder)
                # Somebody removed the folder, because it was empty, before the file was in it.
                if not isinstance(exc, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt raises")


def flush(handle: int) -> None:
    """Bring a file's content to the disk, through the disk's own cache."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(handle)
    else:
        fcntl.fcntl(handle, full)


@cache
def this_host() -> str:
    """What tells this machine, since it was started, from every other; empty where nobody knows.

    Its processes see each other's locks. Those of another machine may not be seen: some network
    file systems keep locks to themselves.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as source:
            boot = source.read().strip()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}/{socket.gethostname()}".encode()).hexdigest()[:12]


def sweep_folder(folder: int, older_than: float) -> int:
    """Delete remains in one folder that have no living writer; how many.

    Of processes of this machine a lock tells that. Others' have to be ``older_than`` so many
    seconds too.
    """
    swept = 0
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if entry.name.startswith(PARTIAL)]
    for name in found:
        with suppress(OSError):
            if _is_abandoned(folder, name, older_than):
                os.unlink(name, dir_fd=folder)
                swept += 1
    return swept


def _is_abandoned(folder: int, name: str, older_than: float) -> bool:
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode):
        return False
    is_old = time.time() - info.st_mtime >= older_than
    host = this_host()
    if not is_old and not (host and name.startswith(f"{PARTIAL}{host}-")):
        return False
    handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return is_old  # there are no locks here, and its age has to do
    finally:
        os.close(handle)
    return True
