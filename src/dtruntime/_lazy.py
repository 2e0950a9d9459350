"""Lazy exports: names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(
    package: str,
    homes: Mapping[str, str],
    missing: Callable[[str], str | None] = lambda library: None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of ``package``.

    ``homes`` has the exported names of each module, separated by spaces; modules are named
    relative to the package (``.errors``). ``missing`` turns the name of a library that is not
    installed into a message that says what to install; None: the original error says it.
    Type checkers read the imports under ``TYPE_CHECKING`` beside it, written as
    ``from .errors import StrataError as StrataError``, which re-exports without an ``__all__``.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(home, package), name)
        except ModuleNotFoundError as exc:
            message = missing(exc.name or "")
            if message is None:
                raise
            raise ModuleNotFoundError(message, name=exc.name) from exc
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return load, names, sorted(home_of)
