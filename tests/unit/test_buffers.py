"""Large pieces of memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from dtruntime import _buffers
from dtruntime._buffers import LARGE, new_bytes, new_pages, use_large_pages


@pytest.mark.parametrize("size", [0, 1, 4095, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 5])
def test_new_bytes_are_what_is_filled_in(size: int) -> None:
    wanted = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    data, view = new_bytes(size)
    with view:
        view[:] = wanted
    assert type(data) is bytes
    assert data == wanted


def test_memory_keeps_what_was_in_it() -> None:
    memory = bytearray(os.urandom(LARGE + 3))
    before = bytes(memory)
    for start in (0, 1, mmap.PAGESIZE):
        use_large_pages(memoryview(memory)[start:])
    assert memory == before


def test_memory_can_be_expected_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buffers, "_madvise", lambda: None)
    data, view = new_bytes(LARGE)
    view[:] = b"x" * LARGE
    assert data == b"x" * LARGE


@pytest.mark.parametrize("size", [mmap.PAGESIZE, LARGE, 5 * LARGE])
def test_pages_are_zeros_on_whole_pages(size: int) -> None:
    memory = new_pages(size)
    assert len(memory) == size
    assert ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) % mmap.PAGESIZE == 0
    assert not np.frombuffer(memory, np.uint8).any()


def test_a_child_has_pages_of_its_own() -> None:
    memory = new_pages(LARGE)
    child = os.fork()
    if not child:
        memory[0] = 1
        os._exit(memory[0] - 1)
    assert os.waitpid(child, 0)[1] == 0
    assert memory[0] == 0


def test_large_pages_are_used_where_the_system_has_them() -> None:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[never]" in switch.read_text():
        pytest.skip("this system has no large pages")
    before = _in_large_pages()
    memory = new_pages(64 * LARGE)
    memory.write(bytes(len(memory)))
    used = _in_large_pages() - before
    if not used:
        pytest.skip("the system had none left")
    assert used <= len(memory)


def _in_large_pages() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHuge")) * 1024
