"""Folders under a root, opened step by step so that no name leads out of it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

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
