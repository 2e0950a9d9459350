"""Features of Examples as Arrow columns: single values where every record has exactly one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from .format_reader import SchemaConflict
from .tfrecord_examples import Feature, FeatureCounts


def schema_of(features: Mapping[str, FeatureCounts], records: int) -> pa.Schema:
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
