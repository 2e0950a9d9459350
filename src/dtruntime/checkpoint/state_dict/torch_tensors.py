"""Tensors and other values of torch, out of a state and back into one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..trees.refusals import unsupported
from ..trees.scalars import Node
from .buffers import StridedBuffer, memory_at
from .shared_memory import Layout, Memory, join, overlaps_itself

DTYPES: dict[str, Any] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    )
    if hasattr(torch, name)
}
"""The element types that are stored, as far as this version of torch has them."""

_KNOWN = {dtype: (name, dtype.itemsize, dtype.is_complex) for name, dtype in DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_KINDS = {torch.Tensor: "torch", torch.nn.Parameter: "parameter"}


def is_array(kind: type) -> bool:
    """Whether values of the type are stored as arrays, not within the skeleton."""
    return issubclass(kind, torch.Tensor)


def encode_value(value: Any) -> Node:
    """Encode a size, a type or a device; ``TypeError`` for anything else."""
    if isinstance(value, torch.Size):
        return ["torch size", list(value)]
    if isinstance(value, torch.dtype):
        return ["torch dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["torch device", str(value)]
    if isinstance(value, torch.Generator):
        raise TypeError("is a random generator: save its .get_state()")
    raise unsupported(value)


class Leaves:
    """The tensors of one state."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[TorchBuffer]] = {"cpu": []}

    def entry(self, tensor: Any, position: int) -> dict[str, Any]:
        """Describe a tensor; ``TypeError`` or ``ValueError`` when it cannot be stored."""
        known = _KNOWN.get(tensor.dtype)
        kind = _KINDS.get(type(tensor))
        if kind is None or known is None or tensor.layout is not torch.strided:
            raise _refusal(tensor)
        if tensor.is_nested:
            raise _refusal(tensor)
        name, itemsize, is_complex = known
        entry: dict[str, Any] = {"kind": kind, "dtype": name, "shape": list(tensor.shape)}
        device = "cpu"
        if not tensor.is_cpu:
            device = entry["device"] = self._device_of(tensor)
        if tensor.requires_grad:
            entry["requires_grad"] = True
        if tensor.is_neg():
            entry["neg"] = True
        if is_complex and tensor.is_conj():
            entry["conj"] = True
        size = tensor.numel() * itemsize
        if size:
            start = tensor.data_ptr()
            if not start:
                raise _refusal(tensor)
            buffer = TorchBuffer(tensor, position, name, itemsize, device, start, size)
            self._buffers[device].append(buffer)
            if not tensor.is_contiguous():
                buffer.stretch()
                if not buffer.gathered:
                    entry["strides"] = [step * itemsize for step in tensor.stride()]
        return entry

    def _device_of(self, tensor: Any) -> str:
        if tensor.device.type == "meta":
            raise ValueError("is a tensor on the meta device: it has no values to store")
        name = str(tensor.device)
        self._buffers.setdefault(name, [])
        return name

    def buffers(self, entries: list[dict[str, Any]]) -> Iterator[TorchBuffer]:
        """Say which memory has to be stored, and write into entries what several share."""
        for buffers in self._buffers.values():
            joined = join(buffers, _MEMORY)
            joined.write(entries)
            yield from joined.buffers


def _refusal(tensor: Any) -> Exception:
    if type(tensor) not in _KINDS:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return TypeError(
            f"is a {kind}, a kind of tensor of its own: save distributed tensors (DTensor, FSDP) "
            "through torch.distributed.checkpoint with Strata's DCP integration, and others as "
            "the plain tensors they are made of"
        )
    if tensor.is_quantized:
        return TypeError("is a quantised tensor: save .int_repr() and its scale and zero point")
    if tensor.is_nested:
        return TypeError("is a nested tensor: save .unbind()")
    if tensor.layout is not torch.strided:
        return TypeError(
            f"is a tensor of layout {tensor.layout}: save its indices and values, or .to_dense()"
        )
    if tensor.dtype in _KNOWN:
        return ValueError(
            "is a tensor whose memory has been freed: gather it first, or save it through "
            "torch.distributed.checkpoint with Strata's DCP integration when FSDP manages it"
        )
    return TypeError(f"is a tensor of {tensor.dtype}: convert it to another type of elements")


