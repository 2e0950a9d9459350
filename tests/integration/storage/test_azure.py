"""A real Azure blob server keeps every promise of a storage backend."""

import base64
import itertools
import traceback

import pytest

from dtruntime.errors import StorageNotFoundError, StoragePermissionError
from dtruntime.storage import AzureBackend, open_backend
from dtruntime.testing import StorageConformance
from tests.support.servers.azure_server import azure_server

__all__ = ["azure_server"]

pytestmark = pytest.mark.long

_places = itertools.count()


@pytest.fixture
def azure(azure_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in azure_server.items():
        monkeypatch.setenv(name, value)


class TestAzure(StorageConformance):
    @pytest.fixture
    def backend(self, azure: None) -> AzureBackend:
        return AzureBackend("box", prefix=f"storage/{next(_places)}", part_bytes=5 * 2**20)


def test_wrong_key_is_refused_and_never_shown(azure: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = base64.b64encode(b"wrong and still secret").decode()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    backend = open_backend("az://box/storage")
    for operation in (
        lambda: backend.write("file", b"x"),
        lambda: backend.create("file", b"x"),
        lambda: backend.read("file"),
        lambda: list(backend.list()),
        lambda: backend.delete("file"),
    ):
        with pytest.raises(StoragePermissionError, match="az://box/storage") as caught:
            operation()
        assert wrong not in "".join(traceback.format_exception(caught.value))


def test_container_that_is_missing_is_not_an_empty_one(azure: None) -> None:
    with pytest.raises(StorageNotFoundError, match="az://no-such-box"):
        list(open_backend("az://no-such-box").list())
