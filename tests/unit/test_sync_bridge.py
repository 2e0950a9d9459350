"""The I/O thread and the two faces of every operation."""

import asyncio
import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dtruntime._sync_bridge import LoopThread, awaitable, blocking, io
from dtruntime.errors import StrataError
from dtruntime.testing import eventually


class Client:
    """Something with operations of both faces."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.entered = threading.Event()

    @awaitable
    async def where_async(self, prefix: str = "") -> str:
        """Name the thread."""
        await asyncio.sleep(0)
        return prefix + threading.current_thread().name

    where = blocking(where_async)
    where_briefly = blocking(where_async, brief=True)

    @awaitable
    async def fail_async(self) -> None:
        """Fail."""
        raise ZeroDivisionError

    fail = blocking(fail_async)

    @awaitable
    async def hang_async(self) -> None:
        """Wait until cancelled."""
        self.entered.set()
        try:
            await asyncio.sleep(3600)
        finally:
            self.cancelled.set()

    hang = blocking(hang_async)

    @awaitable
    async def nested_async(self) -> str:
        """Use another operation."""
        return await self.where_async("nested ")

    nested = blocking(nested_async)

    @awaitable
    async def deadlock_async(self) -> str:
        """Block the I/O thread on itself."""
        return self.where_briefly()

    deadlock = blocking(deadlock_async)


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def test_both_faces_run_on_the_io_thread() -> None:
    assert Client().where("on ") == "on strata-io"
    assert asyncio.run(Client().where_async("on ")) == "on strata-io"
    assert Client().nested() == "nested strata-io"


def test_both_faces_raise_what_the_body_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        Client().fail()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Client().fail_async())


def test_faces_keep_name_and_documentation() -> None:
    assert Client.where.__doc__ == Client.where_async.__doc__ == "Name the thread."
    assert Client.where_async.__name__ == "where_async"


async def test_blocking_call_inside_a_loop_names_its_twin() -> None:
    with pytest.raises(StrataError, match=r"await where_async\(\.\.\.\).*asyncio\.to_thread"):
        Client().where()


async def test_brief_call_is_allowed_inside_a_loop() -> None:
    assert Client().where_briefly() == "strata-io"


def test_brief_call_on_the_io_thread_itself_is_refused() -> None:
    with pytest.raises(StrataError, match="await where_async"):
        Client().deadlock()


async def test_cancelled_await_cancels_the_work() -> None:
    client = Client()
    task = asyncio.create_task(client.hang_async())
    await asyncio.to_thread(client.entered.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(client.cancelled.wait, 10)


class Interrupted(BaseException):
    """As Ctrl-C, but not for pytest."""


def test_interrupted_wait_cancels_the_work() -> None:
    client, handled = Client(), threading.Event()

    def interrupt(*_: object) -> None:
        if not handled.is_set():
            handled.set()
            raise Interrupted

    def send_until_handled(main: int) -> None:
        client.entered.wait(10)
        eventually(lambda: sys._current_frames()[main].f_code.co_name == "wait")
        while not handled.wait(0.05):
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    killer = threading.Thread(target=send_until_handled, args=(threading.get_ident(),))
    killer.start()
    try:
        with pytest.raises(Interrupted):
            client.hang()
    finally:
        handled.set()
        killer.join()
        signal.signal(signal.SIGUSR1, before)
    assert client.cancelled.wait(10)


def test_many_threads_share_one_io_thread() -> None:
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(Client().where())) for _ in range(20)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert names == ["strata-io"] * 20
    assert [t.name for t in threading.enumerate()].count("strata-io") == 1


def test_thread_starts_at_first_use_and_again_after_close(thread: LoopThread) -> None:
    async def answer() -> int:
        return 42

    assert thread._thread is None
    assert thread.submit(answer()).result(10) == 42
    first = thread.loop
    thread.close()
    assert first.is_closed()
    assert thread.submit(answer()).result(10) == 42
    assert thread.loop is not first


def test_close_cancels_what_still_runs(thread: LoopThread) -> None:
    async def forever() -> None:
        await asyncio.sleep(3600)

    future = thread.submit(forever())
    started = time.monotonic()
    thread.close()
    assert future.cancelled()
    assert time.monotonic() - started < 60
    thread.close()


def test_io_thread_is_a_daemon() -> None:
    Client().where()
    assert io._thread is not None
    assert io._thread.daemon


def test_child_of_a_fork_is_refused_and_its_coroutine_closed(thread: LoopThread) -> None:
    async def answer() -> int:
        return 42

    assert thread.submit(answer()).result(10) == 42
    parents = thread._loop, thread._thread
    thread.after_fork_in_child()
    try:
        with pytest.raises(StrataError, match=r"forked.*plain data"):
            thread.submit(answer())
    finally:
        thread._loop, thread._thread = parents


def test_child_forked_before_first_use_has_a_thread_of_its_own() -> None:
    thread = LoopThread()
    thread.after_fork_in_child()

    async def answer() -> int:
        return 42

    assert thread.submit(answer()).result(10) == 42
    thread.close()


def test_operations_do_not_leak_context_between_callers() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

    class Reader:
        @awaitable
        async def read_async(self) -> str:
            value = variable.get()
            variable.set("left behind")
            return value

        read = blocking(read_async)

    assert [Reader().read() for _ in range(2)] == ["none", "none"]
