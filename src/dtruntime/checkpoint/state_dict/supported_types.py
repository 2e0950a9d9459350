"""Which module knows a library's arrays; each imports its library, so only when it is needed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

_LEAVES = {
    "torch": "torch_leaves",
    "numpy": "numpy_leaves",
    "jax": "jax_leaves",
    "python": "bytes_leaves",
}
_LANDINGS = {**_LEAVES, "torch": "torch_landing"}
_ALIASES = {"jaxlib": "jax", "ml_dtypes": "numpy"}


def library_of(kind: type) -> str | None:
    """Say whose type it is, or derives from."""
    for base in kind.__mro__:
        root = (base.__module__ or "").partition(".")[0]
        library = _ALIASES.get(root, root)
        if library in _LEAVES:
            return library
    return None


@cache
def leaves_of(library: str) -> Any:
    """The module that takes a library's values apart."""
    return import_module(f".{_LEAVES[library]}", __package__)


@cache
def landings_of(library: str) -> Any:
    """The module that restores them; ``ModuleNotFoundError`` when the library is not there."""
    try:
        return import_module(f".{_LANDINGS[library]}", __package__)
    except ImportError as exc:
        raise ModuleNotFoundError(
            f"the checkpoint has values of {library}: install dtruntime[{library}] to load them"
        ) from exc
