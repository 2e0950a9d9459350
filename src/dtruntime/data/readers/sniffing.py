"""Telling what a file really is, for the message when it is not what was asked for."""

from __future__ import annotations

from ...errors import ShardError
from ...storage import ByteSource, FileStat, data_files
from .compression import compression_of
from .tfrecord_checksums import masked_crc

HEAD = 512
_TEXT_CONTROLS = b"\t\n\r\f"


def head_of(file: FileStat, source: ByteSource = data_files) -> bytes:
    """The first bytes of a file."""
    return source.read_range(file, 0, min(HEAD, file.size))


def format_of(head: bytes) -> str:
    """The format that a file starting with ``head`` seems to have; empty when unknown."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if starts_record(head):
        return "tfrecord"
    if compression_of(head):
        return ""
    is_text = not any(byte < 32 and byte not in _TEXT_CONTROLS for byte in head)
    return "csv" if head and is_text else ""


def starts_record(head: bytes) -> bool:
    """Whether a TFRecord header with a correct checksum comes first."""
    return len(head) >= 12 and head[8:12] == masked_crc(head[:8]).to_bytes(4, "little")


def wrong_format(
    file: FileStat, wanted: str, detail: str, source: ByteSource = data_files
) -> ShardError:
    """The error for a file that cannot be read as ``wanted``."""
    found = format_of(head_of(file, source))
    if found and found != wanted:
        return ShardError(
            f"{file.url} is not a {wanted} file but looks like {found}: register the dataset "
            f"with format={found!r}, or leave this file out"
        )
    if found == wanted:
        return ShardError(
            f"{file.url} is corrupt ({detail}): it may have been cut off while being written; "
            "write it again, or leave it out"
        )
    return ShardError(
        f"{file.url} is not a {wanted} file ({detail}): check the format, or leave this file out"
    )
