"""Element types of numpy arrays as JSON.

A type of numpy's own is its string (``"<f4"``), one of ml_dtypes its name (``"bfloat16"``), a
structured one ``{"fields": [[name, type, offset], ...], "itemsize": n}`` with a title after the
offset where a field has one, and a field that is itself an array ``{"base": type, "shape":
[...]}``. Metadata of a type is not kept.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

_PLAIN = re.compile(r"[<>|][biufcSUVmM]\d{1,10}(\[\d{0,9}[A-Za-zμ]{1,7}\])?")
_ML_DTYPES = frozenset(
    {"bfloat16", "bcomplex32", "complex32", "int1", "int2", "int4", "uint1", "uint2", "uint4"}
    | {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"}
    | {"float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"}
    | {"float8_e5m2fnuz", "float8_e8m0fnu"}
)
_MAX_DEPTH = 16
_MAX_NAME = 40


def encode_dtype(dtype: np.dtype[Any], depth: int = 0) -> str | dict[str, Any]:
    """Describe a type; ``TypeError`` when its elements are not of a fixed size in place."""
    if depth > _MAX_DEPTH:
        raise TypeError(f"has elements of more than {_MAX_DEPTH} levels")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": encode_dtype(base, depth + 1), "shape": list(shape)}
    return _encode_plain(dtype) if dtype.names is None else _encode_structured(dtype, depth)


@lru_cache(maxsize=256)
def _encode_plain(dtype: np.dtype[Any]) -> str:
    if dtype.type.__module__ == "ml_dtypes" and dtype.name in _ML_DTYPES:
        return dtype.name
    if dtype.hasobject or dtype.kind not in "biufcSUVmM":
        raise TypeError(f"has elements of type {dtype}: only those of a fixed size can be stored")
    return dtype.str


def _encode_structured(dtype: np.dtype[Any], depth: int) -> dict[str, Any]:
    assert dtype.names is not None
    assert dtype.fields is not None
    fields = []
    for name in dtype.names:
        kind, offset, *title = dtype.fields[name]
        if not all(isinstance(text, str) for text in title):
            raise TypeError(f"has elements of type {dtype}: titles of fields must be strings")
        fields.append([name, encode_dtype(kind, depth + 1), offset, *title])
    found: dict[str, Any] = {"fields": fields, "itemsize": dtype.itemsize}
    return {**found, "aligned": True} if dtype.isalignedstruct else found


def decode_dtype(node: object) -> np.dtype[Any]:
    """Read what `encode_dtype` wrote; ``ValueError`` for anything else."""
    try:
        return _decode(node, 0)
    except (TypeError, OverflowError, SyntaxError, MemoryError) as exc:
        raise ValueError(f"{node!r:.80} is not a type of elements: {exc}") from exc


def _decode(node: Any, depth: int) -> np.dtype[Any]:
    match node:
        case str() if node in _ML_DTYPES:
            return _from_ml_dtypes(node)
        case str() if _PLAIN.fullmatch(node):
            return np.dtype(node)
        case {"base": base, "shape": list(shape)} if len(node) == 2 and depth < _MAX_DEPTH:
            return np.dtype((_decode(base, depth + 1), tuple(map(_size, shape))))
        case {"fields": list(fields), "itemsize": int(itemsize)} if depth < _MAX_DEPTH:
            aligned = node.get("aligned", False) is True
            return _structured(fields, itemsize, aligned, depth)
    raise ValueError(f"{node!r:.80} is not a type of elements")


def _structured(fields: list[Any], itemsize: int, aligned: bool, depth: int) -> np.dtype[Any]:
    found = [_field(field, depth) for field in fields]
    spec: Any = {
        "names": [name for name, _, _, _ in found],
        "formats": [kind for _, kind, _, _ in found],
        "offsets": [offset for _, _, offset, _ in found],
        "titles": [title for _, _, _, title in found],
        "itemsize": _size(itemsize),
    }
    dtype: np.dtype[Any] = np.dtype(spec, align=aligned)
    return dtype


def _field(node: Any, depth: int) -> tuple[str, np.dtype[Any], int, str | None]:
    match node:
        case [str(name), kind, offset]:
            return name, _decode(kind, depth + 1), _size(offset), None
        case [str(name), kind, offset, str(title)]:
            return name, _decode(kind, depth + 1), _size(offset), title
    raise ValueError(f"{node!r:.80} is not a field: a name, a type, an offset and maybe a title")


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r:.80} is not a size")
    return value


def _from_ml_dtypes(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as exc:
        raise ModuleNotFoundError(
            f"the checkpoint has {name} arrays: install ml_dtypes to load them"
        ) from exc
    if not hasattr(ml_dtypes, name):
        raise ValueError(f"this version of ml_dtypes has no {name}: install a newer one")
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


@lru_cache(maxsize=256)
def name_of(dtype: np.dtype[Any]) -> str:
    """Name a type for people and for the choice of a compression."""
    return dtype.name if len(dtype.name) <= _MAX_NAME else f"{dtype.name[:_MAX_NAME]}…"
