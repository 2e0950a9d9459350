"""Indexes: reuse, changes, storage, errors."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtruntime.data import CsvOptions, DatasetRows, IndexProgress, build_index, changes_since
from dtruntime.data.index import index_from_json, index_to_json
from dtruntime.data.index.build import cache_file, cache_folder
from dtruntime.errors import ShardError, ShardNotFoundError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (1, 2, 10):
        (tmp_path / f"part-{number}.csv").write_text(f"a,b\n{number},x\n{number},y\n")
    return tmp_path


def spoil(path: Path) -> None:
    """Make a file unreadable as CSV without a change that can be seen from outside."""
    stat = path.stat()
    path.write_bytes(b"\0" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_files_are_numbered_in_natural_order(folder: Path) -> None:
    index = build_index(folder, "csv")
    assert [Path(file.url).name for file in index.files] == [
        "part-1.csv",
        "part-2.csv",
        "part-10.csv",
    ]
    assert index.total_samples == 6
    assert index.total_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert DatasetRows(index).read(0, 6)["a"].to_pylist() == [1, 1, 2, 2, 10, 10]


def test_unchanged_files_are_not_read_again(folder: Path) -> None:
    first = build_index(folder, "csv")
    for path in folder.iterdir():
        spoil(path)
    again = build_index(folder, "csv")
    assert again.fingerprint == first.fingerprint
    assert not changes_since(first, again)
    with pytest.raises(ShardError, match="not a csv file"):
        build_index(folder, "csv", use_cache=False)


def test_only_changed_files_are_read_again_and_changes_are_named(folder: Path) -> None:
    old = build_index(folder, "csv")
    spoil(folder / "part-1.csv")
    (folder / "part-2.csv").write_text("a,b\n7,changed\n")
    (folder / "part-10.csv").unlink()
    (folder / "part-11.csv").write_text("a,b\n11,added\n")
    seen: list[IndexProgress] = []
    new = build_index(folder, "csv", progress=seen.append)
    assert seen[-1].files_total == 2
    assert new.total_samples == 4
    assert new.fingerprint != old.fingerprint
    changes = changes_since(old, new)
    assert changes.changed == (str(folder / "part-2.csv"),)
    assert changes.added == (str(folder / "part-11.csv"),)
    assert changes.removed == (str(folder / "part-10.csv"),)
    assert "1 changed" in str(changes)
    assert "part-2.csv" in str(changes)


def test_reading_a_file_that_changed_since_indexing_is_an_error(folder: Path) -> None:
    rows = DatasetRows(build_index(folder, "csv"))
    (folder / "part-2.csv").write_text("a,b\n8,x\n8,y\n9,z\n")
    assert rows.read(0, 2).num_rows == 2
    with pytest.raises(ShardError, match=r"part-2\.csv has changed since it was indexed"):
        rows.read(0, 6)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff" * 100])
def test_unreadable_cache_is_rebuilt(folder: Path, content: bytes) -> None:
    index = build_index(folder, "csv")
    kept = cache_file(str(folder), CsvOptions())
    assert kept.exists()
    kept.write_bytes(content)
    assert build_index(folder, "csv").fingerprint == index.fingerprint
    assert index_from_json(kept.read_bytes()).fingerprint == index.fingerprint


def test_cache_of_another_version_is_rebuilt(folder: Path) -> None:
    build_index(folder, "csv")
    kept = cache_file(str(folder), CsvOptions())
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "version": 0}))
    assert build_index(folder, "csv").total_samples == 6
    assert json.loads(kept.read_text())["version"] > 0


def test_unwritable_cache_does_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", "/proc/nothing")
    assert build_index(folder, "csv").total_samples == 6


def test_options_have_indexes_of_their_own(folder: Path) -> None:
    typed = CsvOptions(types={"a": "float64"})
    assert build_index(folder, "csv").columns[0].type == "int64"
    assert build_index(folder, "csv", options=typed).columns[0].type == "double"
    assert build_index(folder, "csv").columns[0].type == "int64"
    assert len(list(cache_folder().iterdir())) == 2


def test_fingerprint_does_not_depend_on_where_the_data_is_mounted(folder: Path) -> None:
    here = build_index(folder, "csv")
    there = Path(tempfile.mkdtemp(dir=folder.parent)) / "elsewhere"
    folder.rename(there)
    assert build_index(there, "csv").fingerprint == here.fingerprint


def test_stored_form_keeps_everything_and_is_compact(tmp_path: Path) -> None:
    table = pa.table({"a": range(10_000), "b": [["x"]] * 10_000})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    (tmp_path / "sub").mkdir()
    pq.write_table(table, tmp_path / "sub" / "b.parquet", row_group_size=100)
    index = build_index(tmp_path, "parquet")
    data = index_to_json(index)
    again = index_from_json(data)
    assert (again.path, again.options, again.fingerprint) == (
        index.path,
        index.options,
        index.fingerprint,
    )
    assert again.schema == index.schema
    assert [file.stat for file in again.files] == [file.stat for file in index.files]
    for one, other in zip(again.files, index.files, strict=True):
        for array in ("counts", "offsets", "lengths"):
            assert np.array_equal(getattr(one.blocks, array), getattr(other.blocks, array))
    assert len(data) < 12 * sum(len(file.blocks) for file in index.files)


def test_rows_can_be_sent_to_another_process(folder: Path) -> None:
    rows = pickle.loads(pickle.dumps(DatasetRows(build_index(folder, "csv"))))
    assert rows.read(2, 4)["a"].to_pylist() == [2, 2]


def test_progress_reaches_the_total(folder: Path) -> None:
    seen: list[IndexProgress] = []
    index = build_index(folder, "csv", progress=seen.append)
    assert seen[-1] == IndexProgress(3, 3, index.total_bytes, index.total_bytes)


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_interrupted_indexing_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    content = b"a\n" + b"12345\n" * 4_000_000
    compressed = gzip.compress(content, 1) if ending == "csv.gz" else content
    (tmp_path / f"large.{ending}").write_bytes(compressed)
    monkeypatch.setattr("dtruntime.data.index.build.PROGRESS_SECONDS", 0.001)
    seen: list[IndexProgress] = []

    def interrupt(progress: IndexProgress) -> None:
        seen.append(progress)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path, "csv", progress=interrupt)
    assert len(seen) == 1
    assert seen[0].files_done == 0


def test_missing_path_says_what_is_nearby(folder: Path) -> None:
    with pytest.raises(
        ShardNotFoundError, match=r"no file or folder .*prt-1\.csv.* has part-1\.csv"
    ):
        build_index(folder / "prt-1.csv", "csv")


def test_folder_with_other_files_only_names_some(folder: Path) -> None:
    with pytest.raises(
        ShardNotFoundError, match=r"no file that ends in \.parquet.* 3 others .*part-1\.csv"
    ):
        build_index(folder, "parquet")


def test_unknown_format_and_foreign_options_are_refused(folder: Path) -> None:
    with pytest.raises(ShardError, match="format 'json' is unknown: use parquet, csv, tfrecord"):
        build_index(folder, "json")
    with pytest.raises(ValueError, match="CsvOptions are not the options of format 'parquet'"):
        build_index(folder, "parquet", options=CsvOptions())
    with pytest.raises(ValueError, match="workers must be at least 1"):
        build_index(folder, "csv", workers=0)


@pytest.fixture
def another_user() -> Iterator[None]:
    """Root may read everything: be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_unreadable_file_is_named(request: pytest.FixtureRequest) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "secret.csv").write_text("a\n1\n")
        (folder / "secret.csv").chmod(0)
        request.getfixturevalue("another_user")
        with pytest.raises(ShardError, match=r"cannot read .*secret\.csv: .*no permission"):
            build_index(folder, "csv", use_cache=False)
        if os.getuid() == 0:
            os.seteuid(0)
