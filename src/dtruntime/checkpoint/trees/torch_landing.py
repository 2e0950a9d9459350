"""Tensors and other values of torch, restored."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from ..._buffers import LARGE, use_large_pages
from ..state_dict.buffers import memory_at
from ..state_dict.skeleton import ArrayEntry, damaged
from ..state_dict.torch_tensors import DTYPES

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|mtia|xla|meta)(:\d{1,4})?")
_CPU = torch.device("cpu")
_VALUES = {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}


def itemsize(entry: ArrayEntry) -> int:
    """The size of an element."""
    size: int = _dtype(entry.dtype).itemsize
    return size


def decode_size(lengths: list[int]) -> Any:
    """Restore a ``torch.Size``."""
    if not all(type(length) is int and abs(length) < 1 << 63 for length in lengths):
        raise damaged(f"{lengths!r:.80} is not a torch.Size")
    return torch.Size(lengths)


def decode_dtype(name: str) -> Any:
    """Restore a ``torch.dtype``."""
    if name in _VALUES:
        return getattr(torch, name)
    return _dtype(name)


def decode_device(name: str) -> Any:
    """Restore a ``torch.device``, which need not be there."""
    if not _DEVICE.fullmatch(name):
        raise damaged(f"{name!r:.80} is not a torch.device")
    return torch.device(name)


def _dtype(name: object) -> Any:
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"this version of torch has no dtype {name!r:.80}")
    return found


def available(name: str) -> bool:
    """Whether tensors can be put on a device."""
    if not _DEVICE.fullmatch(name) or name.startswith("meta"):
        return False
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True


class Landing:
    """Memory that tensors are restored in."""

    def __init__(self, nbytes: int, device: str) -> None:
        # Whatever device is torch's default, the bytes are read into the machine's memory.
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=_CPU)
        self._device = device
        if nbytes >= LARGE:
            use_large_pages(self.view())

    def view(self) -> memoryview:
        """The memory to read into."""
        memory = self._bytes
        return memory_at(memory.data_ptr(), memory.numel(), memory, writable=True)

    def settle(self) -> None:
        """Move the bytes to their device."""
        if self._device != "cpu":
            self._bytes = self._bytes.to(self._device)

    def restore(self, entry: ArrayEntry) -> Any:
        """Make a tensor of the memory."""
        dtype = _dtype(entry.dtype)
        size = dtype.itemsize
        strides = entry.strides or ()
        if entry.offset % size or any(step % size or step < 0 for step in strides):
            raise damaged(f"a tensor of {entry.dtype} lies at {entry.offset} with {strides}")
        tensor = torch.empty(0, dtype=dtype, device=self._bytes.device)
        # Without strides its elements follow each other.
        elements = [step // size for step in strides]
        try:
            storage = self._bytes.untyped_storage()
            tensor.set_(storage, entry.offset // size, entry.shape, elements)
            return _with_meaning(tensor, entry)
        except RuntimeError as exc:
            raise damaged(str(exc)) from exc


def _with_meaning(tensor: Any, entry: ArrayEntry) -> Any:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    if (entry.requires_grad and not differentiable) or (entry.conj and not tensor.is_complex()):
        raise damaged(f"a tensor of {entry.dtype} has a gradient or is conjugated")
    steps: list[tuple[bool, Callable[[Any], Any]]] = [
        (entry.conj, torch.conj),
        (entry.neg, torch._neg_view),
    ]
    for wanted, step in steps:
        tensor = step(tensor) if wanted else tensor
    if entry.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
    return tensor.requires_grad_() if entry.requires_grad else tensor
