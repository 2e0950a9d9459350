"""Putting a state together again: its arrays first get memory to be read into."""

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
    landings_of,
    library_of,
    parse,
    parts_of,
    starts_of,
)


class Landing(Protocol):
    """The memory of one buffer while it is restored."""

    def view(self) -> memoryview:
        """The memory to read into."""

    def settle(self) -> None:
        """Move what was read to where it belongs."""

    def restore(self, entry: ArrayEntry) -> Any:
        """Make an array of the memory."""


class BytesLanding:
    """Memory that a byte string is restored in."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes)

    def view(self) -> memoryview:
        """The memory to read into."""
        return memoryview(self._bytes)

    def settle(self) -> None:
        """Do nothing: the bytes lie where they were read."""

    def restore(self, entry: ArrayEntry) -> bytes | bytearray:
        """Make a byte string of the memory."""
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
    then a dict from these names to their values, and only the buffers of these are asked for.

    ``map_location`` says where arrays of torch and JAX go: None where they were, or to the CPU,
    with a warning, when there is no such device; a device such as ``"cuda:0"``; or a dict from
    the devices where they were, as for None where it has no entry.

    The skeleton is not trusted. ``ValueError`` when it is damaged or of another version,
    ``KeyError`` when it has no such key, ``ModuleNotFoundError`` when it has arrays of a library
    that is not installed. Sizes agree with shapes, but only the caller can compare them to what
    was stored: do so by `sizes`, before memory is asked for.
    """

    sizes: dict[int, int]
    """The sizes of the buffers that are needed, by their index."""

    def __init__(
        self,
        skeleton: Mapping[str, Any],
        *,
        keys: Iterable[str] | None = None,
        map_location: MapLocation = None,
    ) -> None:
        with collector_paused():
            self._plan(skeleton, keys, map_location)

    def _plan(
        self, skeleton: Mapping[str, Any], keys: Iterable[str] | None, map_location: MapLocation
    ) -> None:
        self._skeleton = parse(skeleton)
        nodes = self._skeleton.nodes
        self._starts = None if keys is None else starts_of(nodes, keys)
        self._places = DeviceMap(map_location)
        self._landings: dict[int, Landing] = {}
        self._settled: set[int] = set()
        self._used: dict[int, None] = {}
        self._values(self._note)
        self.sizes = check_buffers(self._skeleton, self._used)
        used = [self._skeleton.arrays[index] for index in self._used]
        self._tenants = {entry.buffer: entry for entry in used}
        self._makers = {
            (kind, device): self._maker(kind, device)
            for kind, device in dict.fromkeys((entry.kind, entry.device) for entry in used)
        }

    def destinations(self) -> Iterator[tuple[int, memoryview]]:
        """Go through the needed buffers in their order, each with the memory to read it into.

        Memory is allocated as one goes.
        """
        for index in self.sizes:
            yield index, self.destination(index)

    def destination(self, index: int) -> memoryview:
        """The memory to read one needed buffer into; several threads may ask for several."""
        if index not in self._landings:
            self._landings[index] = self._landing(self._tenants[index], self.sizes[index])
        return self._landings[index].view()

    def loaded(self, index: int) -> None:
        """Say that a buffer was read: it is moved to its device, and host memory freed.

        Optional: `finish` does it for those of which nothing was said.
        """
        self._landings[index].settle()
        self._settled.add(index)

    def finish(self) -> Any:
        """Return the state; all destinations must have been filled."""
        missing = [index for index in self.sizes if index not in self._landings]
        if missing:
            raise RuntimeError(f"buffers {missing[:10]} were never read")
        for index in self.sizes:
            if index not in self._settled:
                self.loaded(index)
        with collector_paused():
            arrays = {index: self._restore(self._skeleton.arrays[index]) for index in self._used}
            return self._values(arrays.__getitem__)

    def _values(self, array: Callable[[int], Any]) -> Any:
        nodes = self._skeleton.nodes
        if self._starts is not None:
            return {key: build(nodes, start, array)[0] for key, start in self._starts.items()}
        value, end = build(nodes, 0, array)
        if end != len(nodes):
            raise damaged("something follows its end")
        return value

    def _note(self, index: int) -> None:
        if not 0 <= index < len(self._skeleton.arrays):
            raise damaged(f"it uses array {index} of {len(self._skeleton.arrays)}")
        self._used[index] = None

    def _maker(self, kind: str, device: str) -> Callable[[int], Landing]:
        """Makes memory of so many bytes for arrays that were on a device."""
        library = LIBRARY[kind]
        if library == "python":
            return BytesLanding
        home = landings_of(library)
        place = self._places.of(device, library, home)
        return lambda nbytes: home.Landing(nbytes, place)

    def _landing(self, entry: ArrayEntry, nbytes: int) -> Landing:
        return self._makers[entry.kind, entry.device](nbytes)

    def _restore(self, entry: ArrayEntry) -> Any:
        if entry.buffer is not None:
            return self._landings[entry.buffer].restore(entry)
        empty = self._landing(entry, 0)
        empty.settle()
        return empty.restore(entry)


