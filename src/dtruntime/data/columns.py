"""Blocks of samples: columns as numpy and Arrow arrays.

A column of lists is one array while all rows have the same shape; otherwise the loader's
``ragged`` option decides what becomes of its rows in a batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..errors import ShardError

Ints = NDArray[np.int64]
Places = Ints | slice
"""Which rows, in which order."""
MASK = "__mask"
"""Appended to the name of a padded column for the column that marks its values."""
LENGTHS_SHOWN = 5


def is_list(kind: pa.DataType) -> bool:
    """Whether rows are lists of any Arrow type."""
    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))


def is_list_of_values(kind: pa.DataType) -> bool:
    """Whether rows are lists, or lists of lists, of values with a numpy type."""
    return is_list(kind) and is_plain(_leaf(kind))


def is_fixed(kind: pa.DataType) -> bool:
    """Whether the type itself fixes the length of the lists, at every depth."""
    while is_list(kind):
        if not pa.types.is_fixed_size_list(kind):
            return False
        kind = kind.value_type
    return True


class ListColumn:
    """A column whose rows are lists of values.

    Stored as one array while all rows have the same shape, otherwise as Arrow stores them. How it
    is stored does not affect batches: their form depends on their own rows alone.
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
        """The rows at some places of consecutive chunks."""
        parts = [_regular(name, chunk, fill) for chunk in chunks if len(chunk)]
        arrays = [part for part in parts if part is not None]
        if arrays and len(arrays) == len(parts) and len({part.shape[1:] for part in arrays}) == 1:
            return ListColumn(name, kind, np.concatenate(arrays)[places], fill)
        column = pa.chunked_array(chunks, kind).combine_chunks()
        return ListColumn(name, kind, picked(column, places), fill)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> ListColumn:
        return ListColumn(self.name, self.kind, self._rows[rows], self._fill)

    def take(self, places: Ints) -> ListColumn:
        """The rows at ``places``, copied."""
        return ListColumn(self.name, self.kind, _take(self._rows, places), self._fill)

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
        """One array as long as the longest lists, and where it has values.

        The rest is the column's ``fill`` value, or 0. A missing row has no values.
        """
        rows = self._rows
        if isinstance(rows, np.ndarray):
            return rows, np.ones(rows.shape, np.bool_)
        return self._pad(rows)

    def jagged(self) -> tuple[NDArray[Any], Ints]:
        """The concatenated values of all rows, and the bounds between rows."""
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
        """An array for each row; ``None`` for a missing one."""
        rows = self._rows
        return list(rows) if isinstance(rows, np.ndarray) else self._split(rows)

    def _pad(self, rows: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        if not is_list(rows.type):
            values = self._values(rows)
            return values, np.ones(len(values), np.bool_)
        inner, inner_mask = self._pad(rows.flatten())
        lengths = _lengths(rows)
        filled = np.arange(lengths.max(initial=0)) < lengths[:, None]
        padding = self._fill.get(self.name, np.zeros((), inner.dtype))
        array = np.full(filled.shape + inner.shape[1:], padding, inner.dtype)
        mask = np.zeros(array.shape, np.bool_)
        array[filled], mask[filled] = inner, inner_mask
        return array, mask

    def _split(self, rows: pa.Array) -> list[Any]:
        inner = rows.flatten()
        nested = is_list(inner.type)
        items: Any = self._split(inner) if nested else self._values(inner)
        lengths = _lengths(rows)
        ends = np.cumsum(lengths)
        parts = [items[start:end] for start, end in zip(ends - lengths, ends, strict=True)]
        if nested:
            parts = [_joined(part) for part in parts]
        missing = plain(rows.is_null())
        return [None if gone else part for part, gone in zip(parts, missing, strict=True)]

    def _values(self, leaf: pa.Array) -> NDArray[Any]:
        """Values in memory of their own."""
        (values,) = filled(self.name, leaf.type, [leaf], self._fill)
        return plain(values).copy()

    def _unequal(self, rows: pa.Array) -> ShardError:
        if rows.null_count:
            remedy = "pass ragged='pad', which treats them as empty, or ragged='list', "
            return missing_values(self.name, self.kind, remedy)
        return unequal_rows(self.name, [_lengths_of(row) for row in rows.to_pylist()])


def unequal_rows(name: str, lengths: Iterable[str], what: str = "rows") -> ShardError:
    """The error for rows that do not fit into one array."""
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


def _leaf(kind: pa.DataType) -> pa.DataType:
    while is_list(kind):
        kind = kind.value_type
    return kind


def _lengths(rows: pa.Array) -> Ints:
    """How long each list is; 0 for a missing one."""
    lengths = pc.fill_null(pc.list_value_length(rows), 0)
    return plain(lengths).astype(np.int64)


def _regular(name: str, rows: pa.Array, fill: Mapping[str, Any]) -> NDArray[Any] | None:
    """Rows as one array, which may share their memory; ``None`` when their shapes differ."""
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
    """Rows as an Arrow array of lists of variable length at each depth."""
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
    """The lists of one row: one array where they have the same shape, else an array of them."""
    if parts and all(part is not None and part.shape == parts[0].shape for part in parts):
        return np.stack(parts)
    return objects(parts)


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """An array of Python objects, one for each value."""
    array = np.empty(len(values), object)
    for place, value in enumerate(values):
        array[place] = value
    return array


def _lengths_of(row: Any) -> str:
    """The length of a list and of those in it: ``3``, ``2x3``, or ``2x(3, 4)`` when they differ."""
    if row is None:
        return "missing"
    inner = list(dict.fromkeys(_lengths_of(item) for item in row if isinstance(item, list)))
    if not inner:
        return str(len(row))
    return f"{len(row)}x{inner[0] if len(inner) == 1 else '(' + ', '.join(inner) + ')'}"


@functools.lru_cache(256)
def is_plain(kind: pa.DataType) -> bool:
    """Whether values have a fixed size and a numpy type."""
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
    """Values of fixed size as an array, which may share Arrow's memory and be read-only."""
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array


def picked(column: pa.Array, places: Places) -> pa.Array:
    """The rows of a column at some places."""
    return column[places] if isinstance(places, slice) else column.take(pa.array(places))


def filled(
    name: str, kind: pa.DataType, chunks: Sequence[pa.Array], fill: Mapping[str, Any]
) -> Sequence[pa.Array]:
    """Values of a column with nulls replaced; ``ShardError`` for nulls that numpy cannot hold."""
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


Column = Any
"""A numpy or Arrow array, or a `ListColumn`."""


class Block:
    """Some samples: their columns, and their numbers in the dataset."""

    __slots__ = ("columns", "numbers")

    def __init__(self, columns: dict[str, Column], numbers: Ints) -> None:
        self.columns = columns
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def slice(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``, without copying."""
        cut = {name: column[start:stop] for name, column in self.columns.items()}
        return Block(cut, self.numbers[start:stop])

    def take(self, places: Ints) -> Block:
        """The samples at ``places``, copied."""
        taken = {name: _take(column, places) for name, column in self.columns.items()}
        return Block(taken, self.numbers[places])

    @staticmethod
    def concat(blocks: Sequence[Block]) -> Block:
        """The samples of several blocks with the same columns."""
        if len(blocks) == 1:
            return blocks[0]
        joined = {
            name: _concat([block.columns[name] for block in blocks]) for name in blocks[0].columns
        }
        return Block(joined, np.concatenate([block.numbers for block in blocks]))

    def rows(self) -> Iterator[dict[str, Any]]:
        """A dict for each sample."""
        names = list(self.columns)
        columns = [
            column.rows() if isinstance(column, ListColumn) else as_array(column)
            for column in self.columns.values()
        ]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


Assemble = Callable[[Sequence[pa.Table], Places, Ints], Block]
"""Makes a block of some rows of tables; the last argument has the samples' numbers."""


def arrow_block(tables: Sequence[pa.Table], places: Places, numbers: Ints) -> Block:
    """A block of Arrow columns."""
    table = pa.concat_tables(tables)
    if isinstance(places, slice):
        table = table.slice(places.start, places.stop - places.start)
    else:
        table = table.take(pa.array(places)).combine_chunks()
    return Block(dict(zip(table.column_names, table.columns, strict=True)), numbers)


class NumpyBlocks:
    """Makes blocks of numpy arrays, where a column allows it.

    Numpy arrays cannot hold nulls of integers and Booleans, also in lists: ``fill`` has the values
    that replace them, by column.
    """

    def __init__(self, fill: Mapping[str, Any] | None = None) -> None:
        self._fill = dict(fill or {})

    def __call__(self, tables: Sequence[pa.Table], places: Places, numbers: Ints) -> Block:
        """Make a block."""
        columns = {}
        schema = tables[0].schema
        arena = _Arena(8 * len(numbers) * sum(is_plain(field.type) for field in schema))
        for number, field in enumerate(schema):
            chunks = [chunk for table in tables for chunk in table.column(number).chunks]
            columns[field.name] = self._column(field.name, field.type, chunks, places, arena)
        return Block(columns, numbers)

    def _column(
        self,
        name: str,
        kind: pa.DataType,
        chunks: list[pa.Array],
        places: Places,
        arena: _Arena,
    ) -> Column:
        if is_plain(kind):
            return _gather(filled(name, kind, chunks, self._fill), places, kind, arena)
        column = pa.chunked_array(chunks, kind)
        if pa.types.is_dictionary(kind):
            plain = column.cast(kind.value_type)
            return self._column(name, kind.value_type, plain.chunks, places, arena)
        is_bytes, is_lists = pa.types.is_fixed_size_binary(kind), is_list_of_values(kind)
        is_array = is_bytes or (is_lists and is_fixed(kind))
        if is_array and column.null_count:
            raise missing_values(name, kind)
        if is_lists:
            lists = ListColumn.of(name, kind, chunks, places, self._fill)
            return lists.stacked() if is_array else lists
        return _byte_rows(column)[places] if is_bytes else picked(column.combine_chunks(), places)


def _byte_rows(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    """Bytes of fixed length as the rows of an array."""
    size = column.type.byte_width
    parts = [np.empty((0, size), np.uint8)]
    for chunk in column.chunks:
        data = np.frombuffer(chunk.buffers()[1], np.uint8)
        first = chunk.offset * size
        parts.append(data[first : first + len(chunk) * size].reshape(-1, size))
    return np.concatenate(parts)


class _Arena:
    """Memory for the columns of a block, allocated at once because large pieces are faster."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory: NDArray[np.uint8] | None = None
        self._at = 0

    def array(self, count: int, kind: np.dtype[Any]) -> NDArray[Any]:
        """An array whose values are undefined."""
        if self._memory is None:
            self._memory = np.empty(self._size, np.uint8)
        size = count * kind.itemsize
        if self._at + size > self._size:
            return np.empty(count, kind)
        start, self._at = self._at, self._at + -(-size // 64) * 64
        return self._memory[start : start + size].view(kind)


class _Scratch(threading.local):
    """Memory in which a thread concatenates chunks, reused for the next column."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def joined(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """All values concatenated, valid until the next call."""
        if len(parts) == 1:
            return parts[0]
        count = sum(len(part) for part in parts)
        size = count * parts[0].itemsize
        if size > self._memory.nbytes:
            self._memory = np.empty(size, np.uint8)
        whole: NDArray[Any] = self._memory[:size].view(parts[0].dtype)
        np.concatenate(parts, out=whole)
        return whole


_scratch = _Scratch()


def _gather(
    chunks: Sequence[pa.Array], places: Places, kind: pa.DataType, arena: _Arena
) -> NDArray[Any]:
    """The values at ``places``, in memory of their own."""
    if not chunks:
        return np.empty(0, kind.to_pandas_dtype())
    if isinstance(places, slice):
        if len(chunks) == 1:
            return _own(chunks[0])[places]
        return np.concatenate([plain(chunk) for chunk in chunks])[places]
    joined = _scratch.joined([plain(chunk) for chunk in chunks])
    values = arena.array(len(places), joined.dtype)
    # All places are valid; with this mode numpy does not check them and allocates nothing.
    np.take(joined, places, out=values, mode="clip")
    return values


def _own(chunk: pa.Array) -> NDArray[Any]:
    """A chunk's values, copied unless it is the only user of its memory."""
    array = plain(chunk)
    if array.flags.writeable:
        return array
    data = chunk.buffers()[1]
    if not data.is_mutable or chunk.offset or data.size > array.nbytes + 64:
        return array.copy()
    return np.frombuffer(data, array.dtype, len(array))


def _take(column: Column, places: Ints) -> Column:
    if isinstance(column, np.ndarray):
        return column[places]
    return column.take(places if isinstance(column, ListColumn) else pa.array(places))


def _concat(columns: Sequence[Any]) -> Column:
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    if isinstance(columns[0], ListColumn):
        return ListColumn.concat(columns)
    if isinstance(columns[0], pa.ChunkedArray):
        return pa.chunked_array([chunk for column in columns for chunk in column.chunks])
    return pa.concat_arrays(columns)


def as_array(column: Column) -> NDArray[Any]:
    """A column that is not a `ListColumn` as an array: of objects where numpy has no type."""
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if not (pa.types.is_nested(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary(kind)):
        array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return array
    return objects(column.to_pylist())
