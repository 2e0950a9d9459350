"""A coordinator that cannot start leaves nothing behind."""

import socket
from pathlib import Path

import pytest

from dtruntime.config import CoordinatorConfig
from dtruntime.coordinator.server import CoordinatorServer
from dtruntime.coordinator.service import CoordinatorService
from dtruntime.coordinator.store import SqliteStore
from dtruntime.coordinator.transport import Choice, native_is_installed, open_transport

TRANSPORTS = ["grpc.aio", *(["pygrpc-native"] if native_is_installed() else [])]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def assert_is_free(port: int) -> None:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))


@pytest.mark.parametrize("choice", TRANSPORTS)
async def test_transport_that_was_not_started_lets_go_of_its_port(
    choice: Choice, tmp_path: Path
) -> None:
    store = SqliteStore(str(tmp_path))
    service = CoordinatorService(store, CoordinatorConfig(data_dir=str(tmp_path)))
    transport = open_transport(service, "127.0.0.1:0", choice, str(tmp_path))
    await transport.stop(0.0)
    assert_is_free(transport.port)
    await store.close()


@pytest.mark.skipif(not native_is_installed(), reason="only its start can fail")
async def test_start_that_fails_leaves_port_and_data_directory_free(tmp_path: Path) -> None:
    config = CoordinatorConfig(
        address=f"127.0.0.1:{free_port()}",
        http_address="",
        data_dir=str(tmp_path),
        transport="pygrpc-native",
    )
    in_the_way = tmp_path / "side.sock"
    in_the_way.mkdir()
    server = CoordinatorServer(config)
    with pytest.raises(RuntimeError, match=r"side\.sock") as failure:
        await server.start()
    in_the_way.rmdir()

    async with CoordinatorServer(config) as other:
        assert other.address == config.address
    assert failure.traceback  # what its frames refer to has not been collected meanwhile
