"""JAX's arrays and random keys, out of a state and back into one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import jax
import numpy as np

from .buffers import Buffer
from .numpy_arrays import allocate
from .skeleton import ArrayEntry, Node, damaged, decode_dtype, dtype_name, encode_dtype

_IMPLEMENTATIONS = frozenset({"threefry2x32", "rbg", "unsafe_rbg"})


def is_array(kind: type) -> bool:
    """Whether values of the type are stored as arrays rather than in the skeleton."""
    return issubclass(kind, jax.Array) or issubclass(kind, jax.core.Tracer)


def encode_value(value: Any) -> Node:
    """None: no other values of JAX are stored."""
    return None


class ArrayCollector:
    """The JAX arrays of one state."""

    def __init__(self) -> None:
        self._buffers: list[JaxBuffer] = []

    def entry(self, array: Any, position: int) -> dict[str, Any]:
        """Describe an array; ``TypeError`` or ``ValueError`` if it cannot be stored."""
        _check(array)
        impl = _impl_of(array)
        data = array if impl is None else jax.random.key_data(array)
        entry: dict[str, Any] = {
            "kind": "jax",
            "dtype": encode_dtype(np.dtype(data.dtype)),
            "shape": list(data.shape),
            "device": _device_name(data),
        }
        if impl is not None:
            entry |= {"kind": "jax key", "impl": impl}
        if getattr(data, "committed", True):
            entry["committed"] = True
        if data.size:
            self._buffers.append(JaxBuffer(data, position))
        return entry

    def buffers(self, entries: list[dict[str, Any]]) -> list[JaxBuffer]:
        """The memory to store."""
        return self._buffers


def _check(array: Any) -> None:
    if isinstance(array, jax.core.Tracer):
        raise TypeError("is an array inside a traced function: save outside of jit and grad")
    if array.is_deleted():
        raise ValueError("is an array that was deleted or donated: save the one that replaced it")
    if not array.is_fully_addressable:
        raise ValueError(
            "is an array sharded over several processes: save this process's shards "
            "(array.addressable_shards), one CheckpointManager per rank, or gather it with "
            "jax.experimental.multihost_utils.process_allgather"
        )


def _impl_of(array: Any) -> str | None:
    if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return None
    impl = str(jax.random.key_impl(array))
    if impl not in _IMPLEMENTATIONS:
        raise TypeError(f"is a random key of implementation {impl}: save jax.random.key_data(key)")
    return impl


def _device_name(array: Any) -> str:
    """The device of an array, or the first of several."""
    device = min(array.devices(), key=lambda device: device.id)
    return f"{device.platform}:{device.id}"


class JaxBuffer(Buffer):
    """The elements of one array, in C order."""

    __slots__ = ()

    def __init__(self, array: Any, position: int) -> None:
        dtype = np.dtype(array.dtype)
        device = _device_name(array)
        device = "cpu" if device.startswith("cpu:") else device
        size = array.size * dtype.itemsize
        super().__init__(array, position, size, dtype_name(dtype), dtype.itemsize, device)

    def memory(self) -> memoryview | None:
        """A view of an array on one CPU device; waits for its value."""
        array = self.first
        if self.device != "cpu" or len(array.devices()) > 1:
            return None
        elements = np.asarray(array)
        if not elements.flags.c_contiguous:
            return None
        return elements.reshape(-1).view(np.uint8).data.toreadonly()

    def copy_into(self, target: memoryview) -> None:
        """Copy the elements, shard by shard."""
        self._check(target)
        array = self.first
        whole = np.ndarray(array.shape, np.dtype(array.dtype), target)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                whole[shard.index] = np.asarray(shard.data)


def itemsize(entry: ArrayEntry) -> int:
    """The size of an element in bytes."""
    return decode_dtype(entry.dtype).itemsize


def available(name: str) -> bool:
    """Whether arrays can be put on a device."""
    return _device(name) is not None


def _device(name: str) -> Any:
    platform, _, number = name.partition(":")
    if platform not in {"cpu", "gpu", "cuda", "rocm", "tpu"} or not (number or "0").isdecimal():
        return None
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:
        return None
    return next((one for one in devices if not number or one.id == int(number)), None)


def with_64_bits() -> AbstractContextManager[Any]:
    """Allow 64-bit arrays whatever the user's setting: they were allowed when saved."""
    if hasattr(jax, "enable_x64"):
        return cast(AbstractContextManager[Any], jax.enable_x64(True))
    from jax.experimental import enable_x64

    return cast(AbstractContextManager[Any], enable_x64())


class Destination:
    """Memory that an array is restored from."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._bytes = allocate(nbytes)
        self._device = device

    def view(self) -> memoryview:
        """The memory to read into."""
        return self._bytes.data

    def to_device(self) -> None:
        """Nothing to do yet: `array` moves the bytes, as elements of their type."""

    def array(self, entry: ArrayEntry) -> Any:
        """The array that an entry describes."""
        dtype = decode_dtype(entry.dtype)
        if entry.strides is not None or entry.offset or dtype.names is not None:
            raise damaged("an array of JAX lies in C order and has no fields")
        elements = np.ndarray(
            tuple(entry.shape), dtype, self._bytes.data if self._bytes.size else None
        )
        device = _device(self._device)
        committed = entry.committed or device != jax.local_devices()[0]
        with with_64_bits():
            array = jax.device_put(elements, device if committed else None)
        return as_key(array, entry.impl) if entry.kind == "jax key" else array


def as_key(array: Any, impl: str | None) -> Any:
    """Make random keys of their data; ``ValueError`` if there is no such implementation."""
    if impl not in _IMPLEMENTATIONS:
        raise damaged(f"no random keys are of implementation {impl!r:.40}")
    try:
        return jax.random.wrap_key_data(array, impl=impl)
    except TypeError as exc:
        raise damaged(str(exc)) from exc
