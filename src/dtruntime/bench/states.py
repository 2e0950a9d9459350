"""What is saved: random bytes, and the same bytes as arrays like those of a model."""

from __future__ import annotations

import mmap

import numpy as np
import psutil
from numpy.typing import NDArray

from .._background import side_by_side, usable_cores
from ..display import size as readable
from ..errors import StrataError

ARRAY_BYTES = 16 * 2**20
COPIES = 6
"""The bytes, the arrays, where they are copied to here and in a save, and `claim_memory`'s."""
COPY_THREADS = 8
_SEED = 7


class State:
    """The same random bytes three times: as ``bytes``, as arrays, and in aligned memory."""

    def __init__(self, size: int) -> None:
        """``StrataError`` when there is not enough memory."""
        available = psutil.virtual_memory().available
        if available < COPIES * size:
            raise StrataError(
                f"{readable(available)} of memory are available, and {readable(COPIES * size)} are "
                f"needed for a state of {readable(size)}: choose a smaller --size"
            )
        # Anonymous memory begins at a page, as direct writes want.
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._target = np.frombuffer(self._memory, np.uint8)
        _fill(self._target)
        self.data = self._target.tobytes()
        parts = range(0, size, ARRAY_BYTES)
        self.arrays = {f"layer-{at}": self._target[at : at + ARRAY_BYTES].copy() for at in parts}

    @property
    def memory(self) -> memoryview:
        """The bytes in memory that is aligned."""
        return memoryview(self._memory)

    def copy(self) -> None:
        """Copy the arrays to where they were copied before, with the threads of a save."""
        pieces = zip(self.arrays.values(), range(0, len(self._target), ARRAY_BYTES), strict=True)

        def copy(piece: tuple[NDArray[np.uint8], int]) -> None:
            array, at = piece
            np.copyto(self._target[at : at + array.nbytes], array)

        side_by_side(pieces, copy, min(COPY_THREADS, usable_cores()))

    def holds_memory(self, found: NDArray[np.uint8]) -> bool:
        """Whether these are the bytes in memory."""
        return np.array_equal(found, self._target)

    def holds_bytes(self, found: bytes) -> bool:
        """Whether these are the bytes."""
        return found == self.data

    def holds_arrays(self, found: dict[str, NDArray[np.uint8]]) -> bool:
        """Whether these are the arrays."""
        return found.keys() == self.arrays.keys() and all(
            np.array_equal(array, found[name]) for name, array in self.arrays.items()
        )


def claim_memory(size: int) -> None:
    """Use twice as much memory as a read needs, and free it.

    A virtual machine may have given memory back to its host; whoever reads first would wait until
    it is here again.
    """
    np.empty(2 * size, np.uint8).fill(1)


def _fill(target: NDArray[np.uint8]) -> None:
    """Random bytes that differ from block to block, without a random one for each."""
    words = target.view(np.uint32)
    random = np.random.default_rng(_SEED).integers(0, 2**32, ARRAY_BYTES // 4, np.uint32)
    for at in range(0, len(words), len(random)):
        part = words[at : at + len(random)]
        np.add(random[: len(part)], np.uint32(at * 2654435761 % 2**32), out=part)
