"""A TCP proxy that breaks connections in the ways in which networks do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Self

from .._loop import awaitable, blocking
from ..config import split_address
from ..errors import StrataError

CHUNK = 64 * 1024


class _Link:
    """One connection through the proxy: two sockets and what is done to them."""

    def __init__(self, proxy: TcpProxy, client: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.swallows = proxy.swallows_new
        self.client = client
        self.server: asyncio.StreamWriter | None = None

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Carry bytes both ways until both sides have ended."""
        try:
            back, self.server = await asyncio.open_connection(*self.proxy.target)
        except OSError:
            self.reset()
            return
        await asyncio.gather(self._carry(reader, self.server), self._carry(back, self.client))
        self.client.close()
        self.server.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due, chunk = 0.0, b"?"
        while chunk:
            try:
                chunk = await source.read(CHUNK)
            except OSError:
                if not self.swallows:
                    self.reset()
                return
            due = max(due + 1e-6, loop.time() + self.proxy.delay)
            if not self.swallows:
                loop.call_at(due, self._pass_on, sink, chunk)
        await asyncio.sleep(due - loop.time())

    def _pass_on(self, sink: asyncio.StreamWriter, chunk: bytes) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            if self.swallows or sink.is_closing():
                return
            if chunk:
                sink.write(chunk)
            else:
                sink.write_eof()

    def reset(self) -> None:
        """End both sides at once, as a host that lost its state would."""
        for writer in (self.client, self.server):
            if writer is None:
                continue
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class TcpProxy:
    """Stands between clients and a server, and breaks their connections on demand.

    ::

        with TcpProxy(coordinator.url) as proxy:
            orchestrator = TrainingOrchestrator(coordinator_url=proxy.url)
            proxy.cut()         # every connection is reset; new ones work
            proxy.go_silent()   # they stay open and carry nothing any more (half-open)
            proxy.delay = 0.2   # seconds, each way
            proxy.refuse()      # nobody listens
            proxy.accept()      # somebody listens again

    It runs on the process's I/O thread.
    """

    def __init__(self, target: str) -> None:
        """``target`` is ``HOST:PORT``, or a coordinator's URL."""
        self.target = split_address(target)
        self.delay = 0.0
        """Seconds that bytes take, each way."""
        self.swallows_new = False
        self.accepted = 0
        """How many connections were made so far."""
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """What a client takes as the coordinator's URL."""
        if not self._port:
            raise StrataError("the proxy is not running: call accept() first")
        return f"http://127.0.0.1:{self._port}"

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._links)

    @awaitable
    async def accept_async(self) -> None:
        """Listen, also after `refuse`."""
        if self._server is None:
            self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    accept = blocking(accept_async)

    @awaitable
    async def refuse_async(self) -> None:
        """Reset every connection and listen no more: new ones are refused."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._reset_all()

    refuse = blocking(refuse_async)

    @awaitable
    async def cut_async(self) -> int:
        """Reset every connection; returns how many there were. New ones work."""
        return self._reset_all()

    cut = blocking(cut_async)

    @awaitable
    async def go_silent_async(self, *, new_connections: bool = False) -> int:
        """Leave every connection open but carry nothing over it; returns how many there were.

        This is what a firewall does that forgets a connection, or a host that lost its power.
        With ``new_connections`` those made from here on are silent too, until `heal`.
        """
        self.swallows_new = new_connections
        for link in self._links:
            link.swallows = True
        return len(self._links)

    go_silent = blocking(go_silent_async)

    @awaitable
    async def heal_async(self) -> None:
        """Carry new connections again; silent ones stay silent, for what they lost is lost."""
        self.swallows_new = False

    heal = blocking(heal_async)

    @awaitable
    async def close_async(self) -> None:
        """End everything."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = list(self._links.values())
        self._reset_all()
        await asyncio.gather(*tasks, return_exceptions=True)

    close = blocking(close_async)

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.accepted += 1
        link = _Link(self, writer)
        task = asyncio.current_task()
        assert task is not None
        self._links[link] = task
        try:
            await link.run(reader)
        except asyncio.CancelledError:
            link.reset()
        finally:
            self._links.pop(link, None)

    def _reset_all(self) -> int:
        links = list(self._links)
        for link in links:
            link.reset()
        return len(links)

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self.accept_async()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close_async()
