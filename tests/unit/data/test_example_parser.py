"""The column-wise parser of Examples against Google's protobuf, damaged messages included."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.data.readers.tfrecord_examples import PADDING, MalformedExample, parse_examples
from tests.support.data.record_files import example, feature, field, varint

KINDS = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}
LABEL = descriptor_pb2.FieldDescriptorProto


def example_class() -> Any:
    """tf.train.Example as TensorFlow's example.proto and feature.proto define it."""
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")
    for name, kind in (("B", LABEL.TYPE_BYTES), ("F", LABEL.TYPE_FLOAT), ("I", LABEL.TYPE_INT64)):
        add(file.message_type.add(name=name), "value", 1, kind, repeated=True)
    one = file.message_type.add(name="Feature")
    one.oneof_decl.add(name="kind")
    for number, (name, letter) in enumerate(zip(KINDS, "BFI", strict=True), start=1):
        add(one, name, number, LABEL.TYPE_MESSAGE, f".t.{letter}").oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, LABEL.TYPE_STRING)
    add(entry, "value", 2, LABEL.TYPE_MESSAGE, ".t.Feature")
    inner = ".t.Features.FeatureEntry"
    add(features, "feature", 1, LABEL.TYPE_MESSAGE, inner, repeated=True)
    add(file.message_type.add(name="Example"), "features", 1, LABEL.TYPE_MESSAGE, ".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def add(
    owner: Any, name: str, number: int, kind: Any, type_name: str = "", repeated: bool = False
) -> Any:
    label = LABEL.LABEL_REPEATED if repeated else LABEL.LABEL_OPTIONAL
    named = {"type_name": type_name} if type_name else {}
    return owner.field.add(name=name, number=number, type=kind, label=label, **named)


EXAMPLE = example_class()


def by_protobuf(record: bytes) -> dict[str, Any] | None:
    try:
        parsed = EXAMPLE.FromString(record)
    except message.DecodeError:
        return None
    found = {}
    for name, value in parsed.features.feature.items():
        kind = value.WhichOneof("kind")
        if kind:
            found[name] = KINDS[kind], list(getattr(value, kind).value)
    return found


def by_columns(records: list[bytes]) -> list[dict[str, Any]] | None:
    ends = np.cumsum([len(record) for record in records])
    starts = ends - [len(record) for record in records]
    try:
        features = parse_examples(b"".join(records) + PADDING, starts, ends)
    except MalformedExample:
        return None
    kinds = {"binary": "bytes", "float": "float", "int64": "int64"}
    found: list[dict[str, Any]] = [{} for _ in records]
    for name, one in features.items():
        values = one.values.to_pylist()
        stops = np.cumsum(one.counts)
        for record, stop, count in zip(one.records, stops, one.counts, strict=True):
            found[record][name] = kinds[str(one.type)], values[stop - count : stop]
    return found


NAMES = st.sampled_from(["a", "b", "ü", ""])
LISTS = st.one_of(
    st.tuples(st.just("bytes"), st.lists(st.binary(max_size=4), max_size=3)),
    st.tuples(st.just("float"), st.lists(st.sampled_from([0.0, -1.5, 3.25]), max_size=3)),
    st.tuples(st.just("int64"), st.lists(st.sampled_from([0, 5, 300, -1, 2**62]), max_size=3)),
)


@st.composite
def unusual_records(draw: st.DrawFn) -> bytes:
    """Examples with repeated and unknown fields, in any order, as protobuf allows them."""
    entries = []
    for _ in range(draw(st.integers(0, 4))):
        kind, values = draw(LISTS)
        value = b"".join(
            draw(st.lists(st.just(feature(kind, values, packed=draw(st.booleans()))), max_size=2))
        )
        parts = [field(1, draw(NAMES).encode()), field(2, value + draw(unknown()))]
        entries.append(field(1, b"".join(draw(st.permutations(parts)))))
    cut = draw(st.integers(0, len(entries)))
    halves = [field(1, b"".join(entries[:cut])), field(1, b"".join(entries[cut:]))]
    return b"".join([*halves, draw(unknown())])


def unknown() -> st.SearchStrategy[bytes]:
    return st.sampled_from(
        [
            b"",
            field(7, b"xyz"),
            varint(7 << 3) + varint(300),
            b"\x3d" + bytes(4),
            b"\x39" + bytes(8),
        ]
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(unusual_records(), min_size=1, max_size=12))
def test_unusual_messages_mean_what_protobuf_says(records: list[bytes]) -> None:
    expected = [by_protobuf(record) for record in records]
    kinds: dict[str, set[str]] = {}
    for record in expected:
        for name, (kind, _) in (record or {}).items():
            kinds.setdefault(name, set()).add(kind)
    if all(len(found) == 1 for found in kinds.values()):
        assert by_columns(records) == expected
    else:
        assert by_columns(records) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_message_is_refused_or_means_what_protobuf_says(data: st.DataObject) -> None:
    record = bytearray(
        example({"a": ("int64", [1, 300]), "b": ("bytes", [b"xy"]), "c": ("float", [0.5])})
    )
    for _ in range(data.draw(st.integers(1, 3))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    expected = by_protobuf(bytes(record))
    found = by_columns([bytes(record)] * data.draw(st.sampled_from([1, 20])))
    if expected is not None and found is not None:
        # Google's parser drops a map entry that has unknown fields.
        known = {name: found[0].get(name) for name in expected}
        assert repr(known) == repr(expected)
