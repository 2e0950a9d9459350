"""Torch's tensors, sizes, dtypes and devices, out of a state and back into one."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..._buffers import LARGE, use_large_pages
from .buffers import MemoryLayout, StridedBuffer, join, memory_at
from .skeleton import ArrayEntry, Node, damaged

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

_ELEMENTS = {dtype: (name, dtype.itemsize, dtype.is_complex) for name, dtype in DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_KINDS = {torch.Tensor: "torch", torch.nn.Parameter: "parameter"}


def is_array(kind: type) -> bool:
    """Whether values of the type are stored as arrays rather than in the skeleton."""
    return issubclass(kind, torch.Tensor)


def encode_value(value: Any) -> Node:
    """Encode a size, a type or a device; None for anything else."""
    if isinstance(value, torch.Size):
        return ["torch size", list(value)]
    if isinstance(value, torch.dtype):
        return ["torch dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["torch device", str(value)]
    if isinstance(value, torch.Generator):
        raise TypeError("is a random generator: save its .get_state()")
    return None


class ArrayCollector:
    """The tensors of one state."""

    def __init__(self) -> None:
        self._by_device: dict[str, list[TorchBuffer]] = {}

    def entry(self, tensor: Any, position: int) -> dict[str, Any]:
        """Describe a tensor; ``TypeError`` or ``ValueError`` if it cannot be stored."""
        element = _ELEMENTS.get(tensor.dtype)
        kind = _KINDS.get(type(tensor))
        if kind is None or element is None or tensor.layout is not torch.strided:
            raise _refusal(tensor)
        if tensor.is_nested:
            raise _refusal(tensor)
        name, itemsize, is_complex = element
        entry: dict[str, Any] = {"kind": kind, "dtype": name, "shape": list(tensor.shape)}
        device = "cpu"
        if not tensor.is_cpu:
            device = entry["device"] = str(tensor.device)
            if tensor.is_meta:
                raise ValueError("is a tensor on the meta device: it has no values to store")
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
            buffer = TorchBuffer(tensor, position, size, name, itemsize, device, start)
            self._by_device.setdefault(device, []).append(buffer)
            if not tensor.is_contiguous():
                buffer.stretch()
                if not buffer.gathered:
                    entry["strides"] = [step * itemsize for step in tensor.stride()]
        return entry

    def buffers(self, entries: list[dict[str, Any]]) -> list[TorchBuffer]:
        """The memory to store; writes into ``entries`` where tensors lie that share it."""
        return [b for buffers in self._by_device.values() for b in join(buffers, entries)]


def _refusal(tensor: Any) -> Exception:
    if type(tensor) not in _KINDS:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return TypeError(
            f"is a {kind}, a subclass of Tensor: save distributed tensors (DTensor, FSDP) "
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
    if tensor.dtype in _ELEMENTS:
        return ValueError(
            "is a tensor whose memory has been freed: gather it first, or save it through "
            "torch.distributed.checkpoint with Strata's DCP integration when FSDP manages it"
        )
    return TypeError(f"is a tensor of {tensor.dtype}: convert it to another type of elements")


class TorchBuffer(StridedBuffer):
    """The memory of one tensor, or of several that overlap."""

    __slots__ = ()

    def layout(self) -> MemoryLayout:
        """How the first tensor lies in memory."""
        tensor, item = self.first, self.itemsize
        strides = tuple(step * item for step in tensor.stride())
        return MemoryLayout(tensor.data_ptr(), tuple(tensor.shape), strides, item)

    def owner(self) -> int:
        """The address of the first tensor's storage."""
        address: int = self.first.untyped_storage().data_ptr()
        return address

    @property
    def in_one_piece(self) -> bool:
        """Whether `bytes` is a view of the tensors, not a copy."""
        return not self.gathered

    def bytes(self) -> Any:
        """The memory as ``uint8`` on its device: a view, or a copy if the tensor has gaps."""
        if self.gathered:
            return self._elements().contiguous().view(-1).view(torch.uint8)
        return self._raw(torch.uint8, (self.nbytes,), (1,), self.nbytes)

    def memory(self) -> memoryview | None:
        """A view of the memory, if it is the CPU's and has no gaps."""
        if self.gathered or not self.device.startswith("cpu"):
            return None
        # The storage keeps the memory: the tensor may be given another one in the meantime.
        storage = self.first.untyped_storage()
        self._check_storage(storage, self.nbytes)
        return memory_at(self.start, self.nbytes, storage, writable=False)

    def copy_into(self, target: memoryview) -> None:
        """Copy the memory as it lies, or the elements of a tensor with gaps."""
        self._check(target)
        host = torch.frombuffer(target, dtype=torch.uint8)
        if self.gathered:
            elements = self._elements()
            host.view(elements.dtype).view(elements.shape).copy_(elements)
        else:
            host.copy_(self.bytes())

    def version(self) -> object:
        """The tensors' own version counters; None if torch keeps none."""
        try:
            if not self.others:
                return self.first._version
            return tuple([tensor._version for tensor in self.sources])
        except RuntimeError:
            return None

    def _elements(self) -> Any:
        """The tensor as plain elements of the same size."""
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
        """Where the memory begins in a storage; ``ValueError`` if it lies in another one."""
        offset: int = self.start - storage.data_ptr()
        if offset < 0 or offset + nbytes > storage.nbytes():
            raise ValueError(f"{self.key} was moved to other memory since the state was captured")
        return offset


