"""The items of a save plan: what they are called, how large they are, and their bytes."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from ...errors import StorageError
from ..saving import DeviceSource
from .metadata import name_of_dtype


class BytesSource:
    """What torch serialised."""

    dtype = "uint8"

    def __init__(self, item: Any, planner: Any) -> None:
        self.key: str = item.index.fqn
        self._data = planner.resolve_data(item).getbuffer()
        self.nbytes: int = self._data.nbytes

    def memory(self) -> memoryview:
        """The bytes."""
        found: memoryview = self._data
        return found


class TensorSource(DeviceSource):
    """A tensor, asked for when it is copied: a planner may have to make it."""

    def __init__(self, item: Any, planner: Any) -> None:
        self.key = name_of(item.index)
        properties, sizes = item.tensor_data.properties, item.tensor_data.chunk.sizes
        self.dtype = name_of_dtype(properties.dtype, self.key)
        self.nbytes = prod(sizes) * properties.dtype.itemsize
        self._expected = properties.dtype, tuple(sizes)
        self._item = item
        self._planner = planner
        self._bytes: Any = None

    def copy_part(self, first: int, target: memoryview) -> None:
        """Copy bytes; the tensor is let go with the last ones."""
        if self._bytes is None:
            self._bytes = self._resolve()
        stop = first + target.nbytes
        torch.frombuffer(target, dtype=torch.uint8).copy_(self._bytes[first:stop])
        if stop == self.nbytes:
            self._bytes = None

    def wait(self) -> None:
        """Do nothing: the bytes were copied at once."""

    def _resolve(self) -> Any:
        tensor = self._planner.resolve_data(self._item).detach()
        if (tensor.dtype, tuple(tensor.shape)) != self._expected:
            dtype, shape = self._expected
            raise StorageError(
                f"{self.key} was planned as {list(shape)} of {dtype}, and is now "
                f"{list(tensor.shape)} of {tensor.dtype}: do not change the state while it is saved"
            )
        return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def source_of(item: Any, planner: Any) -> BytesSource | TensorSource:
    """The bytes of an item."""
    if item.type == WriteItemType.BYTE_IO:
        return BytesSource(item, planner)
    return TensorSource(item, planner)


def name_of(index: Any) -> str:
    """A readable name: that of the value, and where a shard begins."""
    if index.offset is None or not any(index.offset):
        return str(index.fqn)
    return f"{index.fqn}[{','.join(map(str, index.offset))}]"