def _layout(tensor: Any) -> Layout:
    item = tensor.element_size()
    strides = tuple(step * item for step in tensor.stride())
    return Layout(tensor.data_ptr(), tuple(tensor.shape), strides, item)


_MEMORY = Memory(_layout, lambda tensor: tensor.untyped_storage().data_ptr())


class TorchBuffer(StridedBuffer):
    """The memory of one tensor, or of several that overlap."""

    __slots__ = ()

    library = "torch"

    def __init__(
        self,
        tensor: Any,
        position: int,
        dtype: str,
        itemsize: int,
        device: str,
        start: int,
        size: int,
    ) -> None:
        self.first = tensor
        self.position = position
        self.others = ()
        self.dtype = dtype
        self.itemsize = itemsize
        self.device = device
        self.start = start
        self.stop = start + size
        self.nbytes = size
        self.gathered = False

    def stretch(self) -> None:
        """Cover a tensor whose elements do not follow each other."""
        tensor = self.first
        stop = self.start + _reach(tensor)
        self.cover(self.start, stop, self.nbytes)
        if self.gathered and overlaps_itself(tensor.shape, tensor.stride(), 1):
            self.cover(self.start, stop, stop - self.start)

    @property
    def in_one_piece(self) -> bool:
        """Whether `bytes` is a view of the tensors, not a copy."""
        return not self.gathered

    def bytes(self) -> Any:
        """The memory as a tensor of ``uint8`` on the device.

        It is a view, or a copy made on the device when the tensor has gaps.
        """
        if self.gathered:
            return self._elements().contiguous().view(-1).view(torch.uint8)
        return self._raw(torch.uint8, (self.nbytes,), (1,), self.nbytes)

    def memory(self) -> memoryview | None:
        """Look at the memory, when it is the CPU's and has no gaps."""
        if self.gathered or not self.device.startswith("cpu"):
            return None
        # The storage holds the memory: the tensor may be given another one meanwhile.
        storage = self.first.untyped_storage()
        self._check_storage(storage, self.nbytes)
        return memory_at(self.start, self.nbytes, storage, writable=False)

    def copy_into(self, target: memoryview) -> None:
        """Copy the elements, or the memory as it lies."""
        self._check(target)
        host = torch.frombuffer(target, dtype=torch.uint8)
        if self.gathered:
            elements = self._elements()
            host.view(elements.dtype).view(elements.shape).copy_(elements)
        else:
            host.copy_(self.bytes())

    def version(self) -> object:
        """The tensors' own counts of changes; None where torch keeps none."""
        try:
            if not self.others:
                return self.first._version
            return tuple([tensor._version for tensor in self.sources])
        except RuntimeError:
            return None

    def _elements(self) -> Any:
        """The tensor without its meaning: elements of so many bits."""
        first = self.first
        dtype = _BITS[self.itemsize]
        return self._raw(dtype, first.shape, first.stride(), _reach(first))

    def _raw(self, dtype: Any, shape: Any, strides: Any, nbytes: int) -> Any:
        first = self.first
        storage = first.untyped_storage()
        offset = self._check_storage(storage, nbytes)
        raw = torch.empty(0, dtype=dtype, device=first.device)
        return raw.set_(storage, offset // dtype.itemsize, shape, strides)

    def _check_storage(self, storage: Any, nbytes: int) -> int:
        """Where the memory begins in a storage; ``ValueError`` when it lies in another one."""
        offset: int = self.start - storage.data_ptr()
        if offset < 0 or offset + nbytes > storage.nbytes():
            raise ValueError(f"{self.key} got other memory since the state was taken")
        return offset


def _reach(tensor: Any) -> int:
    """Bytes from the first to the last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach: int = (sum((n - 1) * step for n, step in steps) + 1) * tensor.element_size()
    return reach
