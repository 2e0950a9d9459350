"""A real S3 server on this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.store import S3Store

BUCKET = "checkpoints"
READY_SECONDS = 90
_SECRET = "only-for-this-run"
_PARTS = ("master", "volume", "filer", "s3")


@contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """SeaweedFS, with its data in a folder; the environment that leads to it."""
    folder.mkdir(parents=True)
    ports = _free_ports([f"{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")])
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}",
        "AWS_ACCESS_KEY_ID": "strata",
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(_command(folder, ports), stdout=log, stderr=log)
    try:
        _wait_until_ready(environment, process, folder / "weed.log")
        yield environment
    finally:
        process.kill()
        process.wait()


def _command(folder: Path, ports: dict[str, int]) -> list[str]:
    identity = {
        "name": "benchmark",
        "credentials": [{"accessKey": "strata", "secretKey": _SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    return [
        *(str(Path(sys.executable).parent / "weed"), "server", "-filer", "-s3"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-dir={folder}", f"-s3.config={folder / 's3.json'}"),
        *("-master.volumeSizeLimitMB=1024", "-volume.max=1000"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]


def _wait_until_ready(
    environment: dict[str, str], process: subprocess.Popen[bytes], log: Path
) -> None:
    store = S3Store(
        BUCKET,
        endpoint=environment["AWS_ENDPOINT_URL"],
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=_SECRET,
        region=environment["AWS_REGION"],
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            obstore.put(store, "probe", b"x")
            return
        except Exception as exc:
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                raise RuntimeError(f"the S3 server does not start: {last}") from exc
            time.sleep(0.2)


def _free_ports(names: list[str]) -> dict[str, int]:
    sockets = [socket.socket() for _ in names]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    for one in sockets:
        one.close()
    return ports
