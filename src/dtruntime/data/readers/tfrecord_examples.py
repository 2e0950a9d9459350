"""``tf.train.Example`` messages as Arrow columns, without TensorFlow.

Example  1: Features  1: map entry  1: name
                                    2: Feature  1: BytesList, 2: FloatList or 3: Int64List
                                                   1: values

`Wire` decodes the protobuf wire format of many messages at once: one pass over arrays finds the
next field of every message, at a fraction of the cost of protobuf objects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array = NDArray[np.int64]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
PADDING = bytes(32)
"""Must follow the bytes of the last message."""
_FEW = 8
"""Fewer messages than this are decoded one by one."""
_BEYOND = 2**62
_LAST_NUMBER = 2**29 - 1


class Malformed(Exception):
    """A message is not valid protobuf; the argument is its number."""

    def __init__(self, message: int) -> None:
        super().__init__(message)
        self.message = int(message)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of messages, message by message, in their order."""

    parent: Array
    """The number of the message that contains it."""
    number: Array
    wire: Array
    start: Array
    """Where its value starts, after the length if it has one."""
    stop: Array

    def where(self, chosen: NDArray[np.bool_]) -> Fields:
        """Some of them."""
        if chosen.all():
            return self
        return self.take(np.flatnonzero(chosen))

    def take(self, chosen: Array) -> Fields:
        """Some of them, by position."""
        arrays = (self.parent, self.number, self.wire, self.start, self.stop)
        return Fields(*(array[chosen] for array in arrays))


class Wire:
    """Bytes that contain messages, followed by ``PADDING``."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._octets = np.frombuffer(data, np.uint8)
        self._buffer = pa.py_buffer(data)

    def fields(self, start: Array, stop: Array) -> Fields:
        """Return the fields of the messages at ``start`` to ``stop``; may raise ``Malformed``."""
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
        # Every other element is the gap between two spans; Arrow copies the selected ones.
        offsets = np.empty(2 * len(start), np.int64)
        offsets[0::2] = start
        offsets[1::2] = stop
        every = pa.Array.from_buffers(
            pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), self._buffer]
        )
        return every.take(pa.array((np.arange(len(start)) if order is None else order) * 2))

    def _step(self, at: Array) -> tuple[Array, Array, Array, Array]:
        """The number, wire type and span of the value of the field at each position."""
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
        """The value of the varint at each position, and where it ends."""
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
    """Arrange the fields of all steps in the order of the messages."""
    if not rest and all(len(step[0]) == messages for step in steps):
        if len(steps) == 1:
            return Fields(*steps[0])
        columns = [np.stack(column, axis=1).ravel() for column in zip(*steps, strict=True)]
        return Fields(*(columns or [np.zeros(0, np.int64)] * 5))
    steps.append(tuple(np.array(rest, np.int64).reshape(-1, 5).T))
    fields = Fields(*(np.concatenate(column) for column in zip(*steps, strict=True)))
    return fields.take(np.argsort(fields.parent, kind="stable"))


def decode_varints(payload: NDArray[np.uint8], bounds: Array) -> tuple[Array, Array]:
    """Decode packed varints into their values, and how many there are in each part of ``bounds``.

    Raises ``Malformed`` with the number of a part that ends within a varint.
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


_BYTES, _FLOATS, _INTS = 1, 2, 3
_TYPES = {_BYTES: pa.binary(), _FLOATS: pa.float32(), _INTS: pa.int64()}
_SINGLE = {_BYTES: LENGTH, _FLOATS: FIXED32, _INTS: VARINT}
"""The wire type of a single value; several may be packed into one field with a length."""

Codes = NDArray[np.uint16] | NDArray[np.uint32]


class MalformedExample(Exception):
    """A record is not an Example, or does not fit the others."""

    def __init__(self, record: int, reason: str) -> None:
        super().__init__(f"record {record}: {reason}")
        self.record = record
        self.reason = reason


@dataclass(frozen=True, slots=True)
class FeatureCounts:
    """Which records have a feature, and how many values of it."""

    type: pa.DataType
    records: Array
    counts: Array
    """For each of those records."""

    def is_scalar(self, records: int) -> bool:
        """Whether each of all ``records`` has exactly one value."""
        return len(self.records) == records and bool((self.counts == 1).all())


