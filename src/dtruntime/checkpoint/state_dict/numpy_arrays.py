"""Numpy's arrays and scalars, out of a state and back into one."""

from __future__ import annotations

from typing import Any

import numpy as np

from .buffers import (
    MemoryLayout,
    StridedBuffer,
    join,
    memory_at,
)
from .skeleton import (
    ArrayEntry,
    Node,
    decode_dtype,
    dtype_name,
    encode_bytes,
    encode_dtype,
    encode_str,
    from_base64,
    to_base64,
)

ALIGNMENT = 64
"""Arrays are restored at multiples of this address, which JAX takes without a copy."""


def is_array(kind: type) -> bool:
    """Whether values of the type are stored as arrays rather than in the skeleton."""
    return issubclass(kind, np.ndarray)


def encode_value(value: Any) -> Node | None:
    """Encode a scalar or a dtype; None for anything else."""
    if type(value) is np.str_:
        return ["numpy str", encode_str(str.__str__(value))]
    if type(value) is np.bytes_:
        return ["numpy bytes", encode_bytes(bytes(value))]
    if isinstance(value, np.generic):
        raw = np.asarray(value)
        return ["numpy", encode_dtype(raw.dtype), to_base64(raw.tobytes())]
    if isinstance(value, np.dtype):
        return ["numpy dtype", encode_dtype(value)]
    if isinstance(value, np.random.Generator):
        raise TypeError("is a random generator: save its .bit_generator.state")
    if isinstance(value, np.random.RandomState):
        raise TypeError("is a random generator: save its .get_state()")
    return None


def decode_scalar(dtype: Node, text: str) -> Any:
    """Read a scalar that `encode_value` wrote."""
    kind = decode_dtype(dtype)
    raw = from_base64(text)
    if len(raw) != kind.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {kind}")
    return np.ndarray((), kind, bytearray(raw))[()] if raw else np.zeros((), kind)[()]


class ArrayCollector:
    """The numpy arrays of one state."""

    def __init__(self) -> None:
        self._buffers: list[NumpyBuffer] = []

    def entry(self, array: Any, position: int) -> dict[str, Any]:
        """Describe an array; ``TypeError`` if it cannot be stored."""
        if type(array) is not np.ndarray and type(array) is not np.memmap:
            raise TypeError(
                f"is a {type(array).__name__}: save a plain array, for example .view(numpy.ndarray)"
            )
        dtype = encode_dtype(array.dtype)
        entry: dict[str, Any] = {"kind": "numpy", "dtype": dtype, "shape": list(array.shape)}
        if array.nbytes:
            buffer = NumpyBuffer(array, position)
            self._buffers.append(buffer)
            if not (buffer.gathered or array.flags.c_contiguous):
                entry["offset"] = _address(array) - buffer.start
                entry["strides"] = list(array.strides)
        return entry

    def buffers(self, entries: list[dict[str, Any]]) -> list[NumpyBuffer]:
        """The memory to store; writes into ``entries`` where arrays lie that share it."""
        return join(self._buffers, entries)


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class NumpyBuffer(StridedBuffer):
    """The memory of one array, or of several that overlap."""

    __slots__ = ()

    def __init__(self, array: Any, position: int) -> None:
        size, name = array.nbytes, dtype_name(array.dtype)
        super().__init__(array, position, size, name, array.itemsize, "cpu", _address(array))
        if not array.flags.c_contiguous:
            self.stretch()

    def layout(self) -> MemoryLayout:
        """How the first array lies in memory."""
        array = self.first
        return MemoryLayout(_address(array), array.shape, array.strides, array.itemsize)

    def memory(self) -> memoryview | None:
        """A view of the memory, unless the array has gaps."""
        if self.gathered:
            return None
        return memory_at(self.start, self.nbytes, self.sources, writable=False)

    def copy_into(self, target: memoryview) -> None:
        """Copy the memory as it lies, or the elements of an array with gaps."""
        self._check(target)
        view = self.memory()
        if view is not None:
            target.cast("B")[:] = view
            return
        array = self.first
        if array.dtype.names is not None:
            # Field by field, numpy would leave out what lies between the fields.
            array = array.view(f"V{array.itemsize}")
        np.ndarray(array.shape, array.dtype, target)[...] = array


def allocate(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes at an aligned address."""
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -_address(room) % ALIGNMENT
    return room[start : start + nbytes]


class Destination:
    """Memory that arrays are restored in."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._bytes = allocate(nbytes)

    def view(self) -> memoryview:
        """The memory to read into."""
        return self._bytes.data

    def to_device(self) -> None:
        """Nothing to do: the arrays stay where they were read."""

    def array(self, entry: ArrayEntry) -> Any:
        """The array that an entry describes."""
        dtype, shape = decode_dtype(entry.dtype), tuple(entry.shape)
        if not self._bytes.nbytes:
            return np.ndarray(shape, dtype)
        return np.ndarray(shape, dtype, self._bytes.data, entry.offset, entry.strides)


def itemsize(entry: ArrayEntry) -> int:
    """The size of an element in bytes."""
    return decode_dtype(entry.dtype).itemsize


def available(device: str) -> bool:
    """Whether arrays can be put on a device: numpy has only one place for them."""
    return True
