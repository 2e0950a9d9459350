"""The process's one I/O thread, and the asynchronous and blocking form of every operation.

An operation is written once, as a coroutine that runs on the I/O thread. ``awaitable`` makes its
asynchronous form, callable from any event loop, and ``blocking`` the synchronous one::

    class Client:
        @awaitable
        async def ping_async(self, times: int) -> float: ...

        ping = blocking(ping_async)
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from ._shutdown import shutdown
from .errors import StrataError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class LoopThread:
    """An event loop on a daemon thread, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._forked = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, running."""
        if self._forked:
            raise StrataError(
                f"process {os.getpid()} was forked from one that already used Strata, and the "
                "network connection does not survive a fork: pass plain data (shard lists, file "
                "paths) to the child, or start it with the 'spawn' method"
            )
        with self._lock:
            if self._loop is None:
                self._loop = self._start()
            return self._loop

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        started = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(loop)
            loop.call_soon(started.set)
            loop.run_forever()

        self._thread = threading.Thread(target=run, name="strata-io", daemon=True)
        self._thread.start()
        started.wait()
        return loop

    def submit(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """Run a coroutine on the I/O thread."""
        try:
            loop = self.loop
        except StrataError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def is_current(self) -> bool:
        """Whether the caller is on the I/O thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the thread; the next use starts another."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or thread is threading.current_thread():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(timeout=5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)
        if not thread.is_alive():
            loop.close()

    def after_fork_in_child(self) -> None:
        """Forget the parent's thread: it does not exist in the child."""
        self._lock = threading.Lock()
        self._forked = self._forked or self._loop is not None
        self._loop = self._thread = None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


io = LoopThread()
"""The one I/O thread of this process."""

os.register_at_fork(after_in_child=io.after_fork_in_child)
shutdown.at_end(io.close)


def awaitable(
    body: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """The asynchronous form of a method whose body runs on the I/O thread."""

    @functools.wraps(body)
    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if io.is_current():
            return await body(self, *args, **kwargs)
        return await asyncio.wrap_future(io.submit(body(self, *args, **kwargs)))

    method.__strata_body__ = body  # type: ignore[attr-defined]
    return method


def blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], *, brief: bool = False
) -> Callable[Concatenate[S, P], R]:
    """The blocking form of a method made with `awaitable`.

    Inside a running event loop it raises, since it would stall that loop; a ``brief``
    operation (one round trip) is allowed there.
    """
    body: Callable[Concatenate[S, P], Coroutine[Any, Any, R]] = method.__strata_body__  # type: ignore[attr-defined]

    @functools.wraps(body)
    def blocking_method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not brief or io.is_current():
            refuse_inside_loop(method.__name__)
        return wait_for(io.submit(body(self, *args, **kwargs)))

    return blocking_method


def wait_for(future: Future[R]) -> R:
    """Wait for work on the I/O thread; interrupting the wait cancels the work."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def refuse_inside_loop(asynchronous_name: str) -> None:
    """Raise if a blocking call here would stall, or deadlock, a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise StrataError(
        "this call blocks, and the current thread runs an event loop that it would stall: "
        f"use 'await {asynchronous_name}(...)' here, or call it from a thread "
        "(await asyncio.to_thread(...))"
    )
