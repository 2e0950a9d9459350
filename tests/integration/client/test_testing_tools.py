"""The tools that ship for tests do what they say: processes, a proxy, waiting."""

import asyncio
import contextlib
import gc
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime._sync_bridge import io
from dtruntime.errors import StrataError
from dtruntime.testing import (
    LocalCoordinator,
    TcpProxy,
    WorkerProcess,
    eventually,
    eventually_async,
)

ECHO = """
import sys
print("ready", *sys.argv[1:], flush=True)
for line in sys.stdin:
    print("echo", line.strip(), flush=True)
print("complaint", file=sys.stderr)
sys.exit(3)
"""


def test_worker_process_talks_in_lines() -> None:
    with WorkerProcess(ECHO, ["a", "b"]) as worker:
        assert worker.next_line() == "ready a b"
        worker.send("one")
        worker.send("two")
        assert worker.expect("echo two") == "echo two"
        assert worker.lines == ["ready a b", "echo one", "echo two"]
        worker.close_input()
        assert worker.wait() == 3
        assert worker.log == "complaint\n"
        with pytest.raises(StrataError, match=r"has ended; its log:\ncomplaint"):
            worker.next_line()


def test_worker_process_can_be_paused_resumed_and_killed() -> None:
    with WorkerProcess(ECHO, env={"PYTHONWARNINGS": "error"}) as worker:
        worker.expect("ready")
        worker.pause()
        worker.send("asleep")
        with pytest.raises(StrataError, match="said nothing"):
            worker.next_line(timeout=0.3)
        worker.resume()
        assert worker.next_line() == "echo asleep"
        worker.kill()
        assert worker.wait() == -signal.SIGKILL
        with pytest.raises(StrataError, match="has ended"):
            worker.send("anybody?")
    with pytest.raises(StrataError, match="not running"):
        _ = worker.pid


def test_local_coordinator_says_why_it_did_not_start(tmp_path: Path) -> None:
    coordinator = LocalCoordinator(tmp_path, settings={"no_such_key": 1})
    with pytest.raises(StrataError, match="no_such_key is unknown"):
        coordinator.start()
    with pytest.raises(StrataError, match="not running"):
        _ = coordinator.pid
    assert coordinator.stop() == 0


def test_eventually_returns_what_it_waited_for() -> None:
    values = iter([None, 0, [], "there"])
    assert eventually(lambda: next(values)) == "there"


def test_eventually_shows_what_was_seen_last() -> None:
    with pytest.raises(AssertionError, match=r"the door did not hold within 0.05 s; .*\[\]"):
        eventually(list, within=0.05, what="the door")

    def refuse() -> bool:
        raise AssertionError("numbers differ")

    with pytest.raises(AssertionError, match="numbers differ"):
        eventually(refuse, within=0.05)
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0, within=60)


async def test_eventually_leaves_the_loop_running() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, event.set)
    await eventually_async(event.is_set)


class EchoServer:
    """Sends back what it gets, on any number of connections."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        try:
            with connection:
                while data := connection.recv(65536):
                    connection.sendall(data)
        except OSError:
            return


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    server = EchoServer()
    with TcpProxy(server.address) as proxy:
        yield proxy
    server.listener.close()


def connect(proxy: TcpProxy) -> socket.socket:
    host, port = proxy.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def echo(connection: socket.socket, data: bytes = b"hello") -> bytes:
    connection.sendall(data)
    return connection.recv(65536)


def test_proxy_carries_bytes_and_ends_both_ways(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        assert echo(connection) == b"hello"
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    eventually(lambda: proxy.connections == 0)
    assert proxy.accepted == 1


def test_proxy_carries_much_in_order(proxy: TcpProxy) -> None:
    data = bytes(range(256)) * 8192
    proxy.delay = 0.01
    with connect(proxy) as connection:
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        received = bytearray()
        while len(received) < len(data):
            received += connection.recv(65536)
    assert received == data


def test_proxy_cuts_connections_and_takes_new_ones(proxy: TcpProxy) -> None:
    with connect(proxy) as old, connect(proxy) as other:
        assert echo(old) == echo(other) == b"hello"
        assert proxy.cut() == 2
        for connection in (old, other):
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                echo(connection)
    with connect(proxy) as new:
        assert echo(new) == b"hello"


def test_proxy_refuses_connections_until_told_otherwise(proxy: TcpProxy) -> None:
    url = proxy.url
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.accept()
    assert proxy.url == url
    with connect(proxy) as connection:
        assert echo(connection) == b"hello"


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("silent", [False, True])
def test_connection_that_comes_while_the_proxy_ends_is_closed(
    proxy: TcpProxy, turns: int, silent: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """Whatever of it the loop has seen to by then, ``turns`` rounds after it was made."""

    async def connect_and_refuse() -> socket.socket:
        connection = connect(proxy)  # the kernel makes it; the proxy hears of it afterwards
        for _ in range(turns):
            await asyncio.sleep(0)
        await proxy.refuse_async()
        return connection

    if silent:
        proxy.go_silent(new_connections=True)
    made = io.submit(connect_and_refuse()).result(60)
    with made, contextlib.suppress(ConnectionError):
        assert made.recv(1) == b"", "nobody is there any more"
    proxy.close()
    assert proxy.connections == 0
    gc.collect()
    assert [str(one.message) for one in recwarn if one.category is ResourceWarning] == []


def test_silent_connection_stays_open_and_carries_nothing(proxy: TcpProxy) -> None:
    with connect(proxy) as silent:
        assert echo(silent) == b"hello"
        assert proxy.go_silent() == 1
        silent.settimeout(0.3)
        with pytest.raises(TimeoutError):
            echo(silent)
        with connect(proxy) as new:
            assert echo(new) == b"hello"
        proxy.go_silent(new_connections=True)
        with connect(proxy) as swallowed:
            swallowed.settimeout(0.3)
            with pytest.raises(TimeoutError):
                echo(swallowed)
        proxy.heal()
        with connect(proxy) as healed:
            assert echo(healed) == b"hello"


def test_delay_holds_bytes_back_each_way(proxy: TcpProxy) -> None:
    proxy.delay = 0.2
    with connect(proxy) as connection:
        started = time.monotonic()
        assert echo(connection) == b"hello"
        assert time.monotonic() - started >= 0.4


async def test_proxy_is_an_asynchronous_context_manager_too() -> None:
    server = EchoServer()
    async with TcpProxy(server.address) as proxy:
        with await asyncio.to_thread(connect, proxy) as connection:
            assert await asyncio.to_thread(echo, connection) == b"hello"
    server.listener.close()


def test_connection_to_a_server_that_is_gone_is_reset() -> None:
    with (
        TcpProxy("127.0.0.1:1") as proxy,
        pytest.raises((ConnectionResetError, BrokenPipeError)),
        connect(proxy) as connection,
    ):
        echo(connection)


def test_proxy_has_a_url_once_it_listens() -> None:
    with pytest.raises(StrataError, match=r"call accept\(\) first"):
        _ = TcpProxy("127.0.0.1:1").url
