"""A small state as one array of bytes, and back; never by pickle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.state_dict import flatten, rebuild
from ..errors import CheckpointDamagedError

BLOCK = 4096
"""Arrays are so many bytes long, or a multiple: a state that changes a little keeps its size."""


def pack(state: Any) -> NDArray[np.uint8]:
    """Put a state into bytes: the length of its description, that as JSON, and its arrays."""
    tree = flatten(state)
    head = json.dumps({"state": tree.skeleton, "sizes": [b.nbytes for b in tree.buffers]}).encode()
    length = 8 + len(head) + sum(buffer.nbytes for buffer in tree.buffers)
    packed = np.zeros(-(-length // BLOCK) * BLOCK, np.uint8)
    view = packed.data
    view[:8] = len(head).to_bytes(8, "little")
    at = 8 + len(head)
    view[8:at] = head
    for buffer in tree.buffers:
        buffer.copy_into(view[at : at + buffer.nbytes])
        at += buffer.nbytes
    return packed


def unpack(packed: NDArray[np.uint8], name: str) -> Any:
    """The state that `pack` was given; ``CheckpointDamagedError`` when it is none."""
    view = packed.data
    try:
        start = 8 + int.from_bytes(view[:8], "little")
        head = json.loads(bytes(view[8:start]))
        sizes = head["sizes"]
        offsets = [start + sum(sizes[:number]) for number in range(len(sizes))]

        def read(number: int, memory: memoryview) -> None:
            first = offsets[number]
            memory[:] = view[first : first + memory.nbytes]

        return rebuild(head["state"], read, map_location="cpu")
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise CheckpointDamagedError(f"{name} of the checkpoint is damaged: {exc}") from exc
