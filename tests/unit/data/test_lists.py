"""Columns of lists: one array where lengths agree, a choice or a clear error where not."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.data import TfrecordOptions, build_index
from dtruntime.data.batches import Batches
from dtruntime.data.columns import Block, ListColumn, NumpyBlocks
from dtruntime.data.loader import Loader
from dtruntime.data.source import FileSource
from dtruntime.errors import ShardError
from tests.support.data.record_files import example, write_records

KINDS = {
    "list<float>": pa.list_(pa.float32()),
    "list<double>": pa.list_(pa.float64()),
    "list<int>": pa.list_(pa.int64()),
    "list<bool>": pa.list_(pa.bool_()),
    "large_list": pa.large_list(pa.float32()),
    "fixed_size_list": pa.list_(pa.float32(), 6),
}
NESTED = {
    "list of list": pa.list_(pa.list_(pa.float32())),
    "large of fixed": pa.large_list(pa.list_(pa.float32(), 3)),
    "fixed of list": pa.list_(pa.list_(pa.float32()), 2),
    "fixed of fixed": pa.list_(pa.list_(pa.float32(), 3), 2),
}
ROWS = 100


def files(folder, rows: list[Any], kind: pa.DataType, parts: int = 2):
    """An index of parquet files with the rows, numbered in ``id``."""
    for part in range(parts):
        numbers = range(part, len(rows), parts)
        table = pa.table({"id": list(numbers), "v": pa.array([rows[n] for n in numbers], kind)})
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=16)
    return build_index(folder, "parquet", use_cache=False)


def load(index, batch=8, **options: Any) -> Loader:
    return Loader(FileSource(index, 16), batch, **{"seed": 3, **options})


@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize("kind", [*KINDS, *NESTED])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_of_one_length_are_one_array(tmp_path, kind, output, shuffle):
    pytest.importorskip(output)
    flat = np.arange(ROWS * 6).reshape(ROWS, 6)
    rows = flat.reshape(ROWS, 2, 3) if kind in NESTED else flat
    values = (rows % 2 == 0) if kind == "list<bool>" else rows
    index = files(tmp_path, values.tolist(), {**KINDS, **NESTED}[kind])
    seen = 0
    for batch in load(index, output=output, shuffle=shuffle):
        array = batch["v"]
        assert type(array).__module__ == output
        assert tuple(array.shape) == (len(batch["id"]), *rows.shape[1:])
        assert np.asarray(array).tolist() == values[np.asarray(batch["id"])].tolist()
        seen += len(batch["id"])
    assert seen == ROWS


def test_types_are_those_of_the_file(tmp_path):
    torch = pytest.importorskip("torch")
    types = {}
    for name in ("list<float>", "list<double>", "list<int>", "list<bool>", "large_list"):
        folder = tmp_path / name
        folder.mkdir()
        batch = next(
            iter(
                load(
                    files(
                        folder, [[True, False] if name == "list<bool>" else [1, 0]] * 8, KINDS[name]
                    ),
                    output="torch",
                )
            )
        )
        types[name] = batch["v"].dtype
    assert types == {
        "list<float>": torch.float32,
        "list<double>": torch.float64,
        "list<int>": torch.int64,
        "list<bool>": torch.bool,
        "large_list": torch.float32,
    }


def test_arrays_may_be_changed_and_tensors_do_not_warn(tmp_path, recwarn):
    pytest.importorskip("torch")
    index = files(tmp_path, [[n, n] for n in range(ROWS)], KINDS["list<int>"])
    for output in ("numpy", "torch"):
        reading = load(index, 5, shuffle=False, output=output)
        for _ in range(2):
            rows = []
            for batch in reading:
                rows += np.asarray(batch["v"])[:, 0].tolist()
                batch["v"][:] = -1
            assert sorted(rows) == list(range(ROWS))
    assert not [str(w.message) for w in recwarn]


RAGGED = [list(range(n % 5)) for n in range(ROWS)]


@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["list<int>", "large_list"])
def test_different_lengths_are_an_error_with_the_cure(tmp_path, kind, output):
    pytest.importorskip(output)
    index = files(tmp_path, RAGGED, KINDS[kind])
    with pytest.raises(ShardError, match=r"column 'v' has rows of different lengths") as caught:
        list(load(index, output=output))
    text = str(caught.value)
    for part in ("ragged='pad'", "ragged='nested'", "ragged='list'", "'v__mask'", "{'v': 'pad'}"):
        assert part in text
    lengths = text.split("(")[1].split(")")[0].split(", ")
    assert len(lengths) > 1
    assert {*lengths} <= {*"01234"}


@pytest.mark.parametrize("batch", [1, 5, 10])
def test_lengths_that_differ_only_between_batches_are_an_error_too(tmp_path, batch):
    """Else a user would meet it by luck, or never see it with other batch sizes."""
    rows = [[1, 2]] * 50 + [[1, 2, 3]] * 50
    for part in range(2):
        table = pa.table({"v": pa.array(rows[part * 50 : part * 50 + 50], pa.list_(pa.int8()))})
        pq.write_table(table, tmp_path / f"{part}.parquet")
    reading = load(build_index(tmp_path, "parquet", use_cache=False), batch, shuffle=False)
    given = []
    with pytest.raises(ShardError, match=r"'v' has rows, in different batches, .*\(2, 3\)"):
        given.extend(len(b["v"]) for b in reading)
    assert sum(given) == 50
    with pytest.raises(ShardError, match="different batches"):
        list(reading)
    assert reading.position == 50


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_padding_says_where_values_are(tmp_path, output):
    pytest.importorskip(output)
    rows = [None if n == 7 else row for n, row in enumerate(RAGGED)]
    index = files(tmp_path, rows, KINDS["list<int>"])
    for batch in load(index, output=output, ragged="pad", fill={"v": -7}):
        values, mask = np.asarray(batch["v"]), np.asarray(batch["v__mask"])
        expected = [rows[n] or [] for n in np.asarray(batch["id"])]
        assert values.shape == mask.shape == (len(expected), max(map(len, expected)))
        assert [row[there].tolist() for row, there in zip(values, mask, strict=True)] == expected
        assert set(values[~mask].tolist()) <= {-7}


def test_padding_is_the_same_whether_rows_happen_to_agree_or_not(tmp_path):
    index = files(tmp_path, [[1, 2, 3]] * 20, KINDS["list<float>"])
    for batch in load(index, ragged={"v": "pad"}):
        assert batch["v"].shape == batch["v__mask"].shape
        assert batch["v__mask"].all()


def test_padding_of_lists_of_lists(tmp_path):
    rows = [[list(range(n % 3 + 1))] * (n % 2 + 1) for n in range(12)]
    index = files(tmp_path, rows, NESTED["list of list"])
    for batch in load(index, 12, ragged="pad", shuffle=False):
        assert batch["v"].shape == batch["v__mask"].shape == (12, 2, 3)
        for number, array, mask in zip(batch["id"], batch["v"], batch["v__mask"], strict=True):
            assert [row[m].tolist() for row, m in zip(array, mask, strict=True) if m.any()] == rows[
                number
            ]


def test_lists_of_arrays(tmp_path):
    torch = pytest.importorskip("torch")
    rows = [None if n == 3 else row for n, row in enumerate(RAGGED)]
    index = files(tmp_path, rows, KINDS["list<int>"])
    for output, kind in (("numpy", np.ndarray), ("torch", torch.Tensor)):
        for batch in load(index, output=output, ragged="list"):
            assert isinstance(batch["v"], np.ndarray if output == "numpy" else list)
            for number, row in zip(batch["id"].tolist(), batch["v"], strict=True):
                assert row is None if number == 3 else isinstance(row, kind)
                assert (None if row is None else row.tolist()) == rows[number]


def test_equal_rows_asked_for_as_lists_are_lists(tmp_path):
    """What form a column has follows from what was asked for, not from the rows."""
    index = files(tmp_path, [[1, 2]] * 20, KINDS["list<int>"])
    for batch in load(index, ragged="list"):
        assert batch["v"].dtype == object
        assert all(row.tolist() == [1, 2] for row in batch["v"])


def test_nested_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    index = files(tmp_path, RAGGED, KINDS["list<float>"])
    for batch in load(index, output="torch", ragged="nested"):
        nested = batch["v"]
        assert nested.is_nested
        assert nested.dtype == torch.float32
        expected = [RAGGED[n] for n in batch["id"].tolist()]
        assert [row.tolist() for row in nested.unbind()] == expected


def test_nested_tensors_of_rows_of_points(tmp_path):
    pytest.importorskip("torch")
    rows = [[[n, n + 1]] * (n % 3 + 1) for n in range(24)]
    index = files(tmp_path, rows, NESTED["list of list"])
    for batch in load(index, output="torch", ragged="nested"):
        assert [r.tolist() for r in batch["v"].unbind()] == [rows[n] for n in batch["id"].tolist()]
    folder = tmp_path / "worse"
    folder.mkdir()
    worse = files(folder, [[[1], [2, 3]]] * 8, NESTED["list of list"])
    with pytest.raises(ShardError, match=r"'v'.*inside its rows.*ragged='pad'"):
        list(load(worse, output="torch", ragged="nested"))


def test_lengths_inside_rows_are_named_too(tmp_path):
    rows = [[[1, 2], [3]], [[1], [2]]] * 8
    with pytest.raises(ShardError, match=r"2x\(2, 1\)"):
        list(load(files(tmp_path, rows, NESTED["list of list"])))


def test_missing_values_and_rows(tmp_path):
    real = files(tmp_path, [[1.0, None]] * 8, KINDS["list<float>"])
    batch = next(iter(load(real)))
    assert batch["v"].shape == (8, 2)
    assert np.isnan(batch["v"][:, 1]).all()
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = files(folder, [[1.0, 2.0], None] * 8, KINDS["list<float>"])
    with pytest.raises(ShardError, match=r"'v' has missing values.*ragged='pad'.*leave the column"):
        list(load(rows))


def test_lists_of_text_stay_lists(tmp_path):
    pytest.importorskip("torch")
    rows = [["a"] * (n % 3) for n in range(16)]
    index = files(tmp_path, rows, pa.list_(pa.string()))
    for output in ("numpy", "torch"):
        for batch in load(index, output=output):
            assert list(batch["v"]) == [rows[n] for n in batch["id"].tolist()]


def test_lists_of_times(tmp_path):
    now = datetime.datetime(2026, 1, 1)
    index = files(tmp_path, [[now, now]] * 8, pa.list_(pa.timestamp("us")))
    (batch,) = load(index)
    assert batch["v"].shape == (8, 2)
    assert batch["v"].dtype.kind == "M"


def test_choices_that_cannot_be_are_refused_at_once(tmp_path):
    index = files(tmp_path, RAGGED, KINDS["list<int>"])
    for options, match in (
        ({"ragged": "padd"}, "ragged must be one of"),
        ({"ragged": "nested"}, "for output='torch'"),
        ({"ragged": "pad", "output": "arrow"}, "gives lists as they are"),
    ):
        with pytest.raises(ValueError, match=match):
            load(index, **options)
    with pytest.raises(ShardError, match=r"ragged names 'id'.*those are: v"):
        load(index, ragged={"id": "pad"})


def test_mask_does_not_replace_a_column(tmp_path):
    pq.write_table(pa.table({"v": [[1], [2, 3]], "v__mask": [1, 2]}), tmp_path / "a.parquet")
    index = build_index(tmp_path, "parquet", use_cache=False)
    with pytest.raises(ShardError, match="'v__mask'"):
        load(index, ragged="pad")


@pytest.mark.parametrize("mode", ["pad", "list", "nested"])
def test_batch_without_samples_has_the_same_columns(tmp_path, mode):
    """A rank that has none in a step of a run trains on such a batch."""
    pytest.importorskip("torch")
    pq.write_table(pa.table({"v": RAGGED, "name": ["x"] * ROWS}), tmp_path / "a.parquet")
    index = build_index(tmp_path, "parquet", use_cache=False)
    reading = load(index, output="torch", ragged=mode)
    batch = next(iter(reading))
    none = reading.without_samples(batch)
    assert none.keys() == batch.keys()
    assert [len(column) for column in none.values()] == [0] * len(none)


def test_resuming_gives_the_same_batches(tmp_path):
    index = files(tmp_path, RAGGED, KINDS["list<int>"])
    whole = [(b["id"].tolist(), b["v"].tolist()) for b in load(index, ragged="pad")]
    first = load(index, ragged="pad")
    begun = iter(first)
    head = [next(begun) for _ in range(4)]
    rest = load(index, ragged="pad")
    rest.load_state_dict(first.state_dict())
    got = [(b["id"].tolist(), b["v"].tolist()) for b in (*head, *rest)]
    assert got == whole


def test_decode_gets_an_array_for_each_sample(tmp_path):
    index = files(tmp_path, RAGGED, KINDS["list<int>"])

    def decode(sample):
        return {"sum": sample["v"].sum(), "id": sample["id"]}

    for batch in load(index, decode=decode):
        assert batch["sum"].tolist() == [sum(RAGGED[n]) for n in batch["id"]]
    with pytest.raises(ShardError, match="decode returned arrays of different shapes for 'v'"):
        list(load(index, decode=lambda sample: {"v": sample["v"]}))


def test_features_of_records_are_stacked_or_ragged_as_lists_are(tmp_path):
    records = [
        example({"x": ("float", [n] * 3), "y": ("int64", list(range(n % 3))), "n": ("int64", [n])})
        for n in range(30)
    ]
    write_records(tmp_path / "a.tfrecord", records)
    index = build_index(tmp_path, "tfrecord", options=TfrecordOptions(), use_cache=False)
    for batch in Loader(FileSource(index, 8, columns=["n", "x"]), 7):
        assert batch["x"].tolist() == [[n] * 3 for n in batch["n"]]
    with pytest.raises(ShardError, match=r"'y'.*ragged='pad'"):
        list(Loader(FileSource(index, 8), 7))
    for batch in Loader(FileSource(index, 8), 7, ragged="pad"):
        lengths = batch["y__mask"].sum(1)
        assert lengths.tolist() == [n % 3 for n in batch["n"]]


@given(
    st.lists(st.lists(st.integers(-5, 5), max_size=3) | st.none(), min_size=1, max_size=30),
    st.lists(st.integers(0, 29), max_size=20),
    st.data(),
)
def test_how_rows_are_held_does_not_change_what_they_are(rows, places, data):
    """Blocks of one array and blocks of lists, cut, taken from and joined in any way."""
    places = [place % len(rows) for place in places]
    cut = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    kind = data.draw(st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int64())]))
    make = NumpyBlocks()

    def block(start: int, stop: int) -> Block:
        table = pa.table({"v": pa.array(rows, kind)})
        return make([table], np.arange(start, stop), np.arange(start, stop))

    edges = [0, *cut, len(rows)]
    joined = Block.concat([block(a, b) for a, b in itertools.pairwise(edges)])
    taken = joined.take(np.array(places, np.int64))
    column = taken.columns["v"]
    assert isinstance(column, ListColumn)
    expected = [rows[place] for place in places]
    assert [None if r is None else r.tolist() for r in column.rows()] == expected
    values, mask = column.padded()
    assert [v[m].tolist() for v, m in zip(values, mask, strict=True)] == [r or [] for r in expected]
    if expected and None not in expected and len(set(map(len, expected))) == 1:
        batch = Batches().make(taken, 0, None)
        assert batch["v"].tolist() == expected
