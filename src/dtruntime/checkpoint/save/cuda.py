"""Staging of CUDA tensors: copied on the device if there is room, then fetched asynchronously."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...telemetry import EventLog
from ..state_dict import Buffer
from .staging import DeviceSource

log = EventLog("checkpoint")

SPARE_BYTES = 2**30
"""How much device memory is left to training."""
HOST_BYTES = 64 * 2**20
"""States with more than this on the host are not copied on the device: the host's share would be
copied at the same time, outside of the memory budget."""


def pin(view: memoryview) -> Callable[[], None] | None:
    """Pin memory, so that a device copies into it at full speed; returns what undoes it.

    Memory that is freed while pinned stays registered by its address, which cannot be pinned again.
    """
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, view.nbytes, 0)
    if int(error):
        log.warning("checkpoint.memory_not_pinned", bytes=view.nbytes, error=int(error))
        return None

    def unpin() -> None:
        with suppress(Exception):  # the process may be ending
            runtime.cudaHostUnregister(address)

    return unpin


def snapshot(buffers: Sequence[Buffer]) -> list[Any] | None:
    """Copies of all buffers on their devices; None if there is no room for them.

    They are made in stream order, so that later work cannot change them.
    """
    needed: dict[str, int] = {}
    host = 0
    for buffer in buffers:
        if buffer.device.startswith("cuda"):
            needed[buffer.device] = needed.get(buffer.device, 0) + buffer.nbytes
        else:
            host += buffer.nbytes
    if host > HOST_BYTES:
        return None
    if any(size + SPARE_BYTES > _free(device) for device, size in needed.items()):
        return None
    try:
        return [_kept(buffer) for buffer in buffers]
    except torch.cuda.OutOfMemoryError:
        return None


def sources(buffers: Sequence[Buffer]) -> list[Any]:
    """The buffers themselves, copied asynchronously by their devices."""
    return [_CudaSource(_bytes(b)) if b.device.startswith("cuda") else b for b in buffers]


def _kept(buffer: Buffer) -> Any:
    if not buffer.device.startswith("cuda"):
        return _HostCopy(buffer)
    data = _bytes(buffer)
    return _CudaSource(data.clone() if getattr(buffer, "in_one_piece", True) else data)


def _bytes(buffer: Any) -> Any:
    return buffer.bytes()


def _free(device: str) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(unused)


@functools.cache
def _side_stream(device: Any) -> Any:
    """A stream for copies, so that training continues meanwhile."""
    return torch.cuda.Stream(device)


class _CudaSource(DeviceSource):
    """Bytes on a GPU."""

    def __init__(self, data: Any) -> None:
        self.nbytes = data.nbytes
        self._data = data
        self._stream = _side_stream(data.device)
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(data.device))

    def copy_part(self, first: int, target: memoryview) -> None:
        """Begin to copy, after the work that produces the bytes."""
        host = torch.frombuffer(target, dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            host.copy_(self._data[first : first + target.nbytes], non_blocking=True)

    def wait(self) -> None:
        """Wait for the copies of this device."""
        self._stream.synchronize()


class _HostCopy:
    """A buffer in host memory that was copied together with those of the device."""

    def __init__(self, buffer: Buffer) -> None:
        self.nbytes = buffer.nbytes
        self._data = memoryview(bytearray(buffer.nbytes))
        buffer.copy_into(self._data)

    def memory(self) -> memoryview:
        """The copy."""
        return self._data
