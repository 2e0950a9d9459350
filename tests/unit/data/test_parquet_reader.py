"""Parquet files: any rows from any row groups, and what is wrong with a file."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.data import DatasetRows, build_index
from dtruntime.errors import ShardError


def index_of(path: Path | str) -> DatasetRows:
    return DatasetRows(build_index(path, "parquet", use_cache=False, workers=2))


SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "text": pa.string(),
        "list": pa.list_(pa.int64()),
        "inner": pa.struct({"x": pa.int64(), "y.z": pa.string()}),
        "kind": pa.dictionary(pa.int32(), pa.string()),
    }
)


def table_of(rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    columns: dict[str, list[Any]] = {
        "id": list(numbers),
        "text": [f"row {i}" if i % 7 else None for i in numbers],
        "list": [[i, i + 1] * (i % 3) for i in numbers],
        "inner": [{"x": i, "y.z": str(i)} for i in numbers],
        "kind": [f"k{i % 3}" for i in numbers],
    }
    return pa.table(columns, schema=SCHEMA)


@settings(max_examples=40, deadline=None)
@given(
    st.data(), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), min_size=1, max_size=4)
)
def test_any_partition_gives_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, files: list[tuple[int, int]]
) -> None:
    total = sum(length for length, _ in files)
    if not total:
        return
    folder = tmp_path_factory.mktemp("parquet")
    written = 0
    for number, (length, group) in enumerate(files):
        pq.write_table(
            table_of(length, written), folder / f"{number}.parquet", row_group_size=group
        )
        written += length
    rows = index_of(folder)
    columns = data.draw(
        st.lists(st.sampled_from(table_of(0).column_names), min_size=1, unique=True)
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=6)))
    bounds = [0, *cuts, total]
    parts = [rows.read(a, b, columns) for a, b in itertools.pairwise(bounds)]
    assert pa.concat_tables(parts).to_pylist() == table_of(total).select(columns).to_pylist()


def test_index_follows_row_groups(tmp_path: Path) -> None:
    pq.write_table(table_of(95), tmp_path / "a.parquet", row_group_size=30)
    file = index_of(tmp_path / "a.parquet").index.files[0]
    blocks = file.blocks
    assert blocks.bounds.tolist() == [0, 30, 60, 90, 95]
    assert blocks.counts.tolist() == [30, 30, 30, 5]
    ends = (blocks.offsets + blocks.lengths).tolist()
    assert (blocks.lengths > 0).all()
    assert ends == sorted(ends)
    assert ends[-1] <= file.stat.size


def test_column_without_values_in_one_file_takes_the_type_of_the_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": pa.nulls(1)}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": ["x"], "a": [2]}), tmp_path / "2.parquet")
    rows = index_of(tmp_path)
    assert rows.read(0, 2).to_pydict() == {"a": [1, 2], "b": [None, "x"]}
    assert rows.index.schema.field("b").type == pa.string()


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        ({"a": [1.5], "b": ["x"]}, "'a' is int64 in the first, double in the second"),
        ({"a": [1]}, "only the first has 'b'"),
        ({"a": [1], "b": ["x"], "c": [1]}, "only the second has 'c'"),
    ],
    ids=["type", "fewer", "more"],
)
def test_mixed_columns_name_both_files_and_the_difference(
    tmp_path: Path, second: dict[str, Any], difference: str
) -> None:
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table(second), tmp_path / "2.parquet")
    message = f"1.parquet and .*2.parquet do not have the same columns: {difference}"
    with pytest.raises(ShardError, match=message):
        index_of(tmp_path)


def test_cut_off_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.parquet"
    pq.write_table(table_of(100), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ShardError, match=r"cut\.parquet is corrupt .*cut off while being written"):
        index_of(path)


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"", b"PAR1"], ids=["csv", "empty", "magic"])
def test_file_of_another_format_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.parquet"
    path.write_bytes(content)
    expected = "looks like csv: .*format='csv'" if b"a" in content else "corrupt|not a parquet file"
    with pytest.raises(ShardError, match=rf"other\.parquet is .*({expected})"):
        index_of(path)


def test_corrupt_row_group_is_named_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "rot.parquet"
    pq.write_table(table_of(100), path, row_group_size=25, compression="zstd")
    rows = index_of(path)
    offset = rows.index.files[0].blocks.offsets[2]
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[offset : offset + 30] = bytes(30)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert rows.read(0, 50).num_rows == 50
    with pytest.raises(
        ShardError, match=r"rot\.parquet: rows 50 to 75 \(row groups 2 to 2.*corrupt"
    ):
        rows.read(60, 61)


def test_unknown_column_is_named_with_a_near_one(tmp_path: Path) -> None:
    pq.write_table(table_of(5), tmp_path / "a.parquet")
    rows = index_of(tmp_path)
    with pytest.raises(ShardError, match="no column 'txt': did you mean 'text'"):
        rows.read(0, 1, ["txt"])
    with pytest.raises(ValueError, match="at least one name"):
        rows.read(0, 1, [])
    with pytest.raises(ValueError, match="samples 3 to 9 are outside a dataset of 5"):
        rows.read(3, 9)


def test_two_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ShardError, match=r"twice\.parquet has two columns named 'a'"):
        index_of(tmp_path)
