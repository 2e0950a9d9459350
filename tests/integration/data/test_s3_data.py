"""Real data on disk and on a real S3 server: the same samples from both."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

from dtruntime.data import DatasetRows, build_index, shards
from dtruntime.errors import ShardError, ShardNotFoundError, StorageError
from dtruntime.storage import DiskCache, data_files, download, expand, read_range
from tests.support.data.real_data import DIGITS, FLIGHTS
from tests.support.servers.s3_server import upload


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all ranges that are fetched from the store."""
    sizes: list[int] = []
    fetch = data_files._fetch

    def spy(file: data_files.FileStat, offset: int, length: int) -> bytes:
        sizes.append(length)
        return fetch(file, offset, length)

    monkeypatch.setattr(data_files, "_fetch", spy)
    return sizes


def pieces_of(rows: DatasetRows, columns: list[str] | None = None) -> pa.Table:
    """Everything, shard by shard."""
    cut = shards(rows.index, 23_456)
    return pa.concat_tables(rows.read_shard(shard, columns) for shard in cut)


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_flights_are_the_same_from_disk_and_from_s3(
    flights: dict[str, Path], s3: S3Store, kind: str
) -> None:
    format = kind.partition(".")[0]
    here = DatasetRows(build_index(flights[kind], format))
    there = DatasetRows(build_index(upload(s3, kind, flights[kind].parent), format))
    assert len(here) == len(there) == FLIGHTS
    assert here.index.schema == there.index.schema
    read = pq.read_table if kind == "parquet" else arrow_csv.read_csv
    plain = read(flights["parquet" if kind == "parquet" else "csv"])
    assert here.index.schema == plain.schema.remove_metadata()
    assert pieces_of(here) == plain
    assert there.read(100_000, 150_000) == plain.slice(100_000, 50_000)
    columns = ["dest", "distance"]
    assert pieces_of(there, columns) == plain.select(columns)


def test_digits_are_the_same_from_disk_and_from_s3(
    digits: tuple[Path, np.ndarray], s3: S3Store
) -> None:
    folder, array = digits
    for place in (str(folder), upload(s3, "digits", folder)):
        rows = DatasetRows(build_index(place, "tfrecord"))
        types = {column.name: column.type for column in rows.index.columns}
        assert types == {"image": "list<item: float>", "label": "int64", "pixels": "binary"}
        table = rows.read(0, DIGITS)
        assert len(rows) == DIGITS
        assert table["label"].to_pylist() == array[:, -1].astype(int).tolist()
        images = pc.list_flatten(table["image"]).to_numpy().reshape(-1, 64)
        assert (images == array[:, :-1]).all()
        pixels = np.frombuffer(b"".join(table["pixels"].to_pylist()), np.uint8).reshape(-1, 64)
        assert (pixels == array[:, :-1]).all()
        assert rows.read(499, 502)["label"].to_pylist() == array[499:502, -1].astype(int).tolist()


def test_parquet_fetches_only_footers_and_the_columns_asked_for(
    flights: dict[str, Path], s3: S3Store, fetched: list[int]
) -> None:
    place = upload(s3, "columns", flights["parquet"].parent)
    size = flights["parquet"].stat().st_size
    rows = DatasetRows(build_index(place, "parquet"))
    assert sum(fetched) <= min(size, 256 * 1024)
    fetched.clear()
    table = rows.read(60_000, 60_010, ["carrier"])
    assert table == pq.read_table(flights["parquet"], columns=["carrier"]).slice(60_000, 10)
    assert sum(fetched) < size / 20 + 256 * 1024
    fetched.clear()
    rows.read(60_010, 70_000, ["carrier"])
    assert not fetched, "the row group was kept"


def test_unchanged_objects_are_not_fetched_again(
    flights: dict[str, Path], s3: S3Store, fetched: list[int]
) -> None:
    place = upload(s3, "again", flights["csv.gz"].parent)
    first = build_index(place, "csv")
    assert sum(fetched) >= first.total_bytes
    fetched.clear()
    assert build_index(place, "csv").fingerprint == first.fingerprint
    assert not fetched


