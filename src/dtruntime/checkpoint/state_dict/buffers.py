"""The memory that a tree's arrays lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np

Key: TypeAlias = "str | int | float | complex | bool | bytes | tuple[Any, ...] | None"
"""A key of a dict, an element of a set, or an index of a sequence."""


class Buffer(ABC):
    """One piece of memory to store: an array's, or what several arrays share.

    It refers to the user's arrays and copies nothing until it is asked to.
    """

    # A state may have tens of thousands: no dict, no tuples that are mostly empty.
    __slots__ = ("device", "dtype", "first", "itemsize", "key", "nbytes", "others", "position")

    key: str
    """Its readable name, that of its first use; unlike any other of the same tree."""
    nbytes: int
    """How many bytes it has; never 0."""
    dtype: str
    """The name of its elements' type; of the first array's, where arrays of several share it."""
    itemsize: int
    """The size of that type in bytes."""
    device: str
    """Where it lies: ``"cpu"``, ``"cuda:0"`` and so on."""
    first: Any
    """The array in it that the state uses first."""
    position: int
    """Which of the tree's arrays that is."""
    others: tuple[tuple[int, Any], ...]
    """What else lies in it: positions and arrays, in the order of their use."""

    library = "python"
    """Whose arrays they are: ``"torch"``, ``"numpy"``, ``"jax"`` or ``"python"``."""

    @property
    def sources(self) -> tuple[Any, ...]:
        """The arrays that lie in it, in the order of their use."""
        return (self.first, *(array for _, array in self.others))

    @abstractmethod
    def memory(self) -> memoryview | None:
        """Look at the memory as it lies, read-only; None where it has to be copied together."""

    @abstractmethod
    def copy_into(self, target: memoryview) -> None:
        """Write the bytes into memory of exactly that size, and wait until they are there."""

    def version(self) -> object:
        """A token that changes when an array is changed in place; None if that is not counted."""
        return None

    def _check(self, target: memoryview) -> None:
        if target.readonly or target.nbytes != self.nbytes:
            kind = "read-only" if target.readonly else f"{target.nbytes} bytes of"
            raise ValueError(f"{self.key} has {self.nbytes} bytes: cannot copy into {kind} memory")


class StridedBuffer(Buffer):
    """The memory from an array's lowest byte to its highest, or of several that overlap."""

    __slots__ = ("gathered", "start", "stop")

    start: int
    """The address of the lowest byte."""
    stop: int
    """One after the address of the highest byte."""
    gathered: bool
    """The array has gaps: its elements are stored one after the other."""

    def cover(self, start: int, stop: int, size: int) -> None:
        """Set which memory it is, when the elements of one array in it take ``size`` bytes."""
        self.start = start
        self.stop = stop
        self.gathered = gathered = stop - start > size
        self.nbytes = size if gathered else stop - start


def memory_at(address: int, nbytes: int, owner: object, *, writable: bool) -> memoryview:
    """Look at memory by its address; the view keeps its owner alive."""
    window: np.ndarray[Any, Any] = np.asarray(_Window(address, nbytes, owner, writable))
    return window.data


class _Window:
    """Bytes of an owner, as numpy asks for them."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, nbytes: int, owner: object, writable: bool) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "shape": (nbytes,),
            "typestr": "|u1",
        }