@dataclass(frozen=True, slots=True)
class Feature(FeatureCounts):
    """One feature's values in the records that have it."""

    values: pa.Array


def parse_examples(
    data: bytes, starts: Array, stops: Array, selected: Collection[str] | None = None
) -> dict[str, Feature]:
    """Return the ``selected`` features of the records at ``starts`` to ``stops``, or all.

    ``data`` ends with ``PADDING``. Raises ``MalformedExample``.
    """
    examples = _Examples(data, starts, stops, selected)
    used = dict.fromkeys(_TYPES, 0)
    features = {}
    for name, kind, counted in examples.features():
        begin, used[kind] = used[kind], used[kind] + int(counted.counts.sum())
        values = examples.values[kind].slice(begin, used[kind] - begin)
        features[name] = Feature(counted.type, counted.records, counted.counts, values)
    return features


def count_values(data: bytes, starts: Array, stops: Array) -> dict[str, FeatureCounts]:
    """Like :func:`parse_examples`, without copying the values."""
    examples = _Examples(data, starts, stops, None, copy=False)
    return {name: counted for name, _, counted in examples.features()}


class _Examples:
    """Records decoded level by level; all arrays are in the order of their position."""

    def __init__(
        self,
        data: bytes,
        starts: Array,
        stops: Array,
        selected: Collection[str] | None,
        copy: bool = True,
    ) -> None:
        self._wire = Wire(data)
        self._copy = copy
        records = _Messages(np.arange(len(starts)), starts, stops)
        top = self._open(records)
        lists = _numbered(top, 2)
        if len(lists.parent):
            raise MalformedExample(int(lists.parent[0]), "it is a SequenceExample, not an Example")
        entries = self._inside(records.having(_numbered(top, 1)), 1)
        self._names, self._codes, self._features = self._named(entries, selected)
        self._order = np.argsort(self._codes, kind="stable")
        self.values: dict[int, pa.Array] = {}
        """All values of each kind, name after name in the order of :meth:`features`."""
        self._kinds, self._counts = self._count()

    def features(self) -> Iterator[tuple[str, int, FeatureCounts]]:
        """Each name, its kind, and which records have it."""
        bounds = np.searchsorted(self._codes[self._order], np.arange(len(self._names) + 1))
        for number, name in enumerate(self._names):
            part = self._order[bounds[number] : bounds[number + 1]]
            part = part[self._kinds[part] > 0]
            if part.size:
                records = self._features.record[part]
                kind = _one_kind(name, self._kinds[part], records)
                yield name, kind, FeatureCounts(_TYPES[kind], records, self._counts[part])

    def _open(self, messages: _Messages) -> Fields:
        try:
            return self._wire.fields(messages.start, messages.stop)
        except Malformed as exc:
            raise _not_example(messages.record[exc.message]) from None

    def _inside(self, messages: _Messages, number: int) -> _Messages:
        """The messages in a field of ``messages``."""
        return messages.having(_numbered(self._open(messages), number))

    def _named(
        self, entries: _Messages, selected: Collection[str] | None
    ) -> tuple[list[str], Codes, _Messages]:
        """All names, and the name's number and the value of each selected entry."""
        fields = self._open(entries)
        keys, values = (entries.last(_numbered(fields, number)) for number in (1, 2))
        encoded = self._wire.spans(keys.start, keys.stop).dictionary_encode()
        narrow = len(encoded.dictionary) < 2**16  # sorts in linear time
        codes = encoded.indices.to_numpy().astype(np.uint16 if narrow else np.uint32)
        names = [_text(key.as_py(), entries, codes, i) for i, key in enumerate(encoded.dictionary)]
        keep = _last_of_each(codes, values.record)
        if selected is not None:
            keep &= np.isin(codes, [i for i, name in enumerate(names) if name in selected])
        return names, codes[keep], values.where(keep)

    def _count(self) -> tuple[Array, Array]:
        """Each feature's kind and number of values; the values are stored in ``values``."""
        fields = self._open(self._features)
        fields = fields.where((fields.wire == LENGTH) & (fields.number <= _INTS))
        kinds = np.zeros(len(self._codes), np.int64)
        kinds[fields.parent] = fields.number
        fields = fields.where(fields.number == kinds[fields.parent])  # of two kinds the last counts
        inner = self._open(self._features.having(fields))
        inner = inner.where(inner.number == 1)
        owner = fields.parent[inner.parent]
        order = self._order
        if len(owner) != len(order) or (np.diff(owner) != 1).any():
            order = np.argsort(self._codes[owner], kind="stable")
        counts = np.zeros(len(owner), np.int64)
        for kind in _TYPES:
            fitting = (inner.wire == LENGTH) | (inner.wire == _SINGLE[kind])
            chosen = order[(fitting & (kinds[owner] == kind))[order]]
            try:
                counts[chosen] = self._decode(kind, inner, chosen)
            except Malformed as exc:
                raise _not_example(self._features.record[owner[chosen[exc.message]]]) from None
        many = np.bincount(owner, weights=counts, minlength=len(kinds)).astype(np.int64)
        return kinds, many

    def _decode(self, kind: int, fields: Fields, chosen: Array) -> Array:
        """Store the values of a kind, and return how many there are in each chosen field."""
        if kind == _INTS:
            bounds, octets = _parts(self._wire.spans(fields.start, fields.stop, chosen))
            numbers, counts = decode_varints(octets, bounds)
            self.values[kind] = pa.array(numbers)
            return counts
        sizes = fields.stop[chosen] - fields.start[chosen]
        if kind == _FLOATS and (sizes % 4).any():
            raise Malformed(np.flatnonzero(sizes % 4)[0])
        if self._copy:
            payload = self._wire.spans(fields.start, fields.stop, chosen)
            if kind == _FLOATS:
                self.values[kind] = pa.array(_parts(payload)[1].view("<f4"))
            else:
                self.values[kind] = payload.cast(pa.binary())
        return sizes // 4 if kind == _FLOATS else np.ones_like(sizes)


