"""What a `CheckpointManager` is given, checked before anything is saved."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import psutil

from ..storage import StorageBackend
from ..storage.object_store.client import SCHEMES
from ..storage.urls import backend_options
from ..types import check_whole
from .save.staging import SLAB

R = TypeVar("R")


def check_place(storage_path: Any, path: Any) -> str | StorageBackend:
    """The place that is named by one of two arguments, as text, or what stores it."""
    if storage_path is not None and path is not None:
        raise TypeError("give storage_path or path, not both: they are the same")
    place = storage_path if storage_path is not None else path
    if place is None:
        raise TypeError("CheckpointManager needs a storage_path (or path)")
    if isinstance(place, StorageBackend):
        return place
    text = os.fspath(place)
    if not isinstance(text, str):
        raise TypeError(f"storage_path must be a str or a path, not {type(text).__name__}")
    return text


def check_options(url: str, options: Iterable[str], manager: type[Any]) -> None:
    """Make sure that a place can be one, and that its storage takes these options.

    One of the arguments of ``manager`` may have been meant. ``ConfigError`` and ``TypeError``.
    """
    taken = backend_options(url)
    for name in options:
        if name not in taken:
            advice = _advice(name, taken, manager, url)
            raise TypeError(f"CheckpointManager has no option {name!r}{advice}")


def check_budget(memory_budget: Any) -> int:
    """How much memory saves may take; by default a quarter of the machine's."""
    if memory_budget is None:
        return max(SLAB, psutil.virtual_memory().total // 4)
    return check_whole("memory_budget", memory_budget, SLAB)


def check_named(what: str, given: Any, kind: Callable[[Any], R]) -> dict[str, R]:
    """What is told about a checkpoint under names, such as metrics, with values of one kind."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a dict, not {type(given).__name__}")
    found = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise TypeError(f"names in {what} must be str, not {name!r:.80}")
        found[name] = kind(value)
        try:
            f"{name}{found[name]}".encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{what} {name!r:.80} is not text that can be stored as UTF-8"
            ) from None
    return found


def _advice(name: str, taken: set[str], manager: type[Any], url: str) -> str:
    parameters = inspect.signature(manager).parameters.values()
    own = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    close = difflib.get_close_matches(name, [*own, *taken], 1)
    if close:
        return f": did you mean {close[0]}?"
    takes = ", ".join(sorted(taken)) or "none"
    scheme = url.partition("://")[0].lower()
    if scheme in SCHEMES:
        return (
            f", and {scheme}:// takes {takes}: credentials and other settings of the store go in "
            "config={...}"
        )
    return f", and this storage takes {takes}"
