"""Puts a state together again from its skeleton and the bytes of its arrays."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..._buffers import collector_paused
from ...telemetry import EventLog
from .buffers import Key, extent_of
from .numpy_arrays import decode_scalar as decode_numpy_scalar
from .skeleton import (
    LIBRARY,
    PLAIN,
    ROOT,
    ArrayEntry,
    Node,
    Skeleton,
    damaged,
    decode_dtype,
    decode_key,
    decode_scalar,
    from_base64,
    library_module,
    library_of,
    parse,
    parts_of,
    starts_of,
)

log = EventLog("checkpoint.trees")

MapLocation: TypeAlias = "str | Mapping[str, Any] | Any | None"
"""None, a device or its name, or a mapping from the devices of saved arrays to such."""

_SLACK = 16
"""The most bytes before the first array: the size of the largest element."""
_ITEMS_SHOWN = 4


class Destination(Protocol):
    """The memory of one buffer while it is restored."""

    def view(self) -> memoryview:
        """The memory to read into."""

    def to_device(self) -> None:
        """Move the bytes to the device where the arrays belong."""

    def array(self, entry: ArrayEntry) -> Any:
        """The array that an entry describes."""


class _BytesDestination:
    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes)

    def view(self) -> memoryview:
        return memoryview(self._bytes)

    def to_device(self) -> None:
        pass

    def array(self, entry: ArrayEntry) -> bytes | bytearray:
        if entry.shape != [len(self._bytes)] or entry.strides is not None:
            raise damaged(f"{len(self._bytes)} bytes have the shape {entry.shape}")
        return bytes(self._bytes) if entry.kind == "bytes" else self._bytes


def rebuild(
    skeleton: Mapping[str, Any],
    read: Callable[[int, memoryview], None],
    *,
    keys: Iterable[str] | None = None,
    map_location: MapLocation = None,
) -> Any:
    """Restore a state; ``read(index, memory)`` reads the bytes of a buffer into memory.

    See `Rebuild` for the arguments and errors.
    """
    plan = Rebuild(skeleton, keys=keys, map_location=map_location)
    for index, memory in plan.destinations():
        read(index, memory)
        plan.loaded(index)
    return plan.finish()


class Rebuild:
    """The restoration of a state, or of some of its parts.

    ::

        plan = Rebuild(skeleton)
        for index, memory in plan.destinations():
            ...  # read the bytes of buffer `index` into `memory`
        state = plan.finish()

    ``keys`` are names as `describe` gives them, of arrays or of what contains them; the state is
    then a dict from these names to their values, and only their buffers are read.

    ``map_location`` says where arrays of torch and JAX go: None where they were, or to the CPU,
    with a warning, if there is no such device; a device such as ``"cuda:0"``; or a dict from
    the devices where they were, as for None where it has no entry.

    The skeleton is not trusted. ``ValueError`` if it is damaged or of another version,
    ``KeyError`` if it has no such key, ``ModuleNotFoundError`` if it has arrays of a library
    that is not installed. Sizes agree with shapes, but only the caller can compare them to what
    was stored: do so by `sizes`, before memory is allocated.
    """

    sizes: dict[int, int]
    """The sizes of the needed buffers, by index."""

    def __init__(
        self,
        skeleton: Mapping[str, Any],
        *,
        keys: Iterable[str] | None = None,
        map_location: MapLocation = None,
    ) -> None:
        with collector_paused():
            self._skeleton = parse(skeleton)
            self._starts = None if keys is None else starts_of(self._skeleton.nodes, keys)
            self._destinations: dict[int, Destination] = {}
            self._loaded: set[int] = set()
            self._used: dict[int, None] = {}
            self._values(self._use)
            self.sizes = _check_buffers(self._skeleton, self._used)
            used = [self._skeleton.arrays[index] for index in self._used]
            self._entries = {entry.buffer: entry for entry in used}
            devices = dict.fromkeys((LIBRARY[entry.kind], entry.device) for entry in used)
            self._allocators = {
                (lib, dev): _allocator(lib, dev, map_location) for lib, dev in devices
            }

    def destinations(self) -> Iterator[tuple[int, memoryview]]:
        """Yield each needed buffer with the memory to read it into, which is allocated then."""
        for index in self.sizes:
            yield index, self.destination(index)

    def destination(self, index: int) -> memoryview:
        """The memory to read one needed buffer into; threads may ask for several at once."""
        if index not in self._destinations:
            self._destinations[index] = self._allocate(self._entries[index], self.sizes[index])
        return self._destinations[index].view()

    def loaded(self, index: int) -> None:
        """Note that a buffer was read: it is moved to its device, and host memory is freed.

        Optional: `finish` does so for the others.
        """
        self._destinations[index].to_device()
        self._loaded.add(index)

    def finish(self) -> Any:
        """Return the state; all destinations must have been filled."""
        missing = [index for index in self.sizes if index not in self._destinations]
        if missing:
            raise RuntimeError(f"buffers {missing[:10]} were never read")
        for index in self.sizes:
            if index not in self._loaded:
                self.loaded(index)
        with collector_paused():
            arrays = {index: self._array(self._skeleton.arrays[index]) for index in self._used}
            return self._values(arrays.__getitem__)

    def _values(self, array: Callable[[int], Any]) -> Any:
        nodes = self._skeleton.nodes
        if self._starts is not None:
            return {key: _build(nodes, start, array)[0] for key, start in self._starts.items()}
        value, end = _build(nodes, 0, array)
        if end != len(nodes):
            raise damaged("something follows its end")
        return value

    def _use(self, index: int) -> None:
        if not 0 <= index < len(self._skeleton.arrays):
            raise damaged(f"it uses array {index} of {len(self._skeleton.arrays)}")
        self._used[index] = None

    def _allocate(self, entry: ArrayEntry, nbytes: int) -> Destination:
        return self._allocators[LIBRARY[entry.kind], entry.device](nbytes)

    def _array(self, entry: ArrayEntry) -> Any:
        if entry.buffer is not None:
            return self._destinations[entry.buffer].array(entry)
        empty = self._allocate(entry, 0)
        empty.to_device()
        return empty.array(entry)


def _allocator(
    library: str, device: str, map_location: MapLocation
) -> Callable[[int], Destination]:
    """Returns a function that allocates memory for arrays of a library that were on a device."""
    if library == "python":
        return _BytesDestination
    module = library_module(library)
    target = _target_device(library, device, map_location, module.available)
    return lambda nbytes: module.Destination(nbytes, target)


def _target_device(
    library: str, device: str, map_location: MapLocation, available: Callable[[str], bool]
) -> str:
    target = map_location.get(device) if isinstance(map_location, Mapping) else map_location
    if target is not None:
        if not available(str(target)):
            raise ValueError(f"map_location asks for {target}, which {library} does not have here")
        return str(target)
    if available(device):
        return device
    log.warning("checkpoint.device_missing", library=library, device=device, restored_on="cpu")
    return "cpu"


def _check_buffers(skeleton: Skeleton, used: Collection[int]) -> dict[int, int]:
    """Return the sizes of the buffers that arrays need, in their order.

    ``ValueError`` unless every array lies within its buffer, and every buffer is covered.
    """
    arrays = skeleton.arrays
    needed = {arrays[index].buffer for index in used}
    by_buffer: dict[int, list[ArrayEntry]] = {}
    for index, entry in enumerate(arrays):
        if entry.buffer is None:
            if index in used:
                _check_empty(entry)
        elif entry.buffer in needed:
            by_buffer.setdefault(entry.buffer, []).append(entry)
    for index, entries in by_buffer.items():
        _check_buffer(entries, skeleton.buffers[index].nbytes)
    return {index: skeleton.buffers[index].nbytes for index in sorted(by_buffer)}


def _check_empty(entry: ArrayEntry) -> None:
    if _itemsize(entry) * prod(entry.shape) or entry.offset or entry.strides is not None:
        raise damaged(f"an array of shape {entry.shape} has no bytes")


def _check_buffer(entries: list[ArrayEntry], nbytes: int) -> None:
    if len(entries) > 1 and len({(LIBRARY[entry.kind], entry.device) for entry in entries}) > 1:
        raise damaged("arrays of two libraries or devices lie in one buffer")
    extents = [_extent(entry) for entry in entries]
    low, high = min(low for low, _ in extents), max(high for _, high in extents)
    if not 0 <= low < _SLACK or high != nbytes:
        raise damaged(f"a buffer of {nbytes} bytes has arrays from byte {low} to {high}")


def _itemsize(entry: ArrayEntry) -> int:
    library = LIBRARY[entry.kind]
    return 1 if library == "python" else library_module(library).itemsize(entry)


def _extent(entry: ArrayEntry) -> tuple[int, int]:
    size = _itemsize(entry)
    if entry.strides is None:
        low, high = 0, size * prod(entry.shape)
    else:
        low, high = extent_of(entry.shape, entry.strides, size)
    if low == high:
        raise damaged(f"an empty array of shape {entry.shape} lies in a buffer")
    return entry.offset + low, entry.offset + high


class _Container:
    """A container that still lacks parts."""

    __slots__ = ("keys", "kind", "parts")

    def __init__(self, kind: str, keys: Sequence[Key]) -> None:
        self.kind = kind
        self.keys = keys
        self.parts: list[Any] = []

    def close(self) -> Any:
        if self.kind == "list":
            return self.parts
        return tuple(self.parts) if self.kind == "tuple" else self._close_dict()

    def _close_dict(self) -> dict[Key, Any]:
        closed: dict[Key, Any] = {} if self.kind == "dict" else OrderedDict()
        metadata = self.parts.pop() if self.kind == "state dict" else None
        closed.update(zip(self.keys, self.parts, strict=False))
        if len(closed) != len(self.parts):
            raise damaged("a dict has a key twice")
        if metadata is not None:
            # torch's load_state_dict looks for it on the state dict of a module.
            closed._metadata = metadata  # type: ignore[attr-defined]
        return closed


def _build(nodes: list[Node], start: int, array: Callable[[int], Any]) -> tuple[Any, int]:
    """Make the value that begins at a node; also returns where the next begins.

    ``array`` gives the array of an index. ``ValueError`` if `flatten` cannot have
    written the nodes.
    """
    containers: list[_Container] = []
    for position in range(start, len(nodes)):
        node = nodes[position]
        is_leaf = type(node) in PLAIN or (type(node) is list and node[:1] == ["array"])
        keys = None if is_leaf else parts_of(node)
        if keys:
            containers.append(_Container(node[0], keys))
            continue
        value = _leaf(node, array) if keys is None else _Container(node[0], keys).close()
        while containers:
            containers[-1].parts.append(value)
            if len(containers[-1].parts) < len(containers[-1].keys):
                break
            value = containers.pop().close()
        else:
            return value, position + 1
    raise damaged("it ends early")


def _leaf(node: Node, array: Callable[[int], Any]) -> Any:
    if type(node) in PLAIN:
        return node
    match node:
        case ["array", index] if type(index) is int:
            return array(index)
        case ["set", list(keys)]:
            return {decode_key(key) for key in keys}
        case ["frozenset", list(keys)]:
            return frozenset([decode_key(key) for key in keys])
        case ["bytearray", str(text)]:
            return bytearray(from_base64(text))
        case ["numpy", dtype, str(text)]:
            return decode_numpy_scalar(dtype, text)
        case ["numpy str", inner] if type(text := decode_scalar(inner)) is str:
            return np.str_(text)
        case ["numpy bytes", inner] if type(raw := decode_scalar(inner)) is bytes:
            return np.bytes_(raw)
        case ["numpy dtype", dtype]:
            return decode_dtype(dtype)
        case ["torch size", list(lengths)]:
            return library_module("torch").decode_size(lengths)
        case ["torch dtype", str(name)]:
            return library_module("torch").decode_dtype(name)
        case ["torch device", str(name)]:
            return library_module("torch").decode_device(name)
    return decode_scalar(node)


def shaped_like(like: Any, loaded: Any, *, exact: bool = True) -> Any:
    """Put a loaded state into containers of the classes that ``like`` has in the same places.

    A checkpoint names no classes: named tuples come back as tuples, and a ``defaultdict`` as a
    dict. ``ValueError`` names the place where they differ: by keys, by the number of parts, or by
    the library, dtype or shape of an array. Numbers and other values may differ. Without
    ``exact``, what differs stays as it was loaded.
    """
    return _shape(like, loaded, ROOT, exact)


def containers_of(state: Any) -> Any:
    """The containers of a state, with ``None`` in place of every value."""
    if isinstance(state, dict):
        return _dict_like(state, {key: containers_of(part) for key, part in state.items()})
    if _is_sequence(state):
        return _sequence_like(state, [containers_of(part) for part in state])
    return None


def _shape(like: Any, loaded: Any, place: str, exact: bool) -> Any:
    if isinstance(like, dict):
        if not isinstance(loaded, dict):
            return _different(loaded, place, like, exact)
        if exact:
            _check_keys(like, loaded, place)
        parts = {
            key: _shape(like[key], part, f"{place}[{key!r}]", exact) if key in like else part
            for key, part in loaded.items()
        }
        shaped = _dict_like(like, parts)
        if isinstance(shaped, OrderedDict) and hasattr(loaded, "_metadata"):
            shaped._metadata = loaded._metadata  # type: ignore[attr-defined]
        return shaped
    if _is_sequence(like):
        if not _is_sequence(loaded) or (len(loaded) != len(like) and (exact or _is_named(like))):
            return _different(loaded, place, like, exact)
        items = [
            _shape(old, part, f"{place}[{number}]", exact)
            for number, (old, part) in enumerate(zip(like, loaded, strict=False))
        ]
        return _sequence_like(like, [*items, *loaded[len(items) :]])
    if exact and _array_text(like) != _array_text(loaded):
        return _different(loaded, place, like, exact)
    return loaded


def _is_named(state: Any) -> bool:
    return isinstance(state, tuple) and hasattr(state, "_fields")


def _is_sequence(state: Any) -> bool:
    return type(state) in {list, tuple} or _is_named(state)


def _dict_like(like: dict[Any, Any], parts: dict[Any, Any]) -> dict[Any, Any]:
    if isinstance(like, defaultdict):
        return defaultdict(like.default_factory, parts)
    return OrderedDict(parts) if isinstance(like, OrderedDict) else parts


def _sequence_like(like: Any, parts: list[Any]) -> Any:
    if _is_named(like):
        return type(like)._make(parts)
    return parts if type(like) is list else tuple(parts)


def _array_text(value: Any) -> str:
    """The library, dtype and shape of an array; empty for other values."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or isinstance(value, np.generic):
        return ""
    return f"{library_of(type(value))} {dtype} {tuple(shape)}"


def _different(loaded: Any, place: str, like: Any, exact: bool) -> Any:
    if not exact:
        return loaded
    raise ValueError(
        f"{place} was saved as {_text(loaded)}, and is {_text(like)} here: make it as it was"
    )


def _text(value: Any) -> str:
    if text := _array_text(value):
        return text
    name = type(value).__name__
    return f"a {name} of {len(value)} parts" if _is_sequence(value) else f"a {name}"


def _check_keys(like: dict[Any, Any], loaded: dict[Any, Any], place: str) -> None:
    pairs = ((loaded, like, "which is not here"), (like, loaded, "which was not saved"))
    for one, other, complaint in pairs:
        if only := [repr(key) for key in one if key not in other]:
            more = " and more" * (len(only) > _ITEMS_SHOWN)
            raise ValueError(f"{place} has {', '.join(only[:_ITEMS_SHOWN])}{more}, {complaint}")
