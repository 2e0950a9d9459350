"""Names of the places in a state: readable ones, and as Python would write them."""

from __future__ import annotations

from .buffers import Key

ROOT = "state"


class Place:
    """A container within a state; the outermost one has no parent."""

    __slots__ = ("_name", "key", "parent")

    def __init__(self, parent: Place | None, key: Key) -> None:
        self.parent = parent
        self.key = key
        self._name: str | None = None if parent else ""

    def name(self) -> str:
        """Its name, such as ``optimizer/state/0``; that of the outermost is empty."""
        if self._name is None:
            keys = []
            place = self
            while place._name is None:
                keys.append(readable(place.key))
                assert place.parent is not None
                place = place.parent
            names = [place._name] if place._name else []
            self._name = "/".join([*names, *reversed(keys)])
        return self._name


def name_of(place: Place | None, key: Key) -> str:
    """The readable name of what lies in a place under a key: ``model/layer1.weight``."""
    if place is None:
        return ROOT
    own = place.name()
    return f"{own}/{readable(key)}" if own else readable(key)


def path_of(place: Place | None, key: Key) -> str:
    """The same as Python would write it: ``state['model']['layer1.weight']``."""
    keys = []
    while place is not None:
        keys.append(key)
        key = place.key
        place = place.parent
    return ROOT + "".join(f"[{item!r}]" for item in reversed(keys))


def readable(key: Key) -> str:
    """A key as a part of a name."""
    text = key if type(key) is str else str(key)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
