"""A state written down and restored, as a checkpoint does it but without the files."""

import math
from typing import Any

import msgspec
import numpy as np

from dtruntime.checkpoint.state_dict import Tree, flatten, rebuild


def stored(state: object) -> tuple[dict[str, Any], list[bytes]]:
    """What is on disk afterwards: the skeleton by way of JSON, and the bytes of each buffer."""
    tree = flatten(state)
    return msgspec.json.decode(msgspec.json.encode(tree.skeleton)), contents(tree)


def contents(tree: Tree) -> list[bytes]:
    """The bytes of each buffer, which both ways of reading it agree on."""
    found = []
    for buffer in tree.buffers:
        target = bytearray(b"\xa5" * buffer.nbytes)
        buffer.copy_into(memoryview(target))
        view = buffer.memory()
        if view is not None:
            assert view.readonly
            assert (view.format, view.ndim) == ("B", 1)
            assert view == target
        found.append(bytes(target))
    return found


def restored(skeleton: dict[str, Any], parts: list[bytes], **options: Any) -> Any:
    def read(index: int, memory: memoryview) -> None:
        memory[:] = parts[index]

    return rebuild(skeleton, read, **options)


def round_trip(state: object, **options: Any) -> Any:
    return restored(*stored(state), **options)


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same types and the same bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(x, y)
            for (a, x), (b, y) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return same(sorted(one, key=repr), sorted(other, key=repr))
    if isinstance(one, float):
        return one.hex() == other.hex() and math.copysign(1, one) == math.copysign(1, other)
    if isinstance(one, complex):
        return same((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, np.ndarray | np.generic):
        return same_array(np.asarray(one), np.asarray(other))
    return bool(one == other)


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and one.tobytes() == other.tobytes()
