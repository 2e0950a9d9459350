"""Large ``bytes`` and ``bytearray`` values, out of a state and back into one."""

from __future__ import annotations

from typing import Any

from .buffers import Buffer
from .skeleton import ArrayEntry, damaged


class Leaves:
    """The large byte strings of one state."""

    def __init__(self) -> None:
        self._buffers: list[BytesBuffer] = []

    def entry(self, array: bytes | bytearray, position: int) -> dict[str, Any]:
        """Describe a byte string."""
        self._buffers.append(BytesBuffer(array, position))
        return {"kind": type(array).__name__, "dtype": "uint8", "shape": [len(array)]}

    def buffers(self, entries: list[dict[str, Any]]) -> list[BytesBuffer]:
        """Say which memory has to be stored."""
        return self._buffers


class BytesBuffer(Buffer):
    """One byte string."""

    __slots__ = ()

    def __init__(self, value: bytes | bytearray, position: int) -> None:
        self.first = value
        self.position = position
        self.others = ()
        self.nbytes = len(value)
        self.dtype = "uint8"
        self.itemsize = 1
        self.device = "cpu"

    def memory(self) -> memoryview:
        """Look at the bytes."""
        return memoryview(self.first).toreadonly()

    def copy_into(self, target: memoryview) -> None:
        """Copy the bytes."""
        self._check(target)
        target.cast("B")[:] = self.memory()


class Landing:
    """Memory that a byte string is restored in."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._bytes = bytearray(nbytes)

    def view(self) -> memoryview:
        """The memory to read into."""
        return memoryview(self._bytes)

    def settle(self) -> None:
        """Do nothing: the bytes lie where they were read."""

    def restore(self, entry: ArrayEntry) -> bytes | bytearray:
        """Make a byte string of the memory."""
        if entry.shape != [len(self._bytes)] or entry.strides is not None:
            raise damaged(f"{len(self._bytes)} bytes have the shape {entry.shape}")
        return bytes(self._bytes) if entry.kind == "bytes" else self._bytes


def itemsize(entry: ArrayEntry) -> int:
    """The size of an element."""
    return 1


def available(device: str) -> bool:
    """Whether bytes can be put on a device: they have no choice."""
    return True
