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

from .base import SchemaConflict
from .wire import FIXED32, LENGTH, VARINT, Array, Fields, Malformed, Wire, decode_varints

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
class Feature:
    """One feature's values in the records that have it."""

    type: pa.DataType
    records: Array
    counts: Array
    """How many values each of those records has."""
    values: pa.Array

    def is_scalar(self, records: int) -> bool:
        """Whether each of all ``records`` has exactly one value."""
        return len(self.records) == records and bool((self.counts == 1).all())


def parse_examples(
    data: bytes, starts: Array, stops: Array, wanted: Collection[str] | None = None
) -> dict[str, Feature]:
    """Return the features of the records at ``starts`` to ``stops``; ``wanted`` chooses some.

    ``data`` ends with ``PADDING``. Raises ``MalformedExample``.
    """
    return dict(_Examples(data, starts, stops).features(wanted))


class _Examples:
    """Records of the same bytes, opened level by level; all arrays follow their position."""

    def __init__(self, data: bytes, starts: Array, stops: Array) -> None:
        self._wire = Wire(data)
        self._records = _Messages(np.arange(len(starts)), starts, stops)

    def features(self, wanted: Collection[str] | None) -> Iterator[tuple[str, Feature]]:
        """Names and features, in no particular order of names."""
        top = self._open(self._records)
        lists = _numbered(top, 2)
        if len(lists.parent):
            raise MalformedExample(int(lists.parent[0]), "it is a SequenceExample, not an Example")
        entries = self._inside(self._records.having(_numbered(top, 1)), 1)
        names, codes, features = self._named(entries, wanted)
        order = np.argsort(codes, kind="stable")
        kinds, counts, values = self._values(codes, order, features)
        bounds = np.searchsorted(codes[order], np.arange(len(names) + 1))
        used = dict.fromkeys(_TYPES, 0)
        for number, name in enumerate(names):
            part = order[bounds[number] : bounds[number + 1]]
            part = part[kinds[part] > 0]
            if not part.size:
                continue
            kind = _one_kind(name, kinds[part], features.record[part])
            begin, used[kind] = used[kind], used[kind] + int(counts[part].sum())
            column = values[kind].slice(begin, used[kind] - begin)
            yield name, Feature(_TYPES[kind], features.record[part], counts[part], column)

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
        names = [
            _text(name.as_py(), entries, codes == i) for i, name in enumerate(found.dictionary)
        ]
        keep = _last_of_each(codes, values.record)
        if wanted is not None:
            keep &= np.isin(codes, [i for i, name in enumerate(names) if name in wanted])
        return names, codes[keep], values.where(keep)

    def _values(
        self, codes: Codes, order: Array, features: _Messages
    ) -> tuple[Array, Array, dict[int, pa.Array]]:
        """Each feature's kind and number of values; of each kind, all values by name.

        ``order`` sorts the features by name.
        """
        fields = self._open(features)
        fields = fields.where((fields.wire == LENGTH) & (fields.number <= _INTS))
        kinds = np.zeros(len(codes), np.int64)
        kinds[fields.parent] = fields.number
        fields = fields.where(fields.number == kinds[fields.parent])  # of two kinds the last counts
        lists = features.having(fields)
        inner = self._open(lists)
        inner = inner.where(inner.number == 1)
        owner = fields.parent[inner.parent]
        if len(owner) != len(codes) or (np.diff(owner) != 1).any():
            order = np.argsort(codes[owner], kind="stable")
        counts = np.zeros(len(owner), np.int64)
        values = {}
        for kind in _TYPES:
            fitting = (inner.wire == LENGTH) | (inner.wire == _SINGLE[kind])
            fitting &= kinds[owner] == kind
            chosen = order[fitting[order]]
            payload = self._wire.spans(inner.start, inner.stop, chosen)
            try:
                values[kind], counts[chosen] = _decode(kind, payload)
            except Malformed as exc:
                raise _not_example(features.record[owner[chosen[exc.message]]]) from None
        many = np.bincount(owner, weights=counts, minlength=len(codes)).astype(np.int64)
        return kinds, many, values


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


def _decode(kind: int, payload: pa.Array) -> tuple[pa.Array, Array]:
    """Return the values in all spans, and how many there are in each."""
    if kind == _BYTES:
        return payload.cast(pa.binary()), np.ones(len(payload), np.int64)
    if not len(payload):
        return pa.array([], _TYPES[kind]), np.zeros(0, np.int64)
    _, offsets, data = payload.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(payload) + 1)
    octets = np.frombuffer(data or b"", np.uint8, int(bounds[-1]))
    if kind == _INTS:
        numbers, counts = decode_varints(octets, bounds)
        return pa.array(numbers), counts
    sizes = np.diff(bounds)
    if (sizes % 4).any():
        raise Malformed(np.flatnonzero(sizes % 4)[0])
    return pa.array(octets.view("<f4")), sizes // 4


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


def _text(name: bytes, entries: _Messages, having: NDArray[np.bool_]) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise _not_example(entries.record[having][0]) from None


def _not_example(record: np.int64) -> MalformedExample:
    return MalformedExample(int(record), "it is not a tf.train.Example")


def schema_of(features: dict[str, Feature], records: int) -> pa.Schema:
    """The columns of features in ``records`` records, by name: lists unless scalars suffice."""
    return pa.schema(
        [
            (name, feature.type if feature.is_scalar(records) else pa.list_(feature.type))
            for name, feature in sorted(features.items())
        ]
    )


def merge_schemas(left: pa.Schema, right: pa.Schema) -> pa.Schema:
    """Return columns that fit records of both; one that a part lacks is a list in both."""
    fields = []
    for name in sorted({*left.names, *right.names}):
        types = [schema.field(name).type for schema in (left, right) if name in schema.names]
        items = {item_type(kind) for kind in types}
        if len(items) > 1:
            raise SchemaConflict(f"{name!r} is {types[0]} in the first, {types[1]} in the second")
        scalar = len(types) == 2 and not any(map(pa.types.is_list, types))
        fields.append((name, types[0] if scalar else pa.list_(items.pop())))
    return pa.schema(fields)


def item_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's single values."""
    return kind.value_type if pa.types.is_list(kind) else kind


def to_column(feature: Feature | None, kind: pa.DataType, records: int) -> pa.Array:
    """Return a feature as a column of ``records`` rows; ``SchemaConflict`` if it does not fit."""
    if feature is None:
        feature = Feature(item_type(kind), _NONE, _NONE, pa.array([], item_type(kind)))
    if feature.type != item_type(kind):
        raise SchemaConflict(f"it is {feature.type}, not {kind}")
    if not pa.types.is_list(kind):
        if not feature.is_scalar(records):
            raise SchemaConflict("a record has none or several of its values")
        return feature.values
    counts = np.zeros(records, np.int64)
    counts[feature.records] = feature.counts
    missing = np.ones(records, np.bool_)
    missing[feature.records] = False
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(offsets, feature.values, type=kind, mask=mask)


_NONE = np.zeros(0, np.int64)
