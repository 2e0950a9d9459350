"""Local files that are being written, and what is left of those whose writers died."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

from .backend import PARTIAL

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


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folders:
    """Opens folders by their parts relative to a root; symbolic links below it are refused.

    Methods raise ``OSError``.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._durable: set[tuple[int, int]] = set()

    @contextmanager
    def opened(self, parts: Sequence[str]) -> Iterator[int]:
        """A folder that is there; ``FileNotFoundError`` otherwise."""
        handle = self._walk(parts, make=False)
        try:
            yield handle
        finally:
            os.close(handle)

    def make(self, parts: Sequence[str]) -> int:
        """Open a folder, which is made, durably, when it is missing. The caller closes it."""
        return self._walk(parts, make=True)

    def prune(self, parts: Sequence[str]) -> None:
        """Remove a folder and those above it while they are empty; the root stays."""
        with suppress(OSError):
            for depth in range(len(parts), 0, -1):
                with self.opened(parts[: depth - 1]) as parent:
                    os.rmdir(parts[depth - 1], dir_fd=parent)

    def _walk(self, parts: Sequence[str], *, make: bool) -> int:
        handle = self._open_root(make)
        for part in parts:
            try:
                below = self._step(handle, part, make)
            except NotADirectoryError as exc:
                if make:
                    raise
                # What would lie under a file is not there.
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from exc
            finally:
                os.close(handle)
            handle = below
        return handle

    def _open_root(self, make: bool) -> int:
        with suppress(FileNotFoundError):
            return os.open(self.root, _FOLDER_FLAGS)
        if make:
            _make_durably(self.root)
        return os.open(self.root, _FOLDER_FLAGS)

    def _step(self, above: int, part: str, make: bool) -> int:
        made = False
        try:
            handle = _open_below(above, part)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=above)
                made = True
            handle = _open_below(above, part)
        if make:
            info = os.fstat(handle)
            self._keep(above, (info.st_dev, info.st_ino), made)
        return handle

    def _keep(self, above: int, folder: tuple[int, int], made: bool) -> None:
        """Make a folder's entry durable, once: whoever made it may not have come so far."""
        if made or folder not in self._durable:
            os.fsync(above)
            self._durable.add(folder)


def refuse_link(info: os.stat_result) -> None:
    """Raise ``OSError`` when something is a symbolic link."""
    if stat.S_ISLNK(info.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _open_below(above: int, part: str) -> int:
    try:
        return os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        refuse_link(os.stat(part, dir_fd=above, follow_symlinks=False))
        raise


def _make_durably(path: str) -> None:
    above = os.path.dirname(path)
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_durably(above)
        with suppress(FileExistsError):
            os.mkdir(path)
    handle = os.open(above, _FOLDER_FLAGS)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
