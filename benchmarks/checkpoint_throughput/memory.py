"""How much memory a process takes at most."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_RESET_PEAK = "5"


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
