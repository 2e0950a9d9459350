"""Whether arrays lie within their buffers, before memory is allocated for them."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from ..state_dict.shared_memory import extent_of
from ..state_dict.skeleton import LIBRARY, ArrayEntry, Skeleton, damaged
from ..state_dict.supported_types import landings_of

_SLACK = 16
"""Bytes before the first array: as many as the largest element has."""


def check_buffers(skeleton: Skeleton, used: Collection[int]) -> dict[int, int]:
    """Return the sizes of the buffers that arrays need, in their order.

    ``ValueError`` unless every array lies within its buffer, and every buffer is covered.
    """
    arrays = skeleton.arrays
    needed = {arrays[index].buffer for index in used}
    tenants: dict[int, list[ArrayEntry]] = {}
    for index, entry in enumerate(arrays):
        if entry.buffer is None:
            if index in used:
                _check_empty(entry)
        elif entry.buffer in needed:
            tenants.setdefault(entry.buffer, []).append(entry)
    return {
        index: _check_buffer(tenants[index], skeleton.buffers[index].nbytes)
        for index in sorted(tenants)
    }


def _check_empty(entry: ArrayEntry) -> None:
    size = landings_of(LIBRARY[entry.kind]).itemsize(entry)
    if size * prod(entry.shape) or entry.offset or entry.strides is not None:
        raise damaged(f"an array of shape {entry.shape} has no bytes")


def _check_buffer(tenants: list[ArrayEntry], nbytes: int) -> int:
    low, high = _extent(tenants[0])
    if len(tenants) > 1:
        if len({(LIBRARY[entry.kind], entry.device) for entry in tenants}) > 1:
            raise damaged("arrays of two libraries or devices lie in one buffer")
        extents = [_extent(entry) for entry in tenants]
        low, high = min(low for low, _ in extents), max(high for _, high in extents)
    if not 0 <= low < _SLACK or high != nbytes:
        raise damaged(f"a buffer of {nbytes} bytes has arrays from byte {low} to {high}")
    return nbytes


def _extent(entry: ArrayEntry) -> tuple[int, int]:
    size = landings_of(LIBRARY[entry.kind]).itemsize(entry)
    if entry.strides is None:
        low, high = 0, size * prod(entry.shape)
    else:
        low, high = extent_of(entry.shape, entry.strides, size)
    if low == high:
        raise damaged(f"an empty array of shape {entry.shape} lies in a buffer")
    return entry.offset + low, entry.offset + high