log = EventLog("checkpoint.trees")

MapLocation: TypeAlias = "str | Mapping[str, Any] | Any | None"
"""None, a device or its name, or a mapping from the devices of saved arrays to such."""


class DeviceMap:
    """The devices of one restoration."""

    def __init__(self, map_location: MapLocation) -> None:
        self._chosen = map_location
        self._known: dict[tuple[str, str], str] = {}

    def of(self, device: str, library: str, home: Any) -> str:
        """Where arrays go that were on a device."""
        known = self._known.get((library, device))
        if known is None:
            known = self._known[library, device] = self._find(device, library, home)
        return known

    def _find(self, device: str, library: str, home: Any) -> str:
        chosen = self._chosen
        if isinstance(chosen, Mapping):
            chosen = chosen.get(device)
        if chosen is not None:
            name = str(chosen)
            if not home.available(name):
                raise ValueError(
                    f"map_location asks for {name}, which {library} does not have here"
                )
            return name
        if home.available(device):
            return device
        log.warning("checkpoint.device_missing", library=library, device=device, restored_on="cpu")
        return "cpu"


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
    size = _itemsize(entry)
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


def _itemsize(entry: ArrayEntry) -> int:
    library = LIBRARY[entry.kind]
    return 1 if library == "python" else landings_of(library).itemsize(entry)


def _extent(entry: ArrayEntry) -> tuple[int, int]:
    size = _itemsize(entry)
    if entry.strides is None:
        low, high = 0, size * prod(entry.shape)
    else:
        low, high = extent_of(entry.shape, entry.strides, size)
    if low == high:
        raise damaged(f"an empty array of shape {entry.shape} lies in a buffer")
    return entry.offset + low, entry.offset + high


Array = Callable[[int], Any]
"""Gives the value of the array of an index."""


_ARRAY = ["array"]


class _Container:
    """A container whose parts are not all there yet."""

    __slots__ = ("keys", "kind", "parts")

    def __init__(self, kind: str, keys: Sequence[Key]) -> None:
        self.kind = kind
        self.keys = keys
        self.parts: list[Any] = []

    def close(self) -> Any:
        if self.kind == "list":
            return self.parts
        if self.kind == "tuple":
            return tuple(self.parts)
        return self._close_dict()

    def _close_dict(self) -> dict[Key, Any]:
        found: dict[Key, Any] = {} if self.kind == "dict" else OrderedDict()
        metadata = self.parts.pop() if self.kind == "state dict" else None
        found.update(zip(self.keys, self.parts, strict=False))
        if len(found) != len(self.parts):
            raise damaged("a dict has a key twice")
        if metadata is not None:
            # What torch's load_state_dict looks for on the state dict of a module.
            found._metadata = metadata  # type: ignore[attr-defined]
        return found