@dataclass(frozen=True, slots=True)
class _Messages:
    """Messages and the record that each is part of."""

    record: Array
    start: Array
    stop: Array

    def where(self, chosen: NDArray[np.bool_]) -> _Messages:
        if chosen.all():
            return self
        return _Messages(self.record[chosen], self.start[chosen], self.stop[chosen])

    def having(self, fields: Fields) -> _Messages:
        """The messages that are fields of these."""
        return _Messages(self.record[fields.parent], fields.start, fields.stop)

    def last(self, fields: Fields) -> _Messages:
        """The last of the fields of each of these; an empty one where there is none."""
        start, stop = self.start.copy(), self.start.copy()
        start[fields.parent], stop[fields.parent] = fields.start, fields.stop
        return _Messages(self.record, start, stop)


def _numbered(fields: Fields, number: int) -> Fields:
    """The fields of a number that are messages; protobuf ignores those of another wire type."""
    return fields.where((fields.number == number) & (fields.wire == LENGTH))


def _parts(payload: pa.Array) -> tuple[Array, NDArray[np.uint8]]:
    """The bounds between spans, and the bytes of all."""
    if not len(payload):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, offsets, data = payload.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(payload) + 1)
    return bounds, np.frombuffer(data or b"", np.uint8, int(bounds[-1]))


def _last_of_each(codes: Codes, records: Array) -> NDArray[np.bool_]:
    """Which entries are the last of their name in their record."""
    order = np.argsort(codes, kind="stable")
    repeated = (codes[order][1:] == codes[order][:-1]) & (records[order][1:] == records[order][:-1])
    keep = np.ones(len(codes), np.bool_)
    keep[order[:-1][repeated]] = False
    return keep


def _one_kind(name: str, kinds: Array, records: Array) -> int:
    other = np.flatnonzero(kinds != kinds[0])
    if other.size:
        here, there = _TYPES[int(kinds[other[0]])], _TYPES[int(kinds[0])]
        raise MalformedExample(
            int(records[other[0]]), f"feature {name!r} is {here}, and {there} in another record"
        )
    return int(kinds[0])


def _text(key: bytes, entries: _Messages, codes: Codes, code: int) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise _not_example(entries.record[codes == code][0]) from None


def _not_example(record: np.int64) -> MalformedExample:
    return MalformedExample(int(record), "it is not a tf.train.Example")
