"""Integer hashes and keyed permutations that are the same on every machine.

Where a shard lives and in which order samples are read is built on these functions: changing
any of them moves every shard of every running job.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from math import isqrt
from operator import index as as_int

import numpy as np
from numpy.typing import ArrayLike, NDArray

WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""The multipliers of splitmix64."""
_ROUNDS = 6
_BLOCK = 1 << 14
_MAX_LENGTH = 1 << 62


def mix(value: int) -> int:
    """Scramble the low 64 bits of ``value`` (the splitmix64 step): a bijection on 64 bits."""
    z = (value + _GOLDEN) & WORD
    z = ((z ^ (z >> 30)) * MIX_1) & WORD
    z = ((z ^ (z >> 27)) * MIX_2) & WORD
    return z ^ (z >> 31)


def mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return :func:`mix` of every element, as a fresh array."""
    z = values + np.uint64(_GOLDEN)
    z ^= z >> np.uint64(30)
    z *= np.uint64(MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    return z


def fold(*key: int) -> int:
    """Fold any number of integers of any size into one 64-bit hash; order matters."""
    state = mix(len(key))
    for part in key:
        state = mix(state ^ (part & WORD))
        while part not in (0, -1):
            part >>= 64
            state = mix(state ^ (part & WORD))
    return state


def hash_name(name: str) -> int:
    """Hash a name, such as a dataset's or a worker's, to 64 bits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class Permutation:
    """A keyed permutation of ``range(n)``; any part of it costs time and memory of that part.

    The same ``n`` and key, for example ``Permutation(n, seed, epoch)``, give the same order
    everywhere. It is a Feistel network over the smallest near-square grid that holds ``n``
    cells; the few values outside ``range(n)`` walk their cycle until they are inside. It is for
    shuffling, not for secrecy.

    >>> order = Permutation(10**12, 42, 0)
    >>> order.index(order[7])
    7
    """

    __slots__ = ("_columns", "_keys", "_n", "_rows")

    def __init__(self, n: int, *key: int) -> None:
        n = as_int(n)
        if not 0 <= n <= _MAX_LENGTH:
            raise ValueError(f"a permutation's length must be from 0 to 2**62, not {n}")
        self._n = n
        self._rows = isqrt(max(n, 1) - 1) + 1
        self._columns = max(1, -(-n // self._rows))
        seed = fold(*(as_int(part) for part in key))
        self._keys = tuple(mix(seed + i) for i in range(_ROUNDS))

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._n, _BLOCK):
            yield from self.slice(start, min(start + _BLOCK, self._n)).tolist()

    def __getitem__(self, position: int) -> int:
        """Return the value at ``position``; ``IndexError`` outside ``range(n)``."""
        return self._walk_one(self._checked(position, "position"), inverse=False)

    def index(self, value: int) -> int:
        """Return the position of ``value``; ``IndexError`` outside ``range(n)``."""
        return self._walk_one(self._checked(value, "value"), inverse=True)

    def take(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Return the values at ``positions``, in their shape."""
        return self._walk(positions, inverse=False)

    def indices(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return the position of each of ``values``, in their shape."""
        return self._walk(values, inverse=True)

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the values at positions ``start`` to ``stop``, which is excluded."""
        start, stop = as_int(start), as_int(stop)
        if not 0 <= start <= stop <= self._n:
            raise IndexError(f"slice {start}:{stop} is outside a permutation of {self._n}")
        return self.take(np.arange(start, stop, dtype=np.int64))

    def _checked(self, number: int, what: str) -> int:
        number = as_int(number)
        if not 0 <= number < self._n:
            raise IndexError(f"{what} {number} is outside a permutation of {self._n}")
        return number

    def _schedule(self, inverse: bool) -> list[tuple[int, int]]:
        """Return each round's number and key in the order to apply them."""
        rounds = list(enumerate(self._keys))
        return rounds[::-1] if inverse else rounds

    def _walk_one(self, x: int, *, inverse: bool) -> int:
        while True:
            x = self._scramble_one(x, inverse)
            if x < self._n:
                return x

    def _scramble_one(self, x: int, inverse: bool) -> int:
        sizes = (self._rows, self._columns)
        cell = list(divmod(x, self._columns))
        for number, key in self._schedule(inverse):
            side = number & 1
            step = _spread(cell[1 - side] + key, sizes[side])
            cell[side] = (cell[side] + (sizes[side] - step if inverse else step)) % sizes[side]
        return cell[0] * self._columns + cell[1]

    def _walk(self, numbers: ArrayLike, *, inverse: bool) -> NDArray[np.int64]:
        given = np.asarray(numbers)
        if given.size and given.dtype.kind not in "iu":
            raise TypeError(f"a permutation takes integers, not {given.dtype}")
        if given.size and (given.min() < 0 or given.max() >= self._n):
            raise IndexError(
                f"{given.min()}..{given.max()} reaches outside a permutation of {self._n}"
            )
        # Blocks that fit into the processor's cache make this several times faster.
        flat = given.astype(np.uint64).reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            self._scramble(block, inverse)
            outside = np.flatnonzero(block >= np.uint64(self._n))
            while outside.size:
                again = block[outside]
                self._scramble(again, inverse)
                block[outside] = again
                outside = outside[again >= np.uint64(self._n)]
        return flat.view(np.int64).reshape(given.shape)

    def _scramble(self, x: NDArray[np.uint64], inverse: bool) -> None:
        """Apply the network to every element in place."""
        columns = np.uint64(self._columns)
        row = x // columns
        column = x - row * columns
        sides = ((row, column, self._rows), (column, row, self._columns))
        scratch = np.empty_like(x)
        for number, key in self._schedule(inverse):
            half, other, size = sides[number & 1]
            step = _spread_array(other, key, size, scratch)
            if inverse:
                np.subtract(np.uint64(size), step, out=step)
            half += step
            # Below ``size`` the difference wraps around to a huge number, so this is a modulo.
            np.subtract(half, np.uint64(size), out=scratch)
            np.minimum(half, scratch, out=half)
        np.multiply(row, columns, out=x)
        x += column


def _spread(x: int, size: int) -> int:
    """Hash ``x`` to a number below ``size``."""
    x &= WORD
    x = ((x ^ (x >> 30)) * MIX_1) & WORD
    x = ((x ^ (x >> 27)) * MIX_2) & WORD
    return ((x >> 32) * size) >> 32


def _spread_array(
    values: NDArray[np.uint64], key: int, size: int, scratch: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return :func:`_spread` of every element plus ``key``, as a fresh array."""
    x = values + np.uint64(key)
    np.right_shift(x, np.uint64(30), out=scratch)
    x ^= scratch
    x *= np.uint64(MIX_1)
    np.right_shift(x, np.uint64(27), out=scratch)
    x ^= scratch
    x *= np.uint64(MIX_2)
    x >>= np.uint64(32)
    x *= np.uint64(size)
    x >>= np.uint64(32)
    return x


SMALL = 1 << 17


def shuffled(n: int, *key: int) -> NDArray[np.int64]:
    """Return a keyed permutation of ``range(n)`` as a table.

    Up to ``SMALL`` it sorts hashes, which is several times faster than the :class:`Permutation`
    that it slices beyond that.
    """
    if n > SMALL:
        return Permutation(n, *key).slice(0, n)
    state = fold(*key)
    low = (1 << max(1, (n - 1).bit_length())) - 1
    factor, offset, salt = (state | 1) & low, (state >> 32) & low, (state >> 20) & 0xFFFFFFFF
    # The number itself, scrambled, replaces the low bits of its hash: sorting then orders the
    # numbers, and equal hashes do not keep their order.
    numbers = np.arange(n, dtype=np.uint32)
    numbers *= np.uint32(factor)
    numbers += np.uint32(offset)
    numbers &= np.uint32(low)
    hashes = _mix32(numbers ^ np.uint32(salt))
    hashes &= ~np.uint32(low)
    hashes |= numbers
    hashes.sort()
    hashes -= np.uint32(offset)
    hashes *= np.uint32(pow(factor, -1, low + 1))
    hashes &= np.uint32(low)
    return hashes.astype(np.int64)


def _mix32(z: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Scramble 32-bit numbers in place."""
    z *= np.uint32(0x7FEB352D)
    z ^= z >> np.uint32(15)
    z *= np.uint32(0x846CA68B)
    z ^= z >> np.uint32(16)
    return z