def build(nodes: list[Node], start: int, array: Array) -> tuple[Any, int]:
    """Make the value that begins at a node, and say where the next begins.

    ``ValueError`` when the nodes are not what `flatten` writes.
    """
    containers: list[_Container] = []
    for position in range(start, len(nodes)):
        node = nodes[position]
        is_leaf = type(node) in PLAIN or (type(node) is list and node[:1] == _ARRAY)
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


def _leaf(node: Node, array: Array) -> Any:
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
        case [str(tag), *_] if tag.startswith("numpy"):
            return _numpy_value(node)
        case [str(tag), *_] if tag.startswith("torch"):
            return _torch_value(node)
    return decode_scalar(node)


def _numpy_value(node: Node) -> Any:
    match node:
        case ["numpy", dtype, str(text)]:
            return decode_numpy_scalar(dtype, text)
        case ["numpy str", inner] if type(text := decode_scalar(inner)) is str:
            return np.str_(text)
        case ["numpy bytes", inner] if type(raw := decode_scalar(inner)) is bytes:
            return np.bytes_(raw)
        case ["numpy dtype", dtype]:
            return decode_dtype(dtype)
    raise damaged(f"{node!r:.80} is no value of numpy")


def _torch_value(node: Node) -> Any:
    match node:
        case ["torch size", list(lengths)]:
            return landings_of("torch").decode_size(lengths)
        case ["torch dtype", str(name)]:
            return landings_of("torch").decode_dtype(name)
        case ["torch device", str(name)]:
            return landings_of("torch").decode_device(name)
    raise damaged(f"{node!r:.80} is no value of torch")


_ITEMS_SHOWN = 4


def shaped_like(like: Any, loaded: Any, *, exact: bool = True) -> Any:
    """Put what was loaded into containers of the classes that ``like`` has at the same places.

    ``ValueError`` names the place where they differ: by keys, by the number of parts, or by the
    library, element type or shape of an array. Numbers and other values may differ. Without
    ``exact`` what differs stays as it was loaded.
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
            return _differs(loaded, place, like, exact)
        if exact:
            _check_keys(like, loaded, place)
        parts = {
            key: _shape(like[key], part, f"{place}[{key!r}]", exact) if key in like else part
            for key, part in loaded.items()
        }
        found = _dict_like(like, parts)
        if isinstance(found, OrderedDict) and hasattr(loaded, "_metadata"):
            found._metadata = loaded._metadata  # type: ignore[attr-defined]
        return found
    if _is_sequence(like):
        if not _is_sequence(loaded) or (len(loaded) != len(like) and (exact or _is_named(like))):
            return _differs(loaded, place, like, exact)
        shaped = [
            _shape(old, part, f"{place}[{number}]", exact)
            for number, (old, part) in enumerate(zip(like, loaded, strict=False))
        ]
        return _sequence_like(like, [*shaped, *loaded[len(shaped) :]])
    if exact and _array_text(like) != _array_text(loaded):
        return _differs(loaded, place, like, exact)
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
    """What an array is; nothing for other values."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or isinstance(value, np.generic):
        return ""
    return f"{library_of(type(value))} {dtype} {tuple(shape)}"


def _differs(loaded: Any, place: str, like: Any, exact: bool) -> Any:
    if not exact:
        return loaded
    raise ValueError(
        f"{place} was saved as {_told(loaded)}, and is {_told(like)} here: make it as it was"
    )


def _told(value: Any) -> str:
    described = _array_text(value)
    if described:
        return described
    named = type(value).__name__
    return f"a {named} of {len(value)} parts" if _is_sequence(value) else f"a {named}"


def _check_keys(like: dict[Any, Any], loaded: dict[Any, Any], place: str) -> None:
    pairs = ((loaded, like, "which is not here"), (like, loaded, "which was not saved"))
    for one, other, told in pairs:
        if only := [repr(key) for key in one if key not in other]:
            more = " and more" * (len(only) > _ITEMS_SHOWN)
            raise ValueError(f"{place} has {', '.join(only[:_ITEMS_SHOWN])}{more}, {told}")
