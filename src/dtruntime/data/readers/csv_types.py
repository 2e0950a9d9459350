"""Which type a CSV column has, when parts of it were inferred one by one."""

from __future__ import annotations

import pyarrow as pa

from .format_reader import SchemaConflict, describe_difference

TEXT = pa.string()


def merge_schemas(left: pa.Schema, right: pa.Schema) -> pa.Schema:
    """Return types that both parts may fit, in the order of ``left``."""
    if left.equals(right):
        return left
    if sorted(left.names) != sorted(right.names):
        common = pa.schema([pa.field(name, TEXT) for name in left.names])
        others = pa.schema([pa.field(name, TEXT) for name in right.names])
        raise SchemaConflict(describe_difference(common, others))
    return pa.schema(
        [pa.field(f.name, merge_types(f.type, right.field(f.name).type)) for f in left]
    )


def merge_types(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """Return the narrowest type that may fit what was inferred as either.

    It follows Arrow's own inference. Whether it does fit is to be tried: ``0x1F`` is an integer
    and no number with a fraction, ``1`` may be a truth value and ``2`` is not.
    """
    for one, other in ((left, right), (right, left)):
        if one == other or pa.types.is_null(one):
            return other
        if pa.types.is_binary(one):
            return one
        if pa.types.is_int64(one) and (pa.types.is_float64(other) or pa.types.is_boolean(other)):
            return other
        if pa.types.is_date(one) and pa.types.is_timestamp(other) and other.tz is None:
            return other
        if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and one.tz == other.tz:
            return one if one.unit == "ns" else other
    return TEXT


def widened(before: pa.Schema, after: pa.Schema) -> list[str]:
    """The columns whose values are still to be tried against the type they got."""
    return [
        field.name
        for field in before
        if not pa.types.is_null(field.type)
        and field.type != after.field(field.name).type
        and not is_text(after.field(field.name).type)
    ]


def is_text(kind: pa.DataType) -> bool:
    """Whether every field fits."""
    return bool(kind == TEXT or pa.types.is_binary(kind))


def with_text(schema: pa.Schema, names: list[str]) -> pa.Schema:
    """The same schema with the named columns as text."""
    return pa.schema([pa.field(f.name, TEXT) if f.name in names else f for f in schema])
