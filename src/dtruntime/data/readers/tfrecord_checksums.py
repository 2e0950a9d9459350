"""The checksums of TFRecord files: CRC-32C, rotated and offset."""

from __future__ import annotations

from functools import cache

import numpy as np
from google_crc32c import value as crc32c
from numpy.typing import NDArray

_OFFSET = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """The checksum of ``data`` as TFRecord stores it."""
    crc: int = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _OFFSET) & 0xFFFFFFFF


def masked_crcs(pieces: list[bytes]) -> NDArray[np.uint32]:
    """The checksum of each of ``pieces``."""
    return _mask(np.fromiter(map(crc32c, pieces), np.uint32, len(pieces)))


def masked_length_crcs(lengths: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The checksum of each of ``lengths`` written as eight bytes.

    A CRC is affine over single bits, so it is put together from one table for each byte.
    """
    tables = _tables()
    octets = lengths.astype("<u8").view(np.uint8).reshape(-1, 8)
    crcs = np.full(len(lengths), crc32c(bytes(8)), np.uint32)
    for position in range(8):
        crcs ^= tables[position][octets[:, position]]
    return _mask(crcs)


@cache
def _tables() -> NDArray[np.uint32]:
    """What a byte's value at each of eight positions changes in the checksum of zeros."""
    zeros = crc32c(bytes(8))
    rows = [
        [crc32c(bytes(i) + bytes([byte]) + bytes(7 - i)) ^ zeros for byte in range(256)]
        for i in range(8)
    ]
    return np.array(rows, np.uint32)


def _mask(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(_OFFSET)
