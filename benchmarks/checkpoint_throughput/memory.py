"""How much memory a process takes at most."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_RESET_PEAK = "5"
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Of mallopt(3)."""


def keep_memory() -> None:
    """Let what this process frees be used again by it, instead of going back to the system."""
    set_option = ctypes.CDLL(None).mallopt
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
        if not set_option(option, value):
            raise OSError(f"mallopt refuses option {option}")


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """How many bytes more than at the beginning were resident at most, when first asked.

    The kernel keeps the peak, so that no moment is missed.
    """
    gc.collect()
    # What was freed before could be used again without showing.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status("VmRSS")
    found: list[int] = []

    def growth() -> int:
        if not found:
            found.append(_status("VmHWM") - before)
        return found[0]

    yield growth


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
