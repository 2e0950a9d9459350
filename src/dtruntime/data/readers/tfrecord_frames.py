"""The frames of TFRecord: a length, its checksum, the data, the data's checksum."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...errors import ShardError
from ...storage import FileStat
from .format_reader import block_ends
from .protobuf_wire import PADDING, Array
from .sniffing import starts_record
from .tfrecord_checksums import masked_crcs, masked_length_crcs
from .tfrecord_examples import MalformedExample

HEADER = 12
FRAME = 16
"""What a record takes beside its data."""
PARSED_BYTES = 2**20
PARSED_RECORDS = 1000
"""So much, and of large records so many, are parsed at once.

What is made of them should fit into the processor's cache, and each time costs a millisecond.
"""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Frames:
    """Complete records in a row."""

    data: bytes
    starts: Array
    """Where the data of each record starts in ``data``."""
    stops: Array
    first: int
    """The number of the first one in the file."""
    offset: int
    """Where ``data`` lies in the file."""

    @classmethod
    def found(cls, data: bytes, first: int, offset: int) -> Frames:
        """Find the complete records that ``data`` starts with."""
        stops = []
        at, size = 0, len(data)
        unpack = _LENGTH.unpack_from
        starts = []
        while at + HEADER <= size:
            stop = at + unpack(data, at)[0] + FRAME
            if stop > size:
                break
            starts.append(at + HEADER)
            stops.append(stop - 4)
            at = stop
        return cls(data, np.array(starts, np.int64), np.array(stops, np.int64), first, offset)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def ends(self) -> Array:
        """Where each record ends in ``data``, checksum included."""
        return self.stops + 4

    def part(self, start: int, stop: int) -> Frames:
        """Records ``start`` to ``stop``."""
        return Frames(
            self.data,
            self.starts[start:stop],
            self.stops[start:stop],
            self.first + start,
            self.offset,
        )

    def pieces(self) -> Iterator[Frames]:
        """The same records in runs to be parsed at once, each with ``PADDING`` behind."""
        begin, origin = 0, int(self.starts[0]) - HEADER
        view = memoryview(self.data)
        size = max(PARSED_BYTES, PARSED_RECORDS * (len(self.data) // len(self)))
        for last in block_ends(self.ends - origin, size).tolist():
            low, high = int(self.starts[begin]) - HEADER, int(self.ends[last])
            chosen = slice(begin, last + 1)
            yield Frames(
                b"".join((view[low:high], PADDING)),
                self.starts[chosen] - low,
                self.stops[chosen] - low,
                self.first + begin,
                self.offset + low,
            )
            begin = last + 1

    def verify(self, file: FileStat) -> None:
        """Raise ``ShardError`` for the first record whose checksums do not match."""
        lengths = (self.stops - self.starts).astype(np.uint64)
        pieces = [
            self.data[a:b] for a, b in zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        ]
        wrong_length = masked_length_crcs(lengths) != self._stored(self.starts - 4)
        wrong_data = masked_crcs(pieces) != self._stored(self.stops)
        wrong = np.flatnonzero(wrong_length | wrong_data)
        if wrong.size:
            number = int(wrong[0])
            what = "length" if wrong_length[number] else "data"
            raise self._corrupt(file, number, f"the checksum of its {what} does not match")

    def malformed(self, file: FileStat, error: MalformedExample) -> ShardError:
        """The error for a record that is no Example like the others."""
        return ShardError(
            f"{file.url}: record {self.first + error.record} at byte {self._place(error.record)}: "
            f"{error.reason}. Pass TfrecordOptions(raw=True) to get records as they are"
        )

    def _stored(self, at: Array) -> NDArray[np.uint32]:
        windows = sliding_window_view(np.frombuffer(self.data, np.uint8), 4)
        return np.ascontiguousarray(windows[at]).view("<u4").ravel()

    def _place(self, number: int) -> int:
        return self.offset + int(self.starts[number]) - HEADER

    def _corrupt(self, file: FileStat, number: int, what: str) -> ShardError:
        return ShardError(
            f"{file.url}: record {self.first + number} at byte {self._place(number)} is corrupt: "
            f"{what}; write the file again, or leave it out"
        )


def read_frames(chunks: Iterable[bytes], file: FileStat) -> Iterator[Frames]:
    """Cut a file's bytes into runs of complete records."""
    first = offset = needed = 0
    held: list[bytes] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(map(len, held)) < needed:
            continue
        data = b"".join(held)
        frames = Frames.found(data, first, offset)
        used = int(frames.ends[-1]) if len(frames) else 0
        if used:
            yield frames
        first, offset, held = first + len(frames), offset + used, [data[used:]]
        needed = _size_of_next(held[0], first, offset, file)
    if held and held[0]:
        raise ShardError(
            f"{file.url} ends within record {first}, which starts at byte {offset}: the file was "
            "cut off while being written; write it again, or leave it out"
        )


def _size_of_next(data: bytes, first: int, offset: int, file: FileStat) -> int:
    """How many bytes the record takes that ``data`` starts with, if its header is there."""
    if len(data) < HEADER:
        return HEADER
    if not starts_record(data):
        raise ShardError(
            f"{file.url}: record {first} at byte {offset} is corrupt: the checksum of its length "
            "does not match; write the file again, or leave it out"
        )
    return int(_LENGTH.unpack_from(data)[0]) + FRAME
