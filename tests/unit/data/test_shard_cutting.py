"""Shards: complete, near the wanted size, and cut where reading is cheap."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.data import DatasetIndex, ParquetOptions, shards
from dtruntime.data.readers import IndexedFile, RowBlocks
from dtruntime.storage import FileStat

SCHEMA = pa.schema([("a", pa.int64())])


def dataset(files: list[list[int]], seekable: bool = True) -> DatasetIndex:
    """An index of files with blocks of the given numbers of rows, each row of ten bytes."""
    indexed = []
    for number, counts in enumerate(files):
        lengths = np.array(counts, np.int64) * 10
        blocks = RowBlocks(counts, np.cumsum(lengths) - lengths, lengths)
        stat = FileStat(f"/data/{number}.parquet", int(lengths.sum()), str(number))
        indexed.append(IndexedFile(stat, blocks, SCHEMA, seekable))
    return DatasetIndex("/data", ParquetOptions(), tuple(indexed), SCHEMA)


FILES = st.lists(st.lists(st.integers(0, 50), max_size=8), min_size=1, max_size=6).filter(
    lambda files: sum(map(sum, files)) > 0
)


@settings(max_examples=200, deadline=None)
@given(FILES, st.integers(1, 200), st.booleans(), st.booleans())
def test_shards_cover_every_sample_once(
    files: list[list[int]], size: int, exact: bool, seekable: bool
) -> None:
    index = dataset(files, seekable)
    cut = shards(index, size, exact)
    assert [shard.shard_id for shard in cut] == list(range(len(cut)))
    seen = []
    for shard in cut:
        assert 0 < len(shard) == sum(piece.count for piece in shard.pieces)
        for piece in shard.pieces:
            assert 0 < piece.count <= index.files[piece.file].samples - piece.start
            begin = int(index.bounds[piece.file]) + piece.start
            seen += range(begin, begin + piece.count)
    assert seen == list(range(index.total_samples))


@settings(max_examples=200, deadline=None)
@given(FILES, st.integers(1, 200), st.booleans(), st.booleans())
def test_bytes_of_a_shard_are_those_of_its_pieces(
    files: list[list[int]], size: int, exact: bool, seekable: bool
) -> None:
    cut = shards(dataset(files, seekable), size, exact)
    assert cut.bytes_read.tolist() == [sum(piece.bytes for piece in shard.pieces) for shard in cut]


@settings(max_examples=200, deadline=None)
@given(FILES, st.integers(1, 200))
def test_exact_shards_have_the_wanted_size(files: list[list[int]], size: int) -> None:
    cut = shards(dataset(files), size, exact=True)
    assert all(len(shard) == size for shard in cut[:-1])
    assert len(cut[-1]) <= size


@settings(max_examples=200, deadline=None)
@given(FILES, st.integers(1, 200))
def test_other_shards_are_near_the_wanted_size(files: list[list[int]], size: int) -> None:
    largest_block = max(max(counts, default=0) for counts in files)
    for shard in shards(dataset(files), size):
        assert len(shard) <= size + largest_block


def test_shards_end_where_row_groups_do() -> None:
    index = dataset([[100] * 10, [70] * 10])
    ends = {int(end) for end in np.cumsum([100] * 10 + [70] * 10)}
    assert {shard.end for shard in shards(index, 210)} <= ends
    assert {shard.end for shard in shards(index, 95)} <= ends


def test_large_row_group_is_cut_into_equal_parts_when_there_are_few() -> None:
    cut = shards(dataset([[336_776]]), 10_000)
    assert len(cut) == 34
    assert {len(shard) for shard in cut} <= {9905, 9906, 9904}


def test_large_row_groups_stay_whole_when_there_are_many() -> None:
    cut = shards(dataset([[1_000_000]] * 2000), 10_000)
    assert len(cut) == 2000
    assert {len(shard) for shard in cut} == {1_000_000}


def test_compressed_file_counts_as_one_unit() -> None:
    index = dataset([[100] * 10] * 4, seekable=False)
    assert [len(shard) for shard in shards(index, 900)] == [1000] * 4
    assert {piece.bytes for shard in shards(index, 900) for piece in shard.pieces} == {10_000}


def test_shard_that_spans_files_has_a_piece_of_each() -> None:
    shard = shards(dataset([[10], [10], [10]]), 25, exact=True)[0]
    assert [(piece.file, piece.start, piece.count) for piece in shard.pieces] == [
        (0, 0, 10),
        (1, 0, 10),
        (2, 0, 5),
    ]
    assert shard.urls == ("/data/0.parquet", "/data/1.parquet", "/data/2.parquet")
    assert [piece.bytes for piece in shard.pieces] == [100, 100, 100]


def test_a_million_shards_are_cheap() -> None:
    index = dataset([[100] * 1000] * 1000)
    started = time.process_time()
    cut = shards(index, 100)
    assert len(cut) == 1_000_000
    assert cut[999_999].end == 100_000_000
    assert cut.bounds.nbytes < 10_000_000
    assert time.process_time() - started < 5


def test_index_behaves_like_a_list(tmp_path: Path) -> None:
    cut = shards(dataset([[10] * 10]), 10)
    assert cut[-1] == cut[9]
    assert cut[2:4] == [cut[2], cut[3]]
    with pytest.raises(IndexError, match="shard 10 is not one of 10"):
        cut[10]
    with pytest.raises(ValueError, match="shard_size must be between 1"):
        shards(dataset([[10]]), 0)
