"""Integer hashing that gives the same result on every platform, process and Python.

Everything that decides where a shard lives or in which order samples are read is built on
these functions. Changing any of them moves every shard of every running job.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""What splitmix64 multiplies by."""


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
