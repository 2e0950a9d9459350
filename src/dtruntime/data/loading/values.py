"""Arrow's values as numpy holds them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...errors import ShardError

Ints = NDArray[np.int64]
Places = Ints | slice
"""Which rows, and in which order."""


@functools.lru_cache(256)
def is_plain(kind: pa.DataType) -> bool:
    """Whether values are of one size and numpy has their type."""
    t = pa.types
    return bool(
        t.is_integer(kind)
        or t.is_floating(kind)
        or t.is_boolean(kind)
        or t.is_timestamp(kind)
        or t.is_duration(kind)
        or t.is_date(kind)
    )


def plain(values: pa.Array) -> NDArray[Any]:
    """Values of one size as an array, which may share Arrow's memory and not be writeable."""
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array


def picked(column: pa.Array, places: Places) -> pa.Array:
    """The rows of a column at some places."""
    return column[places] if isinstance(places, slice) else column.take(pa.array(places))


def filled(
    name: str, kind: pa.DataType, chunks: Sequence[pa.Array], fill: Mapping[str, Any]
) -> Sequence[pa.Array]:
    """Values of a column without nulls that numpy cannot hold; ``ShardError`` where some are."""
    if not any(chunk.null_count for chunk in chunks):
        return chunks
    if name in fill:
        return [pc.fill_null(chunk, fill[name]) for chunk in chunks]
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        raise missing_values(name, kind, f"pass fill={{{name!r}: ...}}, ")
    return chunks


def missing_values(name: str, kind: pa.DataType, remedy: str = "") -> ShardError:
    """The error for nulls that no array can hold."""
    return ShardError(
        f"column {name!r} has missing values of {kind}, which a numpy array of that type cannot "
        f"hold: {remedy}leave the column out, or use output='arrow'"
    )
