"""``tf.train.Example`` messages as Arrow columns, without TensorFlow.

Example  1: Features  1: map entry  1: name
                                    2: Feature  1: BytesList, 2: FloatList or 3: Int64List
                                                   1: values
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .protobuf_wire import FIXED32, LENGTH, VARINT, Array, Fields, Malformed, Wire, decode_varints

_BYTES, _FLOATS, _INTS = 1, 2, 3
_TYPES = {_BYTES: pa.binary(), _FLOATS: pa.float32(), _INTS: pa.int64()}
_SINGLE = {_BYTES: LENGTH, _FLOATS: FIXED32, _INTS: VARINT}
"""How a single value is written; several may be packed into one field with a length."""

Codes = NDArray[np.uint16] | NDArray[np.uint32]


class MalformedExample(Exception):
    """A record is not an Example, or contradicts the others."""

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
    data: bytes, starts: Array, stops: Array, wanted: Collection[str] | None = None
) -> dict[str, Feature]:
    """Return the features of the records at ``starts`` to ``stops``; ``wanted`` chooses some.

    ``data`` ends with ``PADDING``. Raises ``MalformedExample``.
    """
    examples = _Examples(data, starts, stops, wanted)
    used = dict.fromkeys(_TYPES, 0)
    features = {}
    for name, kind, found in examples.features():
        begin, used[kind] = used[kind], used[kind] + int(found.counts.sum())
        values = examples.values[kind].slice(begin, used[kind] - begin)
        features[name] = Feature(found.type, found.records, found.counts, values)
    return features


def count_values(data: bytes, starts: Array, stops: Array) -> dict[str, FeatureCounts]:
    """Like :func:`parse_examples` without the values, which need not be copied then."""
    examples = _Examples(data, starts, stops, None, copy=False)
    return {name: found for name, _, found in examples.features()}


class _Examples:
    """Records of the same bytes, opened level by level; all arrays follow their position."""

    def __init__(
        self,
        data: bytes,
        starts: Array,
        stops: Array,
        wanted: Collection[str] | None,
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
        self._names, self._codes, self._features = self._named(entries, wanted)
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
        self, entries: _Messages, wanted: Collection[str] | None
    ) -> tuple[list[str], Codes, _Messages]:
        """All names, and of the wanted entries the name's number and the value."""
        fields = self._open(entries)
        keys, values = (entries.last(_numbered(fields, number)) for number in (1, 2))
        found = self._wire.spans(keys.start, keys.stop).dictionary_encode()
        narrow = len(found.dictionary) < 2**16  # sorts in linear time
        codes = found.indices.to_numpy().astype(np.uint16 if narrow else np.uint32)
        names = [_text(key.as_py(), entries, codes, i) for i, key in enumerate(found.dictionary)]
        keep = _last_of_each(codes, values.record)
        if wanted is not None:
            keep &= np.isin(codes, [i for i, name in enumerate(names) if name in wanted])
        return names, codes[keep], values.where(keep)

    def _count(self) -> tuple[Array, Array]:
        """Each feature's kind and number of values; the values themselves are kept."""
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
        """Keep the values of a kind, and return how many there are in each chosen field."""
        if kind == _INTS:
            numbers, counts = _integers(self._wire.spans(fields.start, fields.stop, chosen))
            self.values[kind] = pa.array(numbers)
            return counts
        sizes = fields.stop[chosen] - fields.start[chosen]
        if kind == _FLOATS and (sizes % 4).any():
            raise Malformed(np.flatnonzero(sizes % 4)[0])
        if self._copy:
            payload = self._wire.spans(fields.start, fields.stop, chosen)
            self.values[kind] = _floats(payload) if kind == _FLOATS else payload.cast(pa.binary())
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
        found = self.having(fields)
        start, stop = self.start.copy(), self.start.copy()
        start[fields.parent], stop[fields.parent] = found.start, found.stop
        return _Messages(self.record, start, stop)


def _numbered(fields: Fields, number: int) -> Fields:
    """The fields of a number that are messages; as another type it is unknown to protobuf."""
    return fields.where((fields.number == number) & (fields.wire == LENGTH))


def _integers(payload: pa.Array) -> tuple[Array, Array]:
    """The numbers in all spans, and how many there are in each."""
    bounds, octets = _parts(payload)
    return decode_varints(octets, bounds)


def _floats(payload: pa.Array) -> pa.Array:
    return pa.array(_parts(payload)[1].view("<f4"))


def _parts(payload: pa.Array) -> tuple[Array, NDArray[np.uint8]]:
    """Where each span ends and the next begins, and the bytes of all."""
    if not len(payload):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, offsets, data = payload.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(payload) + 1)
    return bounds, np.frombuffer(data or b"", np.uint8, int(bounds[-1]))


def _last_of_each(codes: Codes, records: Array) -> NDArray[np.bool_]:
    """Which entries are not followed by another of the same name in the same record."""
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
