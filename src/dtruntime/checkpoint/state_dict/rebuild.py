"""Putting a state together again: its arrays first get memory to be read into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ..._buffers import collector_paused
from ..trees.building import build
from ..trees.checking import check_buffers
from ..trees.outline import starts_of
from ..trees.places import MapLocation, Places
from .skeleton import LIBRARY, ArrayEntry, damaged, parse
from .supported_types import landings_of


class Landing(Protocol):
    """The memory of one buffer while it is restored."""

    def view(self) -> memoryview:
        """The memory to read into."""

    def settle(self) -> None:
        """Move what was read to where it belongs."""

    def restore(self, entry: ArrayEntry) -> Any:
        """Make an array of the memory."""


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
        self._places = Places(map_location)
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
