"""Columns of lists: one array where all rows have one shape, a choice of the user where not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..errors import ShardError

Ragged = Literal["error", "pad", "nested", "list"]
RAGGED = ("error", "pad", "nested", "list")

MASK = "__mask"
"""What is added to a padded column's name for the column that says where its values are."""
LENGTHS_SHOWN = 5


def is_list(kind: pa.DataType) -> bool:
    """Whether rows are lists, of any kind that Arrow has."""
    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))


def is_list_of_values(kind: pa.DataType) -> bool:
    """Whether rows are lists, or lists of lists, of what numpy has a type for."""
    return is_list(kind) and is_plain(_leaf(kind))


def is_fixed(kind: pa.DataType) -> bool:
    """Whether the type itself says how long the lists are, at every depth."""
    while is_list(kind):
        if not pa.types.is_fixed_size_list(kind):
            return False
        kind = kind.value_type
    return True


class ListColumn:
    """Rows that are lists of values, of a column of a block.

    Held as one array while all rows have one shape, else as Arrow has them. What is held never
    changes what the rows are given as: that is decided for each batch by its own rows.
    """

    __slots__ = ("_fill", "_rows", "kind", "name")

    def __init__(
        self, name: str, kind: pa.DataType, rows: NDArray[Any] | pa.Array, fill: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.kind = kind
        self._rows = rows
        self._fill = fill

    @staticmethod
    def of(
        name: str,
        kind: pa.DataType,
        chunks: Sequence[pa.Array],
        places: Places,
        fill: Mapping[str, Any],
    ) -> ListColumn:
        """The rows at some places of chunks that lie one after the other."""
        used = [chunk for chunk in chunks if len(chunk)]
        parts = [_regular(name, chunk, fill) for chunk in used]
        arrays = [part for part in parts if part is not None]
        if arrays and len(arrays) == len(used) and len({part.shape[1:] for part in arrays}) == 1:
            return ListColumn(name, kind, np.concatenate(arrays)[places], fill)
        column = pa.chunked_array(chunks, kind).combine_chunks()
        return ListColumn(name, kind, picked(column, places), fill)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> ListColumn:
        return ListColumn(self.name, self.kind, self._rows[rows], self._fill)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return int(self._rows.nbytes)

    def take(self, places: Ints) -> ListColumn:
        """The rows at ``places``, copied."""
        rows = self._rows
        taken = rows[places] if isinstance(rows, np.ndarray) else picked(rows, places)
        return ListColumn(self.name, self.kind, taken, self._fill)

    @staticmethod
    def concat(columns: Sequence[ListColumn]) -> ListColumn:
        """The rows of several columns of the same name."""
        first = columns[0]
        rows = [column._rows for column in columns if len(column)] or [first._rows]
        shapes = {row.shape[1:] if isinstance(row, np.ndarray) else row.type for row in rows}
        if len(shapes) == 1:
            joined = _concat(rows)
        else:
            joined = pa.concat_arrays([_as_arrow(row, first.kind) for row in rows])
        return ListColumn(first.name, first.kind, joined, first._fill)

    # What rows are given as

    def stacked(self) -> NDArray[Any]:
        """One array; ``ShardError`` when the rows have different shapes or some are missing."""
        rows = self._rows
        if isinstance(rows, np.ndarray):
            return rows
        stacked = _regular(self.name, rows, self._fill)
        if stacked is None:
            raise self._unequal(rows)
        self._rows = stacked.copy()
        return self._rows

    def padded(self) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """One array as long as the longest lists, and where in it there are values.

        The rest is what ``fill`` has for the column, else 0. A missing row has no values.
        """
        rows = self._rows
        if isinstance(rows, np.ndarray):
            return rows, np.ones(rows.shape, np.bool_)
        return self._pad(rows)

    def jagged(self) -> tuple[NDArray[Any], Ints]:
        """The values of all rows one after the other, and where each row begins and ends."""
        rows = self._rows
        if isinstance(rows, np.ndarray):
            ends = np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1]
            return rows.reshape(-1, *rows.shape[2:]), ends
        inner = rows.flatten()
        values = _regular(self.name, inner, self._fill)
        if values is None:
            raise ShardError(
                f"column {self.name!r} ({self.kind}) has lists of different lengths inside its "
                "rows, which a nested tensor cannot hold: use ragged='pad' or ragged='list'"
            )
        return values.copy(), np.concatenate(([0], np.cumsum(_lengths(rows))))

    def rows(self) -> list[Any]:
        """An array for each row; ``None`` for one that is missing."""
        rows = self._rows
        return list(rows) if isinstance(rows, np.ndarray) else self._split(rows)

    def _pad(self, rows: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        if not is_list(rows.type):
            values = self._values(rows)
            return values, np.ones(len(values), np.bool_)
        inner, inner_mask = self._pad(rows.flatten())
        lengths = _lengths(rows)
        held = np.arange(lengths.max(initial=0)) < lengths[:, None]
        padding = self._fill.get(self.name, np.zeros((), inner.dtype))
        array = np.full(held.shape + inner.shape[1:], padding, inner.dtype)
        mask = np.zeros(array.shape, np.bool_)
        array[held], mask[held] = inner, inner_mask
        return array, mask

    def _split(self, rows: pa.Array) -> list[Any]:
        inner = rows.flatten()
        nested = is_list(inner.type)
        items: Any = self._split(inner) if nested else self._values(inner)
        ends = np.cumsum(_lengths(rows))
        parts = [
            items[stop - count : stop] for stop, count in zip(ends, _lengths(rows), strict=True)
        ]
        if nested:
            parts = [_joined(part) for part in parts]
        missing = rows.is_null().to_numpy(zero_copy_only=False)
        return [None if gone else part for part, gone in zip(parts, missing, strict=True)]

    def _values(self, leaf: pa.Array) -> NDArray[Any]:
        """Values that nobody else uses."""
        (values,) = filled(self.name, leaf.type, [leaf], self._fill)
        return plain(values).copy()

    def _unequal(self, rows: pa.Array) -> ShardError:
        if rows.null_count:
            remedy = "pass ragged='pad', which takes them for empty, or ragged='list', "
            return missing_values(self.name, self.kind, remedy)
        return unequal_rows(self.name, [_lengths_of(row) for row in rows.to_pylist()])


def unequal_rows(name: str, lengths: Iterable[str], what: str = "rows") -> ShardError:
    """The error for rows that do not fit into one array, with the lengths that were seen."""
    seen = list(dict.fromkeys(lengths))
    more = f" and {len(seen) - LENGTHS_SHOWN} more" if len(seen) > LENGTHS_SHOWN else ""
    return ShardError(
        f"column {name!r} has {what} of different lengths "
        f"({', '.join(seen[:LENGTHS_SHOWN])}{more}), which do not fit into one array: "
        "pass ragged='pad' to the loader to fill them up (and get "
        f"{name + MASK!r}, true where there are values), ragged='nested' for torch's nested "
        "tensors, or ragged='list' for a list of arrays; for this column alone "
        f"ragged={{{name!r}: 'pad'}}"
    )


class RaggedColumns:
    """How columns of lists are given, as the user wants it."""

    def __init__(self, modes: str | Mapping[str, str], output: str) -> None:
        """``modes`` are for all columns, or for some of them by name."""
        self._modes = dict(modes) if isinstance(modes, Mapping) else {}
        self._usual = "error" if isinstance(modes, Mapping) else modes
        for mode in (self._usual, *self._modes.values()):
            if mode not in RAGGED:
                raise ValueError(f"ragged must be one of {', '.join(RAGGED)}, not {mode!r}")
            if mode == "nested" and output != "torch":
                raise ValueError(
                    f"ragged='nested' is for output='torch', not {output!r}: use 'pad' or 'list'"
                )
        if output == "arrow" and modes != "error":
            raise ValueError("ragged is for arrays: output='arrow' gives lists as they are")
        self._output = output
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of the rows of each stacked column."""

    def added(self, schema: pa.Schema) -> list[str]:
        """The columns that are added to batches; refuses modes of columns that cannot have them."""
        lists = [field.name for field in schema if _may_be_ragged(field.type)]
        for name in self._modes:
            if name not in lists:
                raise ShardError(
                    f"ragged names {name!r}, which is no column of lists of numbers; those are: "
                    f"{', '.join(lists) or 'none'}"
                )
        return [name + MASK for name in lists if self._mode(name) == "pad"]

    def given(self, column: ListColumn, nested: Callable[[], Callable[..., Any]]) -> dict[str, Any]:
        """A column of a batch, and what is added for it."""
        name, mode = column.name, self._mode(column.name)
        if mode == "error":
            return {name: column.stacked()}
        if mode == "pad":
            array, mask = column.padded()
            return {name: array, name + MASK: mask}
        if mode == "nested":
            return {name: nested()(*column.jagged())}
        rows = column.rows()
        return {name: rows if self._output != "numpy" else objects(rows)}

    def shapes(self, columns: Iterable[Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of the rows of columns that are stacked; called after they were given."""
        return {
            column.name: column.stacked().shape[1:]
            for column in columns
            if isinstance(column, ListColumn) and self._mode(column.name) == "error"
        }

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a batch whose rows have other shapes than those of the batches before.

        Without it, whether rows of different lengths are an error would depend on which of them
        come together.
        """
        for name, given in shapes.items():
            shape = tuple(given)  # torch's loader processes hand them over as lists
            before = self._shapes.setdefault(name, shape)
            if before != shape:
                lengths = ["x".join(map(str, one)) for one in (before, shape)]
                raise unequal_rows(name, lengths, "rows, in different batches,")

    def _mode(self, name: str) -> str:
        return self._modes.get(name, self._usual)


def _may_be_ragged(kind: pa.DataType) -> bool:
    return is_list_of_values(kind) and not is_fixed(kind)


def _leaf(kind: pa.DataType) -> pa.DataType:
    while is_list(kind):
        kind = kind.value_type
    return kind


def _lengths(rows: pa.Array) -> Ints:
    """How long each list is; 0 for one that is missing."""
    lengths = pc.fill_null(pc.list_value_length(rows), 0)
    return plain(lengths).astype(np.int64)


def _regular(name: str, rows: pa.Array, fill: Mapping[str, Any]) -> NDArray[Any] | None:
    """Rows as one array, which may share their memory; none when their shapes differ."""
    shape = [len(rows)]
    while is_list(rows.type):
        if rows.null_count:
            return None
        lengths = _lengths(rows)
        if len(lengths) and (lengths != lengths[0]).any():
            return None
        shape.append(int(lengths[0]) if len(lengths) else 0)
        rows = rows.flatten()
    (values,) = filled(name, rows.type, [rows], fill)
    return plain(values).reshape(shape)


def _as_arrow(rows: Any, kind: pa.DataType) -> pa.Array:
    """Rows as Arrow has them, with lists of any length at each depth."""
    if not isinstance(rows, np.ndarray):
        return rows.cast(_variable(kind))
    column = pa.array(rows.reshape(-1)).cast(_leaf(kind))
    for depth in range(rows.ndim - 1, 0, -1):
        count = int(np.prod(rows.shape[:depth]))
        offsets = np.arange(count + 1, dtype=np.int64) * rows.shape[depth]
        column = pa.LargeListArray.from_arrays(offsets, column)
    return column.cast(_variable(kind))


def _variable(kind: pa.DataType) -> pa.DataType:
    return pa.large_list(_variable(kind.value_type)) if is_list(kind) else kind


def _joined(parts: Sequence[Any]) -> NDArray[Any]:
    """Arrays of one row: one array where they have one shape, else an array of them."""
    if parts and all(part is not None and part.shape == parts[0].shape for part in parts):
        return np.stack(parts)
    return objects(parts)


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """An array of Python objects, one for each value whatever it is."""
    array = np.empty(len(values), object)
    for place, value in enumerate(values):
        array[place] = value
    return array


def _concat(rows: Sequence[Any]) -> Any:
    return np.concatenate(rows) if isinstance(rows[0], np.ndarray) else pa.concat_arrays(rows)


def _lengths_of(row: Any) -> str:
    """How long a list is, and those in it: ``3``, ``2x3``, or ``2x(3, 4)`` when they differ."""
    if row is None:
        return "missing"
    inner = list(dict.fromkeys(_lengths_of(item) for item in row if isinstance(item, list)))
    if not inner:
        return str(len(row))
    return f"{len(row)}x{inner[0] if len(inner) == 1 else '(' + ', '.join(inner) + ')'}"


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
