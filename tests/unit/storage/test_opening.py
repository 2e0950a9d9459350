"""From paths and URLs to backends."""

import subprocess
import sys
from pathlib import Path

import pytest

from dtruntime.config import StorageConfig
from dtruntime.errors import ConfigError
from dtruntime.storage import (
    AzureBackend,
    GcsBackend,
    LocalBackend,
    MemoryBackend,
    S3Backend,
    StorageBackend,
    open_backend,
    resolve_url,
)
from dtruntime.storage.backend import message_of
from dtruntime.storage.urls import backend_options, with_region


@pytest.fixture(autouse=True)
def _accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


@pytest.mark.parametrize(
    ("place", "kind", "backend", "url"),
    [
        ("/some/folder", "local", LocalBackend, "file:///some/folder"),
        ("/odd name/%41", "local", LocalBackend, "file:///odd%20name/%2541"),
        ("file:///some/folder", "local", LocalBackend, "file:///some/folder"),
        ("FILE:///with%20space", "local", LocalBackend, "file:///with%20space"),
        ("memory://mine", "memory", MemoryBackend, "memory://mine"),
        ("s3://bucket", "s3", S3Backend, "s3://bucket"),
        ("S3://bucket/a/b/", "s3", S3Backend, "s3://bucket/a/b"),
        ("gs://bucket/a", "gcs", GcsBackend, "gs://bucket/a"),
        ("az://container/a", "azure", AzureBackend, "az://container/a"),
    ],
)
def test_place_is_opened_and_its_url_opens_it_again(
    place: str, kind: str, backend: type[StorageBackend], url: str
) -> None:
    opened = open_backend(place)
    assert (type(opened), opened.kind, opened.url) == (backend, kind, url)
    assert open_backend(opened.url).url == url
    assert opened.location("x/y").endswith("/x/y")


def test_relative_paths_and_the_home_folder_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_backend("checkpoints").location("x") == str(tmp_path / "checkpoints/x")
    assert open_backend(Path("checkpoints")).location() == str(tmp_path / "checkpoints")
    assert open_backend("~/c").location() == str(tmp_path / "home/c")


def test_opening_touches_nothing(tmp_path: Path) -> None:
    with open_backend(tmp_path / "new") as backend:
        assert list(backend.list()) == []
        assert not backend.exists("file")
    assert not (tmp_path / "new").exists()


def test_memory_is_shared_by_name() -> None:
    open_backend("memory://one").write("file", b"x")
    assert open_backend("memory://one").read("file") == b"x"
    assert list(open_backend("memory://two").list()) == []


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("", "empty"),
        ("ftp://host/path", "unknown scheme 'ftp'"),
        ("s3://", "names no bucket"),
        ("s3://key:secret@bucket/path", "carries credentials"),
        ("gs://bucket/a/../b", "'..' are not allowed"),
        ("file://other-host/path", "another machine"),
        ("s3//bucket/path", "'s3//' looks like a URL"),
        ("s3:/bucket/path", "'s3:/' looks like a URL"),
        ("S3:bucket", "'S3:' looks like a URL"),
        ("file:/folder", "'file:/' looks like a URL"),
    ],
)
def test_place_that_cannot_be_is_a_configuration_error(place: str, complaint: str) -> None:
    for check in (open_backend, backend_options):
        with pytest.raises(ConfigError, match=complaint) as caught:
            check(place)
        assert "key:secret" not in str(caught.value)


@pytest.mark.parametrize(
    "place",
    [
        "s3://key:SECRET@bucket/path",
        "s3://bucket/path?X-Amz-Algorithm=AWS4&X-Amz-Signature=SECRET",
        "gs://bucket/path?GoogleAccessId=a&Signature=SECRET",
        "az://container/path?sv=2024&sig=SECRET",
        "https://user:SECRET@host/path",
        "https://user:SECRET/with@signs@host/path",
        "https://host/path?token=SECRET#SECRET",
        "file://user:SECRET@host/path",
        "s3:/key:SECRET@bucket/path",
    ],
)
def test_credentials_in_a_place_are_refused_and_never_repeated(place: str) -> None:
    other = "s3" if place.startswith("gs") else "gcs"
    for refuse in (open_backend, backend_options, lambda text: resolve_url(text, other)):
        with pytest.raises(ConfigError) as caught:
            refuse(place)
        assert "SECRET" not in str(caught.value)


def test_what_a_store_says_is_repeated_without_users_and_queries() -> None:
    said = "error for url (https://user:SECRET@host/c?comp=list&sig=SECRET), see http://a.b/c?d=SECRET."
    assert message_of(Exception(said)) == "error for url (https://host/c), see http://a.b/c"


