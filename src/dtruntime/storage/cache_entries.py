"""Entries of the disk cache: files that prove that they are ours, and that they are whole."""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import suppress

from ..telemetry import EventLog
from .data_files import FileStat

log = EventLog("storage.disk_cache")

MAGIC = b"STRATA-1"
_HEADER = struct.Struct("<8s32sQI")
HEADER_BYTES = _HEADER.size
# Neither follow a link nor wait for the writer of a pipe that lies where an entry should.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def key_of(file: FileStat, offset: int, length: int) -> bytes:
    """What a range is kept under: another one for other content."""
    told = file.url, file.size, file.fingerprint, offset, length
    return hashlib.sha256(repr(told).encode()).digest()


def read_entry(path: str, key: bytes, length: int) -> bytes | None:
    """Return what was kept, and mark it as used; None when it is not there or is not whole.

    What is not whole is deleted if it is ours.
    """
    try:
        handle = os.open(path, _READ)
    except FileNotFoundError:
        return None
    try:
        head = os.read(handle, HEADER_BYTES)
        data = _read_rest(handle, length)
        if head == _header(key, data) and len(data) == length:
            with suppress(OSError):  # the folder may be read-only
                os.utime(handle)
            return data
    finally:
        os.close(handle)
    log.debug("cache.damaged", file=path)
    delete_entry(path)
    return None


def write_entry(path: str, key: bytes, data: bytes) -> None:
    """Keep data; others see the whole entry or none. A file that is not ours stays."""
    with suppress(FileNotFoundError):
        if not _is_ours(path):
            return
    partial = f"{path}.{os.urandom(8).hex()}.partial"
    try:
        with open(partial, "xb", opener=_private) as sink:
            sink.write(_header(key, data))
            sink.write(data)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def delete_entry(path: str) -> bool:
    """Delete an entry, complete or partial; False when the file is not ours and stays."""
    with suppress(FileNotFoundError):
        if not _is_ours(path):
            return False
        os.unlink(path)
    return True


def _is_ours(path: str) -> bool:
    """Whether a file begins as an entry does, or as one does that a crash left unwritten."""
    handle = os.open(path, _READ)
    try:
        head = os.read(handle, len(MAGIC))
    finally:
        os.close(handle)
    return MAGIC.startswith(head) or not head.strip(b"\0")


def is_entry(path: str) -> bool:
    """Whether a file is there and begins as an entry does."""
    try:
        return _is_ours(path)
    except OSError:
        return False


def _header(key: bytes, data: bytes) -> bytes:
    from google_crc32c import value as crc32c

    return _HEADER.pack(MAGIC, key, len(data), crc32c(data))


def _read_rest(handle: int, length: int) -> bytes:
    """Up to ``length`` bytes, mostly in one piece; a system call has an upper limit."""
    pieces = []
    while length and (piece := os.read(handle, length)):
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
