"""Names of stored files: relative, with ``/`` between the parts, the same on every backend."""

from __future__ import annotations

import unicodedata

MAX_BYTES = 768
"""Of a name in UTF-8. Stores allow 1024 for the name and the prefix it lies under."""
MAX_PART_BYTES = 255
"""Of each part of it: what file systems allow."""
PARTIAL = ".strata-partial-"
"""Files in a local folder that begin so are being written, or were by a process that died."""


def check_name(name: str) -> str:
    """Return ``name`` if every backend can store a file under it; ``ValueError`` if not."""
    if not isinstance(name, str):
        raise TypeError(f"a name in storage is a str, not {type(name).__name__}")
    fault = _fault_of(name)
    if fault:
        raise ValueError(
            f"{name[:200]!r} cannot be a name in storage: {fault}. Write a relative name such as "
            "'step-100/model.pack'"
        )
    return name


def check_prefix(prefix: str) -> str:
    """Return the folder that a listing is limited to, without a slash at its end; "" for all."""
    if prefix == "":
        return prefix
    return check_name(prefix.removesuffix("/"))


def _fault_of(name: str) -> str:
    try:
        parts = [part.encode() for part in name.split("/")]
    except UnicodeEncodeError:
        return "it has characters that UTF-8 does not know"
    if not all(parts):
        return "it is empty, begins or ends with a slash, or has two in a row"
    if b"." in parts or b".." in parts:
        return "'.' and '..' are not allowed as parts"
    if "\\" in name or any(unicodedata.category(char) == "Cc" for char in name):
        return "backslashes and control characters are not allowed"
    if any(part.startswith(PARTIAL.encode()) for part in parts):
        return f"{PARTIAL!r} marks files that are not complete"
    if len(name.encode()) > MAX_BYTES:
        return f"it is longer than {MAX_BYTES} bytes"
    longest = max(map(len, parts))
    return f"a part is longer than {MAX_PART_BYTES} bytes" if longest > MAX_PART_BYTES else ""
