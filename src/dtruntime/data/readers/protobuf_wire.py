"""The protobuf wire format, walked for many messages of the same kind at once.

Messages are spans of the same bytes. One pass over arrays finds the next field of every message,
so the cost of a field is a fraction of that of a protobuf object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array = NDArray[np.int64]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
PADDING = bytes(32)
"""Must follow the bytes of the last message."""
_FEW = 8
"""So few messages are walked one by one."""
_BEYOND = 2**62
_LAST_NUMBER = 2**29 - 1


class Malformed(Exception):
    """A message breaks the format; the argument is its number."""

    def __init__(self, message: int) -> None:
        super().__init__(message)
        self.message = int(message)


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of messages: of one message after the other, in their order."""

    parent: Array
    """The number of the message that has it."""
    number: Array
    wire: Array
    start: Array
    """Where its value starts; a length is not part of it."""
    stop: Array

    def where(self, chosen: NDArray[np.bool_]) -> Fields:
        """Some of them."""
        if chosen.all():
            return self
        return self.take(np.flatnonzero(chosen))

    def take(self, chosen: Array) -> Fields:
        """Some of them, by position."""
        return Fields(
            self.parent[chosen],
            self.number[chosen],
            self.wire[chosen],
            self.start[chosen],
            self.stop[chosen],
        )


class Wire:
    """Bytes that hold messages, with ``PADDING`` behind them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._octets = np.frombuffer(data, np.uint8)
        self._buffer = pa.py_buffer(data)

    def fields(self, start: Array, stop: Array) -> Fields:
        """Return the fields of the messages at ``start`` to ``stop``.

        Raises ``Malformed`` when a message is not made of fields.
        """
        parent = np.arange(len(start))
        steps: list[tuple[Array, ...]] = []
        at, end = start, stop
        while True:
            unfinished = at < end
            if not unfinished.all():
                parent, at, end = parent[unfinished], at[unfinished], end[unfinished]
            if parent.size < _FEW:
                break
            number, wire, begin, after = self._step(at)
            wrong = (after > end) | (after < begin) | (number < 1) | (number > _LAST_NUMBER)
            if wrong.any():
                raise Malformed(parent[wrong][0])
            steps.append((parent, number, wire, begin, after))
            at = after
        rest = [row for i in range(parent.size) for row in self._rest(parent[i], at[i], end[i])]
        return _ordered(steps, rest, len(start))

    def spans(self, start: Array, stop: Array, order: Array | None = None) -> pa.Array:
        """Return the bytes of spans whose positions ascend, or some of them in another order."""
        if not len(start):
            return pa.array([], pa.large_binary())
        # Every other element is what lies between two spans; Arrow copies the wanted ones.
        offsets = np.empty(2 * len(start), np.int64)
        offsets[0::2] = start
        offsets[1::2] = stop
        every = pa.Array.from_buffers(
            pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), self._buffer]
        )
        return every.take(pa.array((np.arange(len(start)) if order is None else order) * 2))

    def _step(self, at: Array) -> tuple[Array, Array, Array, Array]:
        """Number, wire type, and the span of the value of the field at each position."""
        tag, begin = self._varints(at)
        wire = tag & 7
        if (wire == LENGTH).all():
            length, begin = self._varints(begin)
            return tag >> 3, wire, begin, begin + length
        after = np.full_like(begin, _BEYOND)
        for kind, size in ((FIXED64, 8), (FIXED32, 4)):
            after[wire == kind] = begin[wire == kind] + size
        varint = np.flatnonzero(wire == VARINT)
        after[varint] = self._varints(begin[varint])[1]
        prefixed = np.flatnonzero(wire == LENGTH)
        length, begin[prefixed] = self._varints(begin[prefixed])
        after[prefixed] = begin[prefixed] + length
        return tag >> 3, wire, begin, after

    def _varints(self, at: Array) -> tuple[Array, Array]:
        """The value of the varint at each position, and the position behind it."""
        octet = self._octets[np.minimum(at, len(self._octets) - 1)]
        value = (octet & 0x7F).astype(np.int64)
        after = at + 1
        more = np.flatnonzero(octet >= 0x80)
        for shift in range(7, 70, 7):
            if not more.size:
                return value, after
            octet = self._octets[np.minimum(after[more], len(self._octets) - 1)]
            value[more] |= (octet & 0x7F).astype(np.int64) << shift
            after[more] += 1
            more = more[octet >= 0x80]
        after[more] = _BEYOND
        return value, after

    def _rest(self, parent: int, at: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """The fields of one message."""
        at, end = int(at), int(end)
        while at < end:
            tag, begin = self._varint(at)
            wire = tag & 7
            if wire == LENGTH:
                length, begin = self._varint(begin)
                after = begin + length
            elif wire == VARINT:
                after = self._varint(begin)[1]
            else:
                after = begin + {FIXED64: 8, FIXED32: 4}.get(wire, _BEYOND)
            if after > end or not 1 <= tag >> 3 <= _LAST_NUMBER:
                raise Malformed(parent)
            yield parent, tag >> 3, wire, begin, after
            at = after

    def _varint(self, at: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            octet = self._data[at] if at < len(self._data) else 0
            value |= (octet & 0x7F) << shift
            at += 1
            if octet < 0x80:
                return value, at
        return value, _BEYOND


def _ordered(
    steps: list[tuple[Array, ...]], rest: list[tuple[int, int, int, int, int]], messages: int
) -> Fields:
    """Put the fields found in each step into the order of the messages."""
    if not rest and all(len(step[0]) == messages for step in steps):
        if len(steps) == 1:
            return Fields(*steps[0])
        columns = [np.stack(column, axis=1).ravel() for column in zip(*steps, strict=True)]
        return Fields(*(columns or [np.zeros(0, np.int64)] * 5))
    steps.append(tuple(np.array(rest, np.int64).reshape(-1, 5).T))
    fields = Fields(*(np.concatenate(column) for column in zip(*steps, strict=True)))
    return fields.take(np.argsort(fields.parent, kind="stable"))


def decode_varints(payload: NDArray[np.uint8], bounds: Array) -> tuple[Array, Array]:
    """Decode varints packed one behind the other.

    Returns their values, and how many there are in each part of ``bounds``. Raises ``Malformed``
    with the number of a part that ends within one.
    """
    last = payload < 0x80
    if last.all():
        return payload.astype(np.int64), np.diff(bounds)
    seen = np.concatenate(([0], np.cumsum(last)))
    starts, stops = bounds[:-1], bounds[1:]
    ragged = (stops > starts) & ~last[np.maximum(stops - 1, 0)]
    if ragged.any():
        raise Malformed(np.flatnonzero(ragged)[0])
    ends = np.flatnonzero(last)
    begins = np.concatenate(([0], ends[:-1] + 1))
    widths = ends - begins + 1
    if (widths > 10).any():
        place = begins[widths > 10][0]
        raise Malformed(np.searchsorted(bounds, place, side="right") - 1)
    shifts = (np.arange(len(payload)) - np.repeat(begins, widths)) * 7
    parts = (payload & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.bitwise_or.reduceat(parts, begins).view(np.int64), np.diff(seen[bounds])