def test_object_replaced_after_indexing_is_noticed(s3: S3Store) -> None:
    obstore.put(s3, "replaced/a.csv", b"a\n1\n2\n")
    rows = DatasetRows(build_index("s3://data/replaced", "csv"))
    obstore.put(s3, "replaced/a.csv", b"a\n3\n4\n")
    with pytest.raises(ShardError, match=r"s3://data/replaced/a\.csv has changed since"):
        rows.read(0, 2)
    assert DatasetRows(build_index("s3://data/replaced", "csv")).read(0, 2)["a"].to_pylist() == [
        3,
        4,
    ]
    obstore.delete(s3, "replaced/a.csv")
    with pytest.raises(ShardNotFoundError, match=r"a\.csv: it does not exist"):
        rows.read(0, 2)


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "tfrecord", "tfrecord.gz"])
def test_second_read_of_cached_shards_makes_no_request(
    flights: dict[str, Path],
    digits: tuple[Path, np.ndarray],
    s3: S3Store,
    fetched: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    format = kind.partition(".")[0]
    folder = tmp_path / "objects"
    folder.mkdir()
    for path in digits[0].iterdir() if format == "tfrecord" else [flights[kind]]:
        data = path.read_bytes()
        (folder / path.name).write_bytes(gzip.compress(data) if kind == "tfrecord.gz" else data)
    index = build_index(upload(s3, f"cached-{kind}", folder), format)
    first = DatasetRows(index, DiskCache())
    table = pieces_of(first)
    assert table == pieces_of(DatasetRows(build_index(folder, format)))
    fetched.clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # where nobody answers
    again = pickle.loads(pickle.dumps(first))
    assert pieces_of(again) == table
    assert pieces_of(DatasetRows(index, DiskCache())) == table
    assert not fetched
    assert again.cache.usage().hits > 0
    assert again.cache.usage().misses == 0


def test_object_replaced_after_caching_is_read_anew_or_refused(s3: S3Store) -> None:
    def rows() -> DatasetRows:
        return DatasetRows(build_index("s3://data/cached-replaced", "csv"), DiskCache())

    obstore.put(s3, "cached-replaced/a.csv", b"a\n1\n2\n")
    old, unread = rows(), DatasetRows(rows().index, DiskCache("elsewhere", limit_bytes=0))
    assert old.read(0, 2)["a"].to_pylist() == [1, 2]
    obstore.put(s3, "cached-replaced/a.csv", b"a\n3\n4\n")
    assert rows().read(0, 2)["a"].to_pylist() == [3, 4]
    assert old.read(0, 2)["a"].to_pylist() == [1, 2], "the version that was indexed"
    with pytest.raises(ShardError, match=r"s3://data/cached-replaced/a\.csv has changed since"):
        unread.read(0, 2)


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_cache_smaller_than_a_shard_is_harmless(
    flights: dict[str, Path], s3: S3Store, tmp_path: Path, kind: str
) -> None:
    format = kind.partition(".")[0]
    index = build_index(upload(s3, f"small-cache-{kind}", flights[kind].parent), format)
    cache = DiskCache(tmp_path / "small", limit_bytes=100_000)
    table = pieces_of(DatasetRows(index, cache))
    assert table == pieces_of(DatasetRows(build_index(flights[kind], format)))
    assert cache.usage().bytes <= 100_000


NAMES = [
    "part-1.csv",
    "part-10.csv",
    "part-2.csv",
    "_SUCCESS",
    "b/part-1.csv",
    "b/_t/x.csv",
    "c.d/x y+ü#%.csv",
]


@pytest.mark.parametrize(
    "pattern", ["", "*.csv", "**/part-1.csv", "b", "c.*/*", "part-[12].csv", "part-1.csv"]
)
def test_names_mean_the_same_on_disk_and_on_s3(s3: S3Store, tmp_path: Path, pattern: str) -> None:
    for name in NAMES:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(name)
    place = upload(s3, "tree", tmp_path / "tree")
    here = expand(f"{tmp_path}/tree/{pattern}", (".csv",))
    there = expand(f"{place}/{pattern}", (".csv",))
    assert [file.url.removeprefix(f"{tmp_path}/tree/") for file in here] == [
        file.url.removeprefix(f"{place}/") for file in there
    ]
    assert [read_range(file, 0, file.size) for file in there] == [
        read_range(file, 0, file.size) for file in here
    ]


def test_large_object_is_fetched_in_parts(
    s3: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: list[int]
) -> None:
    monkeypatch.setattr(data_files, "PART", 100_000)
    content = os.urandom(1_234_567)
    obstore.put(s3, "large/x.bin", content)
    file = expand("s3://data/large/x.bin")[0]
    assert read_range(file, 11, 1_000_000) == content[11:1_000_011]
    assert len(fetched) == 10
    download(file, tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == content


def test_missing_objects_and_buckets_are_named(s3: S3Store) -> None:
    obstore.put(s3, "near/train.csv", b"a\n1\n")
    with pytest.raises(ShardNotFoundError, match=r"'s3://data/near/trian\.csv'; .* has train\.csv"):
        expand("s3://data/near/trian.csv")
    with pytest.raises(ShardNotFoundError, match=r"no file matches 's3://data/near/\*\.parquet'"):
        expand("s3://data/near/*.parquet")
    with pytest.raises((StorageError, ShardNotFoundError), match="s3://no-such-bucket"):
        expand("s3://no-such-bucket/x.csv")


def test_refused_access_keeps_the_stores_words_and_no_secret(
    s3: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore.put(s3, "refused/a.csv", b"a\n1\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-value")
    attempts: list[Callable[[], object]] = [
        lambda: expand("s3://data/refused"),
        lambda: expand("s3://data/refused/*.csv"),
    ]
    for attempt in attempts:
        with pytest.raises(StorageError, match="403 Forbidden") as caught:
            attempt()
        assert "another-secret-value" not in str(caught.value)
        assert caught.value.__cause__ is not None


def test_truncated_object_is_named(flights: dict[str, Path], s3: S3Store) -> None:
    obstore.put(s3, "cut/f.parquet", flights["parquet"].read_bytes()[:-1000])
    with pytest.raises(ShardError, match=r"s3://data/cut/f\.parquet is corrupt"):
        build_index("s3://data/cut", "parquet")
