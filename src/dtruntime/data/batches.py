"""Batches: blocks of samples in the form that a training loop asks for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ..errors import ConfigError, ShardError
from ..types import check_flag
from .columns import (
    MASK,
    Assemble,
    Block,
    ListColumn,
    NumpyBlocks,
    arrow_block,
    as_array,
    is_fixed,
    is_list_of_values,
    objects,
    unequal_rows,
)
from .mixture import ORIGIN

Output = Literal["numpy", "torch", "jax", "arrow"]
OUTPUTS = ("numpy", "torch", "jax", "arrow")

RAGGED = ("error", "pad", "nested", "list")

_PACKAGES = {"torch": "pip install torch", "jax": "pip install jax"}
"""How to install the package that an output needs."""

ID = "__id__"
"""The column with the samples' numbers."""
VALID = "__valid__"
"""The column that is false for padding."""


class Batches:
    """Makes batches of blocks."""

    def __init__(
        self,
        output: Output = "numpy",
        *,
        ids: bool = False,
        pad: bool = False,
        fill: Mapping[str, Any] | None = None,
        ragged: str | Mapping[str, str] = "error",
        decode: Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
        if output == "arrow" and (fill or decode):
            raise ValueError("fill and decode are for arrays: with output='arrow' use transform")
        _check_installed(output)
        self.output = output
        self._ids = check_flag("ids", ids)
        self._pad = pad
        self._decode = decode
        self._transform = transform
        self.assemble: Assemble = arrow_block if output == "arrow" else NumpyBlocks(fill)
        self._ragged = RaggedColumns(ragged, output)

    @property
    def runs_user_code(self) -> bool:
        """Whether making a batch calls functions of the user."""
        return self._decode is not None or self._transform is not None

    def check_columns(self, schema: pa.Schema) -> None:
        """Raise ``ShardError`` when the data has a column that is added to batches."""
        masks = self._ragged.added(schema)
        if self._decode is None:
            _check_free(schema.names, [*(ID,) * self._ids, *(VALID,) * self._pad, *masks])

    def row_shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        """The shapes of list rows, in columns whose shape is the same in all batches."""
        if self._decode is not None or self.output == "arrow":
            return {}
        return self._ragged.shapes(block.columns.values())

    def check_row_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``ShardError`` when shapes differ from those of earlier batches."""
        self._ragged.check(shapes)

    def make(self, block: Block, padding: int, filler: Block | None) -> Any:
        """A batch of the block's samples, and of ``padding`` copies of others."""
        samples = len(block)
        if self._pad:
            block = filled(block, padding, filler)
        columns = dict(block.columns)
        origin = columns.pop(ORIGIN, None)
        added: dict[str, Any] = {}
        if self._ids:
            added[ID] = block.numbers
            if origin is not None:
                added[ORIGIN] = origin
        if self._pad:
            added[VALID] = np.arange(len(block)) < samples
        if self.output == "arrow":
            batch = pa.table({**columns, **added})
        else:
            batch = self._arrays(Block(columns, block.numbers), added)
        return batch if self._transform is None else self._transform(batch)

    def without_samples(self, batch: Any) -> Any:
        """A batch of the same form without samples."""
        if self._decode is None and isinstance(batch, dict):
            # Lists are columns here; decoded samples may have lists as a structure.
            return {
                name: [] if isinstance(column, list) else self._none_of(column)
                for name, column in batch.items()
            }
        return self._none_of(batch)

    def _none_of(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {name: self._none_of(column) for name, column in batch.items()}
        if isinstance(batch, tuple | list):
            return type(batch)(self._none_of(part) for part in batch)
        if getattr(batch, "is_nested", False):
            return _framework(self.output).none_of(batch)
        return batch[:0]

    def _arrays(self, block: Block, added: Mapping[str, Any]) -> Any:
        if self._decode is None:
            batch: Any = self._columns(block)
            self.check_row_shapes(self.row_shapes(block))
        else:
            batch = stack([self._decode(row) for row in block.rows()])
        if isinstance(batch, dict):
            _check_free(batch, added)
            batch.update(added)
        return batch if self.output == "numpy" else _mapped(batch, _framework(self.output).convert)

    def _columns(self, block: Block) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for name, column in block.columns.items():
            if isinstance(column, ListColumn):
                columns |= self._ragged.convert(column)
            else:
                columns[name] = as_array(column)
        return columns


class RaggedColumns:
    """What becomes of columns of lists in a batch, by the loader's ``ragged`` option."""

    def __init__(self, modes: str | Mapping[str, str], output: str) -> None:
        """``modes`` is one mode for all columns, or has the modes of some columns by name."""
        self._modes = dict(modes) if isinstance(modes, Mapping) else {}
        self._default = "error" if isinstance(modes, Mapping) else modes
        for mode in (self._default, *self._modes.values()):
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
        """The shape of the rows of each stacked column."""

    def added(self, schema: pa.Schema) -> list[str]:
        """The columns added to batches; ``ShardError`` for a mode of a column without lists."""
        lists = [f.name for f in schema if is_list_of_values(f.type) and not is_fixed(f.type)]
        for name in self._modes:
            if name not in lists:
                raise ShardError(
                    f"ragged names {name!r}, which is not a column of lists of numbers; those are: "
                    f"{', '.join(lists) or 'none'}"
                )
        return [name + MASK for name in lists if self._mode(name) == "pad"]

    def convert(self, column: ListColumn) -> dict[str, Any]:
        """A column of a batch, and the column added for it."""
        name, mode = column.name, self._mode(column.name)
        if mode == "error":
            return {name: column.stacked()}
        if mode == "pad":
            array, mask = column.padded()
            return {name: array, name + MASK: mask}
        if mode == "nested":
            return {name: _framework(self._output).nested(*column.jagged())}
        rows = column.rows()
        return {name: rows if self._output != "numpy" else objects(rows)}

    def shapes(self, columns: Iterable[Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of the rows of stacked columns; called after `convert`."""
        return {
            column.name: column.stacked().shape[1:]
            for column in columns
            if isinstance(column, ListColumn) and self._mode(column.name) == "error"
        }

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``ShardError`` when rows have other shapes than those of earlier batches.

        Otherwise it would depend on the order whether rows of different lengths are an error.
        """
        for name, lengths_here in shapes.items():
            shape = tuple(lengths_here)  # torch's loader processes turn tuples into lists
            earlier = self._shapes.setdefault(name, shape)
            if earlier != shape:
                lengths = ["x".join(map(str, one)) for one in (earlier, shape)]
                raise unequal_rows(name, lengths, "rows, in different batches,")

    def _mode(self, name: str) -> str:
        return self._modes.get(name, self._default)


@functools.cache
def _framework(output: str) -> Any:
    """The module that converts to a framework's arrays, which imports the framework."""
    return importlib.import_module(f".{output}", __package__)


def _check_installed(output: Output) -> None:
    """Raise ``ConfigError`` when the framework is not installed, before anything is read."""
    if output in _PACKAGES and importlib.util.find_spec(output) is None:
        raise ConfigError(
            f"output={output!r} needs the package {output}, which is not installed: "
            f"{_PACKAGES[output]}, or use output='numpy'"
        )


def _check_free(names: Iterable[str], added: Iterable[str]) -> None:
    for name in set(names).intersection(added):
        raise ShardError(
            f"the data has a column {name!r}, which the loader also adds: leave it out with "
            "columns=..., rename it in decode, or do not use ids and padding"
        )


def filled(block: Block, padding: int, filler: Block | None) -> Block:
    """A block with ``padding`` more samples: its own again, or those of ``filler`` if empty."""
    if not padding:
        return block
    other = block if len(block) else filler
    assert other is not None
    places = np.arange(padding, dtype=np.int64) % len(other)
    more = other.take(places)
    return Block.concat([block, more]) if len(block) else more


def row(batch: Any, place: int) -> Any:
    """One sample of a batch."""
    if isinstance(batch, dict):
        return {key: row(values, place) for key, values in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row(values, place) for values in batch)
    if isinstance(batch, pa.Table):
        return batch.slice(place, 1).to_pylist()[0]
    return batch[place]


def stack(samples: Sequence[Any], where: str = "") -> Any:
    """Samples as one batch: arrays of what can be stacked, lists of the rest."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples], f" for {key!r}") for key in first}
    if isinstance(first, tuple | list):
        return type(first)(stack(part, where) for part in zip(*samples, strict=True))
    if isinstance(first, str | bytes) or first is None:
        return list(samples)
    arrays = [np.asarray(sample) for sample in samples]
    shapes = list(dict.fromkeys(array.shape for array in arrays))
    if len(shapes) > 1:
        raise ShardError(
            f"decode returned arrays of different shapes{where}, {shapes[0]} and {shapes[1]} among "
            "them, which do not fit into one batch: pad or crop them in decode"
        )
    return np.stack(arrays)


def _mapped(batch: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(batch, dict):
        return {key: _mapped(value, convert) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_mapped(value, convert) for value in batch)
    if isinstance(batch, np.ndarray):
        if batch.dtype.kind in "biufc":
            return convert(batch)
        return batch.tolist() if batch.dtype.kind == "O" else batch
    return batch
