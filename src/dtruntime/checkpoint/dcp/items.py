"""The items of a save plan: what they are called, how large they are, and their bytes."""

from __future__ import annotations

import pickle
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from ...errors import StorageError
from ..save.staging import DeviceSource
from ..state_dict import Buffer
from ..state_dict.buffers import BytesBuffer
from ..state_dict.torch_tensors import TorchBuffer
from .metadata import name_of_dtype


class BytesSource:
    """What torch serialised."""

    dtype = "uint8"

    def __init__(self, item: Any, planner: Any, weights_only: bool) -> None:
        """``TypeError`` when ``weights_only`` loads would refuse it."""
        self.key: str = item.index.fqn
        value = planner.resolve_data(item)
        if weights_only:
            _check_loadable(value, self.key)
        self._data = value.getbuffer()
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
        return _in_order(self._item, self._planner).view(-1).view(torch.uint8)


def source_of(item: Any, planner: Any, weights_only: bool) -> BytesSource | TensorSource:
    """The bytes of an item; ``TypeError`` when ``weights_only`` loads would refuse it."""
    if item.type == WriteItemType.BYTE_IO:
        return BytesSource(item, planner, weights_only)
    return TensorSource(item, planner)


def _check_loadable(value: Any, key: str) -> None:
    """Make sure that torch's restricted unpickler takes a value."""
    at = value.tell()
    value.seek(0)
    try:
        torch.load(value, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as exc:
        raise TypeError(
            f"{key!r} is neither a tensor nor a plain value, and StrataReader would refuse to load "
            "it: convert it (to a tensor, a number, text, or lists and dicts of those), allow its "
            "type by torch.serialization.add_safe_globals here and where it is loaded, or, if only "
            "people you trust can write to that place, use StrataWriter(..., weights_only=False) "
            f"and StrataReader(..., weights_only=False): {_first_line(exc)}"
        ) from exc
    finally:
        value.seek(at)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def check_item(item: Any) -> None:
    """Make sure that `buffer_of` can take an item; ``TypeError`` when it is not such a tensor."""
    if item.type == WriteItemType.BYTE_IO:
        raise TypeError(
            f"{item.index.fqn} is no tensor: save plain values with CheckpointManager.save, or "
            "through torch.distributed.checkpoint with StrataWriter"
        )
    name_of_dtype(item.tensor_data.properties.dtype, item.index.fqn)


def buffer_of(item: Any, planner: Any) -> Buffer:
    """The memory of an item that is a tensor, as the pipeline takes it."""
    tensor = _in_order(item, planner)
    dtype = name_of_dtype(tensor.dtype, item.index.fqn)
    buffer: Buffer
    if tensor.numel():
        size, device = tensor.nbytes, str(tensor.device)
        start = tensor.data_ptr()
        buffer = TorchBuffer(tensor, 0, dtype, tensor.element_size(), device, start, size)
    else:
        buffer = BytesBuffer(b"", 0)
        buffer.dtype = dtype
    buffer.key = name_of(item.index)
    return buffer


def _in_order(item: Any, planner: Any) -> Any:
    """The tensor of an item, as it was planned and in C order."""
    tensor = planner.resolve_data(item).detach()
    dtype, sizes = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
        raise StorageError(
            f"{name_of(item.index)} was planned as {list(sizes)} of {dtype}, and is now "
            f"{list(tensor.shape)} of {tensor.dtype}: do not change the state while it is saved"
        )
    return tensor.resolve_conj().resolve_neg().contiguous()


def name_of(index: Any) -> str:
    """A readable name: that of the value, and where a shard begins."""
    if index.offset is None or not any(index.offset):
        return str(index.fqn)
    return f"{index.fqn}[{','.join(map(str, index.offset))}]"
