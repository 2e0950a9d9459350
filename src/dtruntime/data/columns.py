"""Samples by column, as numpy and Arrow hold them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .list_columns import (
    Ints,
    ListColumn,
    Places,
    filled,
    is_fixed,
    is_list_of_values,
    is_plain,
    missing_values,
    objects,
    picked,
    plain,
)

Column = Any
"""An array of numpy's or of Arrow's, or a `ListColumn`."""


class Block:
    """Some samples: their columns and their numbers."""

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

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.numbers.nbytes + sum(int(column.nbytes) for column in self.columns.values())

    def table(self) -> pa.Table:
        """As an Arrow table, of columns that are held by Arrow."""
        return pa.table(self.columns)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One mapping for each sample."""
        names = list(self.columns)
        columns = [
            column.rows() if isinstance(column, ListColumn) else as_array(column)
            for column in self.columns.values()
        ]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


Assemble = Callable[[Sequence[pa.Table], Places, Ints], Block]
"""Makes a block of some rows of tables, whose samples have the given numbers."""


def arrow_block(tables: Sequence[pa.Table], places: Places, numbers: Ints) -> Block:
    """Columns as Arrow holds them."""
    table = pa.concat_tables(tables)
    if isinstance(places, slice):
        table = table.slice(places.start, places.stop - places.start)
    else:
        table = table.take(pa.array(places)).combine_chunks()
    return Block(dict(zip(table.column_names, table.columns, strict=True)), numbers)


class NumpyBlocks:
    """Makes blocks of numpy arrays where a column allows it.

    Whole or Boolean values with nulls, also those in lists, have no array that holds them:
    ``fill`` says what to put in their place, by column.
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
        if is_list_of_values(kind):
            return self._lists(name, column, places)
        if pa.types.is_fixed_size_binary(kind):
            return self._bytes(name, column, places)
        return picked(column.combine_chunks(), places)

    def _lists(self, name: str, column: pa.ChunkedArray, places: Places) -> Column:
        lists = ListColumn.of(name, column.type, column.chunks, places, self._fill)
        if not is_fixed(column.type):
            return lists
        _check_rows(name, column)
        return lists.stacked()

    def _bytes(self, name: str, column: pa.ChunkedArray, places: Places) -> Column:
        """Bytes of one length: a row of an array each."""
        _check_rows(name, column)
        size = column.type.byte_width
        parts = [np.empty((0, size), np.uint8)]
        for chunk in column.chunks:
            data = np.frombuffer(chunk.buffers()[1], np.uint8)
            first = chunk.offset * size
            parts.append(data[first : first + len(chunk) * size].reshape(-1, size))
        return np.concatenate(parts)[places]


class _Arena:
    """Memory for the columns of a block, in one piece: the system hands out large pieces faster."""

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
    """Memory in which a thread joins chunks; it is used again for the next column."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def joined(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """All values one after the other, until the next call."""
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
    """The values at ``places``, in memory that nobody else uses."""
    if not chunks:
        return np.empty(0, kind.to_pandas_dtype())
    if isinstance(places, slice):
        if len(chunks) == 1:
            return _own(chunks[0])[places]
        return np.concatenate([plain(chunk) for chunk in chunks])[places]
    joined = _scratch.joined([plain(chunk) for chunk in chunks])
    values = arena.array(len(places), joined.dtype)
    # All places are inside; this way numpy does not check them and needs no memory of its own.
    np.take(joined, places, out=values, mode="clip")
    return values


def _own(chunk: pa.Array) -> NDArray[Any]:
    """A chunk's values, without copying where it has the only use of its memory."""
    array = plain(chunk)
    if array.flags.writeable:
        return array
    data = chunk.buffers()[1]
    if not data.is_mutable or chunk.offset or data.size > array.nbytes + 64:
        return array.copy()
    return np.frombuffer(data, array.dtype, len(array))


def _check_rows(name: str, column: pa.ChunkedArray) -> None:
    """Rows of an array cannot be missing as a whole."""
    if column.null_count:
        raise missing_values(name, column.type)


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
    """A column of anything but lists of numbers as an array: of objects where numpy has no type."""
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if not (pa.types.is_nested(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary(kind)):
        array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return array
    return objects(column.to_pylist())
