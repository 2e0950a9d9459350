"""A real Azure blob server for tests, installed when it is first needed."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime.testing import eventually
from tests.support.servers.s3_server import TOOLS, free_ports, keep

ACCOUNT = "strata"
KEY = base64.b64encode(b"a key that nobody may see").decode()


def azurite() -> Path:
    """The program, kept beside the environment; skips if it cannot be had."""
    folder = TOOLS / "azurite"
    program = folder / "node_modules" / ".bin" / "azurite-blob"
    if program.exists():
        return program
    if shutil.which("npm") is None:
        pytest.skip("CANNOT INSTALL azurite, so AZURE IS NOT TESTED: there is no npm")
    partial = TOOLS / f".azurite-{os.getpid()}"
    partial.mkdir(parents=True)
    (partial / "package.json").write_text("{}")
    command = ["npm", "install", "--no-audit", "--no-fund", "azurite@3"]
    result = subprocess.run(command, cwd=partial, capture_output=True, text=True, timeout=110)
    if result.returncode:
        pytest.skip(f"CANNOT INSTALL azurite, so AZURE IS NOT TESTED: {result.stderr[-500:]}")
    keep(partial, folder)
    return program


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Azurite with the container ``box``; the environment that leads to it."""
    program = azurite()
    folder = tmp_path_factory.mktemp("azurite")
    (port,) = free_ports(1)
    command = [
        *(str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), "-l", str(folder)),
        *("--silent", "--skipApiVersionCheck", "--disableTelemetry"),
    ]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    with (folder / "azurite.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        eventually(lambda: make_container(url, "box"), within=60, what="the start of azurite")
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": url,
        }
    finally:
        server.kill()  # its data go with the test
        server.wait()


def make_container(url: str, name: str) -> bool:
    """Ask for a container, signed by hand; False when nobody answers yet."""
    headers = {
        "x-ms-date": email.utils.formatdate(usegmt=True),
        "x-ms-version": "2021-08-06",
    }
    canonical = "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + canonical + resource
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{url}/{name}?restype=container", method="PUT", headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 201)
    except ConnectionError:
        return False
    except urllib.error.URLError as exc:
        if isinstance(exc.reason, ConnectionError):
            return False
        raise