def test_folder_may_be_called_like_a_scheme(tmp_path: Path) -> None:
    for name in ("s3", "s3/run", "./s3:/run", "gs-run", "files/x"):
        assert open_backend(name).kind == "local"
    assert resolve_url("./s3://bucket".replace("://", ":/"), "local") == "./s3:/bucket"


def test_options_of_a_place_are_those_of_its_backend() -> None:
    assert backend_options("folder") == {"direct"}
    assert backend_options("memory://x") == set()
    assert {"region", "path_style", "endpoint", "config"} <= backend_options("s3://bucket/x")
    assert {"account", "endpoint"} <= backend_options("az://box")
    for url in ("s3://bucket/x", "gs://bucket", "az://box/x"):
        assert not {"bucket", "container", "prefix", "tuning"} & backend_options(url)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="prefix='a/b'"):
        S3Backend("bucket", "a/b")
    with pytest.raises(ValueError, match="at least 5 MiB"):
        S3Backend("bucket", part_bytes=1024)
    with pytest.raises(ValueError, match="parallel_parts"):
        S3Backend("bucket", parallel_parts=0)


def test_credentials_given_as_options_are_not_shown() -> None:
    backend = S3Backend(
        "bucket", config={"access_key_id": "id", "secret_access_key": "nobody-may-see"}
    )
    assert "nobody-may-see" not in f"{backend!r} {backend.url} {vars(backend)['_place']}"


CONFIG = StorageConfig(backend="s3", bucket="configured")


@pytest.mark.parametrize(
    ("path", "backend", "config", "url"),
    [
        ("/folder", "local", CONFIG, "/folder"),
        ("/folder", None, StorageConfig(), "/folder"),
        ("/runs/a", None, CONFIG, "s3://configured/runs/a"),
        ("./runs/a/", "s3", CONFIG, "s3://configured/runs/a"),
        (".", "gcs", CONFIG, "gs://configured/"),
        ("a", "azure", StorageConfig(bucket="az://box/deep/"), "az://box/deep/a"),
        ("s3://other/a", "local", CONFIG, "s3://other/a"),
        ("s3://other/a", "s3", CONFIG, "s3://other/a"),
        ("file:///a", None, CONFIG, "file:///a"),
    ],
)
def test_path_and_backend_together_mean_a_place(
    path: str, backend: str | None, config: StorageConfig, url: str
) -> None:
    assert resolve_url(path, backend, config) == url


def test_configured_region_is_for_buckets_in_s3_that_are_given_none() -> None:
    config = StorageConfig(region="eu-central-1")
    assert with_region("s3://b/a", {}, config) == {"region": "eu-central-1"}
    assert with_region("s3://b/a", {"region": "eu-west-1"}, config) == {"region": "eu-west-1"}
    assert with_region("s3://b/a", {}, StorageConfig()) == {}
    assert with_region("gs://b/a", {}, config) == {}
    assert with_region("/folder", {}, config) == {}


@pytest.mark.parametrize(
    ("path", "backend", "complaint"),
    [
        ("a", "s3", "CHECKPOINT_BUCKET"),
        ("s3://b/a", "gcs", "gs:// URL"),
        ("a", "ftp", "backend must be local, s3, gcs, azure"),
    ],
)
def test_path_and_backend_that_do_not_fit_are_refused(
    path: str, backend: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve_url(path, backend, StorageConfig())


def test_local_storage_needs_no_obstore(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["obstore"] = None
from dtruntime.storage import LocalBackend, S3Backend, open_backend
open_backend(sys.argv[1]).write("file", b"x")
try:
    S3Backend("bucket")
except ValueError as exc:
    print(exc)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "s3://bucket needs the package obstore: pip install obstore\n"
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://container/run"])
def test_manager_without_obstore_fails_when_it_is_made(url: str) -> None:
    code = """
import sys
sys.modules["obstore"] = None
from dtruntime import CheckpointManager
try:
    CheckpointManager(sys.argv[1])
except ValueError as exc:
    print(exc)
"""
    command = [sys.executable, "-c", code, url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == f"{url} needs the package obstore: pip install obstore\n"


def test_reading_data_without_pyarrow_names_the_command() -> None:
    code = """
import sys
sys.modules["pyarrow"] = None
try:
    from dtruntime.data import Loader
except ModuleNotFoundError as exc:
    print(exc)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == (
        "reading data needs pyarrow, which is not installed: pip install pyarrow\n"
    )


def test_gcs_names_credentials_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "missing.json"))
    with pytest.raises(OSError, match=r"cannot open gs://bucket.*missing\.json"):
        GcsBackend("bucket").exists("x")