def _reach(tensor: Any) -> int:
    """Bytes from the first to the last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach: int = (sum((n - 1) * step for n, step in steps) + 1) * tensor.element_size()
    return reach


_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|mtia|xla|meta)(:\d{1,4})?")
_CPU = torch.device("cpu")
_QUANTISED = {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}


def itemsize(entry: ArrayEntry) -> int:
    """The size of an element in bytes."""
    size: int = _dtype(entry.dtype).itemsize
    return size


def decode_size(lengths: list[int]) -> Any:
    """Restore a ``torch.Size``."""
    if not all(type(length) is int and abs(length) < 1 << 63 for length in lengths):
        raise damaged(f"{lengths!r:.80} is not a torch.Size")
    return torch.Size(lengths)


def decode_dtype(name: str) -> Any:
    """Restore a ``torch.dtype``."""
    if name in _QUANTISED:
        return getattr(torch, name)
    return _dtype(name)


def decode_device(name: str) -> Any:
    """Restore a ``torch.device``, which need not exist here."""
    if not _DEVICE.fullmatch(name):
        raise damaged(f"{name!r:.80} is not a torch.device")
    return torch.device(name)


def _dtype(name: object) -> Any:
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"this version of torch has no dtype {name!r:.80}")
    return dtype


def available(name: str) -> bool:
    """Whether tensors can be put on a device."""
    if not _DEVICE.fullmatch(name) or name.startswith("meta"):
        return False
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True


class Destination:
    """Memory that tensors are restored in."""

    def __init__(self, nbytes: int, device: str) -> None:
        # Whatever torch's default device is, the bytes are read into host memory.
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=_CPU)
        self._device = device
        if nbytes >= LARGE:
            use_large_pages(self.view())

    def view(self) -> memoryview:
        """The memory to read into."""
        memory = self._bytes
        return memory_at(memory.data_ptr(), memory.numel(), memory, writable=True)

    def to_device(self) -> None:
        """Move the bytes to their device."""
        if self._device != "cpu":
            self._bytes = self._bytes.to(self._device)

    def array(self, entry: ArrayEntry) -> Any:
        """The tensor that an entry describes."""
        dtype = _dtype(entry.dtype)
        size = dtype.itemsize
        strides = entry.strides or ()
        if entry.offset % size or any(step % size or step < 0 for step in strides):
            raise damaged(f"a tensor of {entry.dtype} lies at {entry.offset} with {strides}")
        tensor = torch.empty(0, dtype=dtype, device=self._bytes.device)
        # An empty list of strides means contiguous.
        elements = [step // size for step in strides]
        try:
            storage = self._bytes.untyped_storage()
            tensor.set_(storage, entry.offset // size, entry.shape, elements)
            return _with_flags(tensor, entry)
        except RuntimeError as exc:
            raise damaged(str(exc)) from exc


def _with_flags(tensor: Any, entry: ArrayEntry) -> Any:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    if (entry.requires_grad and not differentiable) or (entry.conj and not tensor.is_complex()):
        raise damaged(f"a tensor of {entry.dtype} has a gradient or is conjugated")
    if entry.conj:
        tensor = torch.conj(tensor)
    if entry.neg:
        tensor = torch._neg_view(tensor)
    if entry.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
    return tensor.requires_grad_() if entry.requires_grad else tensor


def tensor_on(view: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor over these bytes; ``ValueError`` if this version of torch lacks the dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"this version of torch has no {dtype}: install a newer one")
    if not view.nbytes:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(view, dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)
