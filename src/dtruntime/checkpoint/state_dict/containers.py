"""A state that was loaded, in the containers of one that the program made.

A checkpoint names no classes: named tuples come back as tuples, and a ``defaultdict`` as a dict.
The program has their classes, in the state that it begins with.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np

from .skeleton import ROOT
from .supported_types import library_of

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
    if exact and _described(like) != _described(loaded):
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


def _described(value: Any) -> str:
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
    described = _described(value)
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
