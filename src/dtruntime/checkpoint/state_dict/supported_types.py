"""Which module knows a library's arrays; each imports its library, so only when it is needed."""

from __future__ import annotations

import enum
import io
import os
import types
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

_LEAVES = {
    "torch": "torch_tensors",
    "numpy": "numpy_arrays",
    "jax": "jax_arrays",
    "python": "python_bytes",
}
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
        return leaves_of(library)
    except ImportError as exc:
        raise ModuleNotFoundError(
            f"the checkpoint has values of {library}: install dtruntime[{library}] to load them"
        ) from exc


_KINDS: list[tuple[tuple[type, ...], str, str]] = [
    ((type,), "a class", "save its name, or what makes its instances"),
    (
        (types.FunctionType, types.BuiltinFunctionType, types.MethodType),
        "a function",
        "leave it out",
    ),
    ((types.ModuleType,), "a module", "leave it out"),
    ((enum.Enum,), "a member of an enumeration", "save its .value"),
    ((os.PathLike,), "a path", "save str(path)"),
    ((io.IOBase,), "a file", "save its content as bytes"),
    ((memoryview,), "a memoryview", "save bytes(view) or an array"),
    ((types.GeneratorType,), "a generator", "save list(generator)"),
    ((dict,), "a dict of its own type", "save dict(value)"),
    ((list,), "a list of its own type", "save list(value)"),
    ((tuple,), "a tuple of its own type", "save tuple(value)"),
    (
        (str, bytes, bytearray, int, float, complex),
        "of a type derived from a builtin",
        "convert it to the builtin",
    ),
]


def unsupported(value: Any) -> TypeError:
    """Make the error for a value of a type that is not stored."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for types_, what, remedy in _KINDS:
        if isinstance(value, types_):
            return TypeError(f"is {what} ({name}): {remedy}")
    if is_dataclass(value):
        return TypeError(f"is a dataclass ({name}): save dataclasses.asdict(value)")
    if callable(getattr(value, "state_dict", None)):
        return TypeError(f"is a {name}: save its .state_dict()")
    return TypeError(
        f"is a {name}: save it as dicts, lists, numbers, strings, bytes and arrays "
        "(checkpoints are never pickled)"
    )


def refusal(path: str, cause: TypeError | ValueError) -> TypeError | ValueError:
    """Put the place of a value before the reason."""
    kind = TypeError if isinstance(cause, TypeError) else ValueError
    return kind(f"{path} {cause}")
