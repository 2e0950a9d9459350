"""Clients of HTTP that hold on to what they have: what they are given, and when it ends."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from dtruntime.config import CoordinatorConfig, split_address
from dtruntime.coordinator.http import http_server
from dtruntime.coordinator.server import CoordinatorServer
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import StartCoordinator

LARGE = bytes(64 * 2**20)
HALF_REQUEST = b"GET /api/health HTTP/1.1\r\nHost: x\r\nX-Slow: "


def ended(connection: socket.socket) -> bool:
    """Whether the server has closed a connection; waits for its word."""
    connection.settimeout(10.0)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[CoordinatorServer]:
    config = CoordinatorConfig(
        address="127.0.0.1:0", http_address="127.0.0.1:0", data_dir=str(tmp_path)
    )
    async with CoordinatorServer(config) as server:
        yield server


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_half_requests_of_one_address_leave_room_for_the_others(
    start_coordinator: StartCoordinator, connections: ExitStack
) -> None:
    coordinator: LocalCoordinator = start_coordinator(http=True)
    host, port = split_address(coordinator.http_url)
    most = http_server.ADDRESS_CONNECTIONS_MOST
    opened = []
    for _ in range(most + 50):
        one = socket.create_connection((host, port), source_address=("127.0.0.2", 0))
        opened.append(connections.enter_context(one))
        one.sendall(HALF_REQUEST)
    assert all(ended(one) for one in opened[most:]), "too many are cut off"
    assert httpx.get(f"{coordinator.http_url}/api/health").status_code == 200
    for one in opened[:most]:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HALF_REQUEST,
        b"POST /api/actions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50\r\n\r\n{",
    ],
    ids=["nothing", "headers", "body"],
)
async def test_request_that_does_not_arrive_ends_its_connection(
    served: CoordinatorServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)
    host, port = split_address(served.http_address)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(sent)
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://{served.http_address}/api/health")
    assert answer.status_code == 200


async def large_answer(scope: Any, receive: Any, send: Any) -> None:
    length = (b"content-length", str(len(LARGE)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": LARGE})


async def test_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 0.1)
    by_address: Counter[str] = Counter()
    protocol: Any = partial(http_server.BoundedProtocol, by_address)
    config = uvicorn.Config(large_answer, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    make: Any = config.http_protocol_class
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: make(config=config, server_state=state, app_state={}),
        "127.0.0.1",
        0,
    )
    with socket.create_connection(server.sockets[0].getsockname()) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.to_thread(eventually, lambda: by_address["127.0.0.1"])
        await asyncio.to_thread(eventually, lambda: not by_address)
    server.close()
