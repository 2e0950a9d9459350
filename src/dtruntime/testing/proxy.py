"""A TCP proxy that breaks connections the way networks do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Self

from .._sync_bridge import awaitable, blocking
from ..config import split_address
from ..errors import StrataError

CHUNK = 64 * 1024


class _Link:
    """One connection through the proxy."""

    def __init__(self, proxy: TcpProxy, accepted: socket.socket) -> None:
        self.proxy = proxy
        self.swallows = proxy.swallows_new
        self.client: asyncio.StreamWriter | None = None
        self.server: asyncio.StreamWriter | None = None
        self._accepted: socket.socket | None = accepted
        """The accepted socket, until it becomes a stream."""
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Carry bytes both ways until both sides have ended."""
        assert self._accepted is not None
        accepted, self._accepted = self._accepted, None
        try:
            reader, self.client = await asyncio.open_connection(sock=accepted)
            back, self.server = await asyncio.open_connection(*self.proxy.target)
            await asyncio.gather(self._carry(reader, self.server), self._carry(back, self.client))
        except (OSError, asyncio.CancelledError):
            self._abort()
        else:
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
        """Reset both sides at once, like a host that lost its state."""
        if self.server is None:
            self.task.cancel()  # connecting to the server may take long
        self._abort()

    def _abort(self) -> None:
        if self._accepted is not None:
            self._accepted.close()
        for writer in (self.client, self.server):
            if writer is None:
                continue
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class TcpProxy:
    """Forwards connections to a server, and breaks them on demand.

    ::

        with TcpProxy(coordinator.url) as proxy:
            orchestrator = TrainingOrchestrator(coordinator_url=proxy.url)
            proxy.cut()         # every connection is reset; new ones work
            proxy.go_silent()   # they stay open but carry nothing (half-open)
            proxy.delay = 0.2   # seconds, each way
            proxy.refuse()      # nobody listens
            proxy.accept()      # somebody listens again

    It runs on the process's I/O thread.
    """

    def __init__(self, target: str) -> None:
        """``target`` is ``HOST:PORT``, or a coordinator's URL."""
        self.target = split_address(target)
        self.delay = 0.0
        """Latency in seconds, each way."""
        self.swallows_new = False
        self.accepted = 0
        """How many connections were accepted so far."""
        self._links: set[_Link] = set()
        self._listener: socket.socket | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """The URL for clients."""
        if not self._port:
            raise StrataError("the proxy is not running: call accept() first")
        return f"http://127.0.0.1:{self._port}"

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._links)

    @awaitable
    async def accept_async(self) -> None:
        """Listen, also again after `refuse`."""
        if self._listener is None:
            # asyncio's own server loses connections that arrive while it is being closed.
            self._listener = socket.create_server(("127.0.0.1", self._port))
            self._listener.setblocking(False)
            self._port = self._listener.getsockname()[1]
            asyncio.get_running_loop().add_reader(self._listener, self._take, self._listener)

    accept = blocking(accept_async)

    @awaitable
    async def refuse_async(self) -> None:
        """Reset every connection and stop listening: new ones are refused."""
        self._stop_listening()
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

        This is how a firewall behaves that forgot a connection, or a host that lost power. With
        ``new_connections``, those made from here on are silent too, until `heal`.
        """
        self.swallows_new = new_connections
        for link in self._links:
            link.swallows = True
        return len(self._links)

    go_silent = blocking(go_silent_async)

    @awaitable
    async def heal_async(self) -> None:
        """Carry new connections again; silent ones stay silent, since they have lost bytes."""
        self.swallows_new = False

    heal = blocking(heal_async)

    @awaitable
    async def close_async(self) -> None:
        """End everything."""
        self._stop_listening()
        links = list(self._links)
        self._reset_all()
        for link in links:
            await asyncio.wait([link.task])

    close = blocking(close_async)

    def _take(self, listener: socket.socket) -> None:
        """Accept a connection, which `cut` and the like can break from then on."""
        try:
            accepted, _ = listener.accept()
        except OSError:
            return  # the client has gone already
        accepted.setblocking(False)
        self.accepted += 1
        link = _Link(self, accepted)
        self._links.add(link)
        link.task.add_done_callback(lambda _: self._links.discard(link))

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _reset_all(self) -> int:
        links = list(self._links)
        for link in links:
            link.reset()
        return len(links)

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self.accept_async()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()
