"""Files in a folder of this machine, or of a file system that it mounts."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeAlias

from .._background import side_by_side
from .._buffers import BlockPool, Views, blocks_of, cut, in_pieces, size_of
from ..errors import StorageError, StorageNotFoundError
from ..telemetry import EventLog
from .backend import (
    PARTIAL,
    Failures,
    Names,
    Pieces,
    Range,
    StorageBackend,
    StoredFile,
    StreamWriter,
    storage_errors,
)
from .local_writer import (
    BLOCK,
    DIRECT_FROM,
    LANES,
    DirectRefusedError,
    LocalStreamWriter,
    PartialFile,
    set_direct,
    sweep_folder,
    write_views,
)

log = EventLog("storage.local")

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_READ_PART = 4 * 2**20
_READ_LANES = 4
_SWEEP_SECONDS = 3600.0

Entries: TypeAlias = list[tuple[str, os.stat_result]]


class LocalBackend(StorageBackend):
    """Files under a folder, which is made when something is written.

    A file is written beside its place, flushed to the disk and renamed; then the folder is flushed.
    What a killed process leaves is named ``.strata-partial-*``, is never listed, and is deleted by
    the next writer to the same folder, or by :meth:`sweep`: at once if a lock proves that its
    writer, on this machine, is dead, otherwise after an hour. Symbolic links under the folder are
    neither followed nor listed. Folders that become empty are removed.

    Files of 1 MiB and more are written directly, past the page cache, if the file system can
    (``direct=False`` never does). That is as fast as the disk, and leaves the cache to the data.
    """

    kind = "local"

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True) -> None:
        """``path`` need not exist yet; nothing is touched before something is read or written."""
        self.root = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self.url = Path(self.root).as_uri()
        self._folders = Folders(self.root)
        self._bounce = BlockPool(BLOCK, 2 * LANES)
        self._direct = direct
        self._buffered_devices: set[int] = set()
        self._swept: set[str] = set()

    def location(self, name: str = "") -> str:
        """The absolute path."""
        return os.path.join(self.root, name) if name else self.root

    def close(self) -> None:
        """Release memory; the backend can still be used."""
        self._bounce.clear()

    def _read(self, name: str) -> bytes:
        with self._opened(name) as (handle, size):
            return _read_exactly(handle, 0, size)

    def _read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        with self._opened(name, ranges) as (handle, _):
            return [_read_exactly(handle, offset, length) for offset, length in ranges]

    def _read_into(self, name: str, offset: int, views: Views) -> None:
        length = size_of(views)
        with self._opened(name, [(offset, length)]) as (handle, _):

            def fill(part: tuple[int, Views]) -> None:
                _fill(handle, *part)

            parts = zip(count(offset, _READ_PART), blocks_of(views, _READ_PART), strict=False)
            side_by_side(parts, fill, max(1, min(_READ_LANES, -(-length // _READ_PART))))

    def _write(self, name: str, views: Views) -> None:
        with storage_errors("write", self.location(name)), self._partial(name) as file:
            self._fill_file(file, views)
            file.publish()

    def _create(self, name: str, views: Views) -> bool:
        with storage_errors("create", self.location(name)), self._partial(name) as file:
            self._fill_file(file, views)
            return file.publish_new()

    def _writer(self, name: str) -> StreamWriter:
        with storage_errors("write", self.location(name)):
            self._sweep_once(name)
            file = self._begin(name)
            direct = self._wants_direct(file.handle)
        return LocalStreamWriter(name, self.location(name), file, self._bounce, direct=direct)

    def _delete(self, name: str) -> None:
        failures = self._delete_many([name])
        if failures:
            raise failures[0][1]

    def _delete_many(self, names: Names) -> Failures:
        failures: Failures = []
        by_folder: dict[str, Names] = {}
        for name in names:
            by_folder.setdefault(name.rpartition("/")[0], []).append(name)
        for folder, inside in by_folder.items():
            failures += self._delete_in(_parts(folder), inside)
        return failures

    def _stat(self, name: str) -> StoredFile:
        folder, _, last = name.rpartition("/")
        with storage_errors("look at", self.location(name)):
            with self._folders.opened(_parts(folder)) as handle:
                info = os.stat(last, dir_fd=handle, follow_symlinks=False)
            refuse_link(info)
            if not stat.S_ISREG(info.st_mode):
                raise StorageNotFoundError(f"{self.location(name)} is not a file")
        return StoredFile(name, info.st_size, info.st_mtime)

    def _list(self, prefix: str) -> Iterator[StoredFile]:
        pending = [prefix]
        while pending:
            folder = pending.pop()
            for name, info in self._entries(folder):
                if stat.S_ISDIR(info.st_mode):
                    pending.append(name)
                elif stat.S_ISREG(info.st_mode):
                    yield StoredFile(name, info.st_size, info.st_mtime)
                elif stat.S_ISLNK(info.st_mode):
                    log.debug("storage.link_left_out", path=self.location(name))

    def _sweep(self, older_than: float) -> int:
        swept = 0
        pending = [""]
        while pending:
            folder = pending.pop()
            pending += [n for n, info in self._entries(folder) if stat.S_ISDIR(info.st_mode)]
            with storage_errors("sweep", self.location(folder)), suppress(FileNotFoundError):
                with self._folders.opened(_parts(folder)) as handle:
                    removed = sweep_folder(handle, older_than)
                if removed:
                    self._folders.prune(_parts(folder))
                swept += removed
        return swept

    def _entries(self, folder: str) -> Entries:
        """What is in a folder, except partial files; nothing if it does not exist."""
        infos: Entries = []
        with (
            storage_errors("list", self.location(folder)),
            suppress(FileNotFoundError),
            self._folders.opened(_parts(folder)) as handle,
            os.scandir(handle) as entries,
        ):
            for entry in entries:
                if not entry.name.startswith(PARTIAL):
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    with suppress(FileNotFoundError):
                        infos.append((name, entry.stat(follow_symlinks=False)))
        return infos

    @contextmanager
    def _opened(self, name: str, ranges: Sequence[Range] = ()) -> Iterator[tuple[int, int]]:
        """The open file and its size; ``StorageError`` if it is too short for the ranges."""
        folder, _, last = name.rpartition("/")
        with storage_errors("read", self.location(name)):
            with self._folders.opened(_parts(folder)) as above:
                handle = os.open(last, _READ, dir_fd=above)
            try:
                info = os.fstat(handle)
                if not stat.S_ISREG(info.st_mode):
                    raise StorageNotFoundError(f"{self.location(name)} is not a file")
                for offset, length in ranges:
                    if offset + length > info.st_size:
                        raise self._too_short(name, info.st_size, offset, length)
                yield handle, info.st_size
            finally:
                os.close(handle)

    @contextmanager
    def _partial(self, name: str) -> Iterator[PartialFile]:
        self._sweep_once(name)
        file = self._begin(name)
        try:
            yield file
        finally:
            file.close()

    def _begin(self, name: str) -> PartialFile:
        *above, last = name.split("/")
        return PartialFile(lambda: self._folders.make(above), last)

    def _fill_file(self, file: PartialFile, views: Views) -> None:
        if size_of(views) >= DIRECT_FROM and self._wants_direct(file.handle):
            try:
                write_views(file.handle, views, self._bounce, direct=True)
                return
            except DirectRefusedError:
                self._buffered_devices.add(os.fstat(file.handle).st_dev)
                set_direct(file.handle, False)
        write_views(file.handle, views, self._bounce, direct=False)

    def _wants_direct(self, handle: int) -> bool:
        return self._direct and os.fstat(handle).st_dev not in self._buffered_devices

    def _sweep_once(self, name: str) -> None:
        """Sweep a folder before it is first written to."""
        folder = name.rpartition("/")[0]
        if folder not in self._swept:
            self._swept.add(folder)
            with suppress(OSError), self._folders.opened(_parts(folder)) as handle:
                sweep_folder(handle, _SWEEP_SECONDS)

    def _delete_in(self, folder: Sequence[str], names: Names) -> Failures:
        failures: Failures = []
        where = self.location("/".join(folder))
        try:
            with storage_errors("delete in", where), suppress(FileNotFoundError):
                with self._folders.opened(folder) as handle:
                    failures = [f for name in names if (f := self._unlink(handle, name))]
                    os.fsync(handle)
                self._folders.prune(folder)
        except StorageError as exc:
            failed = dict(failures)
            return [(name, failed.get(name, exc)) for name in names]
        return failures

    def _unlink(self, folder: int, name: str) -> tuple[str, StorageError] | None:
        try:
            with storage_errors("delete", self.location(name)), suppress(FileNotFoundError):
                os.unlink(name.rpartition("/")[2], dir_fd=folder)
        except StorageError as exc:
            return name, exc
        return None


def _parts(folder: str) -> list[str]:
    return folder.split("/") if folder else []


def _read_exactly(handle: int, offset: int, length: int) -> bytes:
    data = os.pread(handle, length, offset)
    if len(data) == length:
        return data
    whole = bytearray(length)
    _fill(handle, offset, [memoryview(whole)])
    return bytes(whole)


def _fill(handle: int, offset: int, views: Views) -> None:
    for batch in in_pieces(views):
        while batch:
            size = os.preadv(handle, batch, offset)
            if not size:
                raise OSError(f"the file was truncated to {offset} bytes while it was read")
            offset, batch = offset + size, cut(batch, size, size_of(batch))


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folders:
    """Opens folders below a root, by their parts; refuses symbolic links. Raises ``OSError``."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._durable: set[tuple[int, int]] = set()

    @contextmanager
    def opened(self, parts: Sequence[str]) -> Iterator[int]:
        """An existing folder; ``FileNotFoundError`` otherwise."""
        handle = self._walk(parts, make=False)
        try:
            yield handle
        finally:
            os.close(handle)

    def make(self, parts: Sequence[str]) -> int:
        """Open a folder, which is created durably if it is missing. The caller closes it."""
        return self._walk(parts, make=True)

    def prune(self, parts: Sequence[str]) -> None:
        """Remove a folder and its parents while they are empty; the root stays."""
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
                # Nothing can lie under a file.
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
        """Make a folder's entry durable, once: its maker may have died before that."""
        if made or folder not in self._durable:
            os.fsync(above)
            self._durable.add(folder)


def refuse_link(info: os.stat_result) -> None:
    """Raise ``OSError`` for a symbolic link."""
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
