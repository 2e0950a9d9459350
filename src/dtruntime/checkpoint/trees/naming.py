"""Names of the places in a state: readable ones, and as Python would write them."""

from __future__ import annotations

from ..state_dict.buffers import Key

ROOT = "state"


class Place:
    """A container within a state; the outermost one has no parent."""

    __slots__ = ("key", "parent", "prefix")

    def __init__(self, parent: Place | None, key: Key) -> None:
        self.parent = parent
        self.key = key
        self.prefix = ""
        """What the names of its parts begin with, such as ``optimizer/state/``, once made."""

    def make_prefix(self) -> str:
        """Make the prefix; that of the outermost place is empty."""
        keys: list[str] = []
        place = self
        while place.parent is not None and not place.prefix:
            keys.append(f"{readable(place.key)}/")
            place = place.parent
        self.prefix = place.prefix + "".join(reversed(keys))
        return self.prefix


def name_of(place: Place | None, key: Key) -> str:
    """The readable name of what lies in a place under a key: ``model/layer1.weight``."""
    if place is None:
        return ROOT
    prefix = place.prefix or place.make_prefix()
    return prefix + key if type(key) is str and key.isascii() else prefix + readable(key)


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
