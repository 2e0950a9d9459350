"""Datasets on a real S3 server, registered by those who can see it and by those who cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import obstore
import pytest
from obstore.store import S3Store

from dtruntime import DatasetRegistry, ShardError, StorageError
from dtruntime.errors import ShardNotFoundError
from dtruntime.storage import expand
from dtruntime.storage import object_client as client
from dtruntime.storage.data_files import look
from dtruntime.testing import LocalCoordinator

pytestmark = pytest.mark.usefixtures("s3")


@pytest.fixture
def registry(coordinator: LocalCoordinator, job: str) -> Iterator[DatasetRegistry]:
    with DatasetRegistry(coordinator.url, job=job, patience=20) as registry:
        yield registry


@pytest.fixture
def place(s3: S3Store, job: str) -> str:
    """Two objects with five samples."""
    put(s3, f"{job}/a.csv", "n\n0\n1\n2\n")
    put(s3, f"{job}/b.csv", "n\n3\n4\n")
    return f"s3://data/{job}"


def put(store: S3Store, key: str, text: str) -> None:
    obstore.put(store, key, text.encode())


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")


def test_objects_are_indexed_and_shards_name_them(registry: DatasetRegistry, place: str) -> None:
    registry.register("numbers", f"{place}/", "csv", shard_size=4, exact=True)
    first, second = registry.get_shards("numbers", 0)
    assert first.file_paths == [f"{place}/a.csv", f"{place}/b.csv"]
    assert first.row_ranges == [(0, 3), (0, 1)]
    assert (second.file_paths, second.row_ranges) == ([f"{place}/b.csv"], [(1, 2)])
    assert registry.describe("numbers").path == place
    assert registry.index_of("numbers").total_samples == 5


def test_replaced_object_is_named(registry: DatasetRegistry, place: str, s3: S3Store) -> None:
    registry.register("numbers", place, "csv")
    put(s3, f"{place.removeprefix('s3://data/')}/b.csv", "n\n3\n9\n")
    with pytest.raises(ShardError, match=rf"1 changed \({place}/b\.csv\)"):
        registry.register("numbers", place, "csv")


def test_only_rank_0_looks_at_a_registered_dataset_again(
    coordinator: LocalCoordinator,
    job: str,
    place: str,
    s3: S3Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def register_as(rank: str) -> None:
        monkeypatch.setenv("RANK", rank)
        with DatasetRegistry(coordinator.url, job=job) as registry:
            registry.register("numbers", place, "csv")

    register_as("0")
    put(s3, f"{job}/b.csv", "n\n3\n9\n")
    register_as("1")
    with pytest.raises(ShardError, match="1 changed"):
        register_as("0")


@pytest.mark.usefixtures("nobody_answers")
def test_unreachable_store_is_accepted_with_a_count(registry: DatasetRegistry) -> None:
    registry.register("numbers", "s3://data/far", "csv", 100, 50)
    assert registry.get_shard("numbers", 0, 0) == [
        "s3://data/far/shard_0.csv",
        "s3://data/far/shard_1.csv",
    ]


def test_store_that_says_nothing_does_not_hold_up_a_registration_with_a_count(
    registry: DatasetRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "IMPATIENT_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        registry.register("numbers", "s3://data/silent", "csv", 100)
    assert registry.describe("numbers").fingerprint == ""


def test_forbidden_bucket_needs_a_count(
    registry: DatasetRegistry, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(StorageError, match=place) as caught:
        registry.register("numbers", place, "csv")
    assert "another-secret" not in str(caught.value)
    registry.register("numbers", place, "csv", 5)
    assert registry.describe("numbers").fingerprint == ""


def test_nothing_there_needs_a_count(registry: DatasetRegistry, place: str) -> None:
    with pytest.raises(ShardNotFoundError, match=f"{place}-not"):
        registry.register("numbers", f"{place}-not", "csv")
    registry.register("numbers", f"{place}-not", "csv", 5)
    assert registry.describe("numbers").total_samples == 5


def test_credentials_in_the_path_are_refused(registry: DatasetRegistry) -> None:
    with pytest.raises(ShardError, match="carries credentials") as caught:
        registry.register("numbers", "s3://key:sesame@data/x", "csv", 5)
    assert "sesame" not in str(caught.value)


def test_count_that_contradicts_the_objects_is_refused(
    registry: DatasetRegistry, place: str
) -> None:
    with pytest.raises(ShardError, match=r"total_samples is 7, but .* have 5 samples"):
        registry.register("numbers", place, "csv", 7)


def test_look_finds_what_expand_finds(place: str) -> None:
    for path in (place, f"{place}/a.csv", f"{place}/*.csv", f"{place}/b*"):
        assert look(path) in expand(path)
    for nothing in (f"{place}/c", f"{place}/*.parquet", f"{place}-not"):
        with pytest.raises(ShardNotFoundError):
            look(nothing)
