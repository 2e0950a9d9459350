"""``tf.train.Example``, made from its description since TensorFlow is not needed for it."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "strata_benchmark"


def _message(
    file: descriptor_pb2.FileDescriptorProto, name: str, *fields: tuple[str, int, int, str]
) -> descriptor_pb2.DescriptorProto:
    message = file.message_type.add(name=name)
    for number, (field, kind, label, of) in enumerate(fields, 1):
        type_name = f".{_PACKAGE}.{of}" if of else None
        message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)
    return message


def _example_class() -> Any:
    one, many = _Field.LABEL_OPTIONAL, _Field.LABEL_REPEATED
    whole = _Field.TYPE_MESSAGE
    file = descriptor_pb2.FileDescriptorProto(
        name="strata_benchmark/example.proto", package=_PACKAGE, syntax="proto3"
    )
    _message(file, "BytesList", ("value", _Field.TYPE_BYTES, many, ""))
    _message(file, "FloatList", ("value", _Field.TYPE_FLOAT, many, ""))
    _message(file, "Int64List", ("value", _Field.TYPE_INT64, many, ""))
    kinds = ("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")
    _message(file, "Feature", *((field, whole, one, of) for field, of in kinds))
    features = _message(file, "Features", ("feature", whole, many, "Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=one)
    entry.field.add(name="value", number=2, type=whole, label=one, type_name=f".{_PACKAGE}.Feature")
    _message(file, "Example", ("features", whole, one, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


Example = _example_class()
