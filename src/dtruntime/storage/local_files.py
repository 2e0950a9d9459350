"""Local files that are being written, and what is left of those whose writers died."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress

from .local_folders import Folders
from .names import PARTIAL

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_ATTEMPTS = 32


class PartialFile:
    """A file in its folder under a name that nobody reads, until it is published.

    Its lock tells that its writer is alive. Methods raise ``OSError``.
    """

    def __init__(self, folders: Folders, parts: Sequence[str]) -> None:
        self._name = parts[-1]
        self._partial = PARTIAL + os.urandom(8).hex()
        self._folder, self.handle = self._begin(folders, parts[:-1])
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

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


def sweep_folder(folder: int, older_than: float) -> int:
    """Delete remains in one folder that are old and have no living writer; how many."""
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
    if not stat.S_ISREG(info.st_mode) or time.time() - info.st_mtime < older_than:
        return False
    handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # there are no locks here, and its age has to do
    finally:
        os.close(handle)
    return True
