"""Work on threads that nobody has to wait for."""

import asyncio
import subprocess
import sys
import threading

import pytest

from dtruntime._background import abandonable


async def test_abandonable_work_gives_its_result_or_its_error_from_a_thread_of_its_own() -> None:
    assert await abandonable(lambda: threading.current_thread().name, "aside") == "aside"
    with pytest.raises(ZeroDivisionError):
        await abandonable(lambda: 1 // 0, "aside")


async def test_cancelled_wait_does_not_end_the_work() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait()
        ended.set()

    waiting = abandonable(work, "aside")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 30)


def test_exit_does_not_wait_for_abandoned_work() -> None:
    program = """
import asyncio, threading
from dtruntime._background import abandonable

async def main():
    async with asyncio.timeout(0.01):
        await abandonable(threading.Event().wait, "aside")

try:
    asyncio.run(main())
except TimeoutError:
    print("left")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (run.stdout, run.stderr) == ("left\n", "")
