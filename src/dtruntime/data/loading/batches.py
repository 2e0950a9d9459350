"""Batches in the form that a training loop wants."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ...errors import ShardError
from ...types import check_flag
from .columns import Assemble, Block, NumpyBlocks, arrow_block
from .sequences import ORIGIN

Output = Literal["numpy", "torch", "jax", "arrow"]
OUTPUTS = ("numpy", "torch", "jax", "arrow")

ID = "__id__"
"""The column with the samples' numbers."""
VALID = "__valid__"
"""The column that is false where a batch was filled up."""


class Batches:
    """Turns blocks into batches."""

    def __init__(
        self,
        output: Output = "numpy",
        *,
        ids: bool = False,
        pad: bool = False,
        fill: Mapping[str, Any] | None = None,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
        if output == "arrow" and (fill or decode):
            raise ValueError("fill and decode are for arrays: with output='arrow' use transform")
        self.output = output
        self._ids = check_flag("ids", ids)
        self._pad = pad
        self._decode = decode
        self._transform = transform
        self.assemble: Assemble = arrow_block if output == "arrow" else NumpyBlocks(fill)
        self._convert: Callable[[Any], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_convert": None}

    @property
    def works(self) -> bool:
        """Whether making a batch runs code of the user."""
        return self._decode is not None or self._transform is not None

    def check_columns(self, names: Iterable[str]) -> None:
        """Refuse data whose own columns would be replaced by what is added to batches."""
        if self._decode is None:
            added = (ID,) * self._ids + (VALID,) * self._pad
            _check_free(names, added)

    def make(self, block: Block, padding: int, filler: Block | None) -> Any:
        """A batch of the block's samples, and of ``padding`` copies of others."""
        valid = None
        if self._pad:
            valid = np.arange(len(block) + padding) < len(block)
            block = filled(block, padding, filler)
        batch = self._table(block, valid) if self.output == "arrow" else self._dict(block, valid)
        return batch if self._transform is None else self._transform(batch)

    def _table(self, block: Block, valid: Any) -> pa.Table:
        columns = dict(block.columns)
        origin = columns.pop(ORIGIN, None)
        return pa.table({**columns, **self._extra(block, valid, origin)})

    def _dict(self, block: Block, valid: Any) -> Any:
        origin = block.columns.get(ORIGIN)
        plain = {name: column for name, column in block.columns.items() if name != ORIGIN}
        block = Block(plain, block.numbers)
        if self._decode is None:
            batch: Any = block.arrays()
        else:
            batch = stack([self._decode(row) for row in block.rows()])
        if isinstance(batch, dict):
            extra = self._extra(block, valid, origin)
            _check_free(batch, extra)
            batch.update(extra)
        if self.output == "numpy":
            return batch
        self._convert = self._convert or _converter(self.output)
        return batch if self._convert is None else _mapped(batch, self._convert)

    def _extra(self, block: Block, valid: Any, origin: Any) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._ids:
            extra[ID] = block.numbers
            if origin is not None:
                extra[ORIGIN] = origin
        if valid is not None:
            extra[VALID] = valid
        return extra


def _check_free(names: Iterable[str], added: Iterable[str]) -> None:
    for name in set(names).intersection(added):
        raise ShardError(
            f"there is a column {name!r} in the data, and one that the loader adds: leave it out "
            "with columns=..., give it another name in decode, or do without ids and padding"
        )


def filled(block: Block, padding: int, filler: Block | None) -> Block:
    """A block with ``padding`` more samples: its own over again, or else those of ``filler``."""
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


def stack(samples: Sequence[Any]) -> Any:
    """Samples as one batch: arrays of what can be stacked, lists of the rest."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(stack(part) for part in zip(*samples, strict=True))
    if isinstance(first, str | bytes) or first is None:
        return list(samples)
    return np.stack([np.asarray(sample) for sample in samples])


def _converter(output: Output) -> Callable[[Any], Any] | None:
    """What makes one of the framework's arrays; the framework is imported when it is needed."""
    if output not in ("torch", "jax"):
        return None
    module = importlib.import_module(f".to_{output}", __package__)
    convert: Callable[[Any], Any] = module.convert
    return convert


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
