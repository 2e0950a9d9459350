"""Columns of every kind become the arrays that a loop expects."""

import datetime
import gc
import sys
import traceback
import weakref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtruntime.data import build_index
from dtruntime.data.loader import Loader
from dtruntime.data.mixture import Mixture
from dtruntime.data.source import FileSource, NumberSource
from dtruntime.errors import ConfigError, ShardError

ROWS = 250


def table():
    ids = np.arange(ROWS)
    return pa.table(
        {
            "id": ids,
            "small": pa.array(ids % 100, pa.int8()),
            "real": pa.array([None if i % 7 == 0 else i / 3 for i in ids], pa.float32()),
            "flag": pa.array(ids % 2 == 0),
            "when": pa.array([datetime.datetime(2026, 1, 1, 0, i % 60) for i in ids]),
            "day": pa.array([datetime.date(2026, 1, 1 + i % 28) for i in ids]),
            "name": [None if i % 5 == 0 else f"n{i}" for i in ids],
            "raw": [bytes([i % 256]) * (i % 3) for i in ids],
            "picture": pa.array([bytes([i % 256, 1, 0]) for i in ids], pa.binary(3)),
            "kind": pa.array([f"k{i % 3}" for i in ids]).dictionary_encode(),
            "vector": pa.array([[i, i + 1, i + 2] for i in ids], pa.list_(pa.float32(), 3)),
            "list": [list(range(i % 4)) for i in ids],
            "holes": pa.array([None if i == 123 else i for i in ids], pa.int64()),
        }
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("kinds") / "all.parquet"
    pq.write_table(table(), path, row_group_size=40)
    return build_index(path, "parquet", use_cache=False)


def loader(index, batch=32, columns=None, **options):
    return Loader(FileSource(index, 40, columns=columns), batch, **options)


@pytest.mark.parametrize("shuffle", [True, False])
def test_values_and_types_survive(index, shuffle):
    expected = table()
    types = set()
    for batch in loader(index, shuffle=shuffle, fill={"holes": -1}, ragged="list"):
        rows = expected.take(pa.array(batch["id"])).to_pydict()
        types.add(tuple(str(array.dtype) for array in batch.values()))
        assert batch["small"].tolist() == rows["small"]
        given = [None if np.isnan(x) else x for x in batch["real"]]
        assert given == [None if x is None else np.float32(x) for x in rows["real"]]
        assert batch["flag"].tolist() == rows["flag"]
        assert batch["when"].astype("M8[us]").tolist() == rows["when"]
        assert batch["day"].tolist() == rows["day"]
        assert list(batch["name"]) == rows["name"]
        assert list(batch["raw"]) == rows["raw"]
        assert [bytes(row) for row in batch["picture"]] == rows["picture"]
        assert list(batch["kind"]) == rows["kind"]
        assert batch["vector"].tolist() == rows["vector"]
        assert batch["vector"].shape == (len(batch["id"]), 3)
        assert [list(x) for x in batch["list"]] == rows["list"]
        assert batch["holes"].tolist() == [-1 if x is None else x for x in rows["holes"]]
    assert len(types) == 1


def test_missing_whole_numbers_are_an_error_that_names_the_remedy(index):
    with pytest.raises(ShardError, match=r"'holes'.*fill="):
        list(loader(index, columns=["holes"]))


def test_columns_are_chosen_and_ordered(index):
    batch = next(iter(loader(index, columns=["name", "id"])))
    assert list(batch) == ["name", "id"]
    with pytest.raises(ShardError, match=r"no column 'nane'.*'name'"):
        loader(index, columns=["nane"])


@pytest.mark.parametrize("shuffle", [True, False])
def test_arrow_tables_keep_everything(index, shuffle):
    batches = list(loader(index, output="arrow", shuffle=shuffle, ids=True))
    whole = pa.concat_tables(batches).sort_by("__id__")
    assert whole.drop_columns(["__id__"]).cast(table().schema).equals(table())


def test_batches_may_be_changed_without_changing_later_ones(index):
    """Also where a shard is a part of a row group that is kept decoded."""
    source = FileSource(index, 7, exact=True, columns=["id"])
    reading = Loader(source, 5, shuffle=False)
    for _ in range(3):
        seen = []
        for batch in reading:
            seen += batch["id"].tolist()
            batch["id"][:] = -1
        assert seen == list(range(ROWS))


def test_decode_and_transform_see_samples_and_batches(index):
    def decode(sample):
        return {"twice": sample["id"] * 2, "pair": np.array([sample["id"], 1])}

    def transform(batch):
        return batch["twice"], batch["pair"]

    reading = loader(index, 8, decode=decode, transform=transform, shuffle=False, fill={"holes": 0})
    twice, pair = next(iter(reading))
    assert twice.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert pair.tolist() == [[i, 1] for i in range(8)]


def test_samples_may_decode_to_tuples_and_text():
    reading = Loader(NumberSource(6, 3), 3, shuffle=False, decode=lambda s: (s["sample"], "x"))
    values, text = next(iter(reading))
    assert values.tolist() == [0, 1, 2]
    assert text == ["x", "x", "x"]


def test_padding_repeats_own_samples_and_says_so(index):
    options = {"fill": {"holes": 0}, "ragged": "list"}
    runs = [
        list(loader(index, 40, rank=r, world_size=2, last="pad", ids=True, **options))
        for r in range(2)
    ]
    for run in runs:
        last = run[-1]
        assert len(last["__valid__"]) == 40
        assert set(last["__id__"].tolist()) == set(last["__id__"][last["__valid__"]].tolist())
    assert sum(int(b["__valid__"].sum()) for run in runs for b in run) == ROWS


def test_rank_without_any_sample_pads_a_whole_batch():
    runs = [list(Loader(NumberSource(1, 1), 2, rank=r, world_size=3, last="pad")) for r in range(3)]
    assert [len(run) for run in runs] == [1, 1, 1]
    assert sum(int(run[0]["__valid__"].sum()) for run in runs) == 1
    assert all(len(run[0]["sample"]) == 2 for run in runs)


@pytest.mark.parametrize("shuffle", [True, False])
def test_memory_stays_bounded_by_window_and_prefetch(shuffle):
    """Shards in memory are counted at every read; the dataset has a hundred of them."""
    source = NumberSource(10_000, 100)
    alive, most = set(), 0
    read = source.read

    def counted(shard, count):
        nonlocal most
        made = read(shard, count)
        together = range(shard, shard + count)
        alive.update(together)
        weakref.finalize(made, alive.difference_update, together)
        gc.collect()
        most = max(most, len(alive))
        return made

    source.read = counted  # type: ignore[assignment, method-assign]
    reading = Loader(source, 50, window=4, prefetch_shards=3, shuffle=shuffle)
    gc.freeze()  # else every collection looks at all modules of the process
    try:
        assert sum(len(batch["sample"]) for batch in reading) == 10_000
    finally:
        gc.unfreeze()
    assert most <= 4 + 3 + 1


BIG = 2**53 + 1
"""A number that a float cannot hold."""


def nulls_inside(path, kind, big=BIG):
    values = [[big, 1], [2, 3], [big, None], [4, 5], [6, 7]]
    written = pa.table({"v": pa.array(values, kind), "id": range(5)})
    pq.write_table(written, path, row_group_size=2)
    return build_index(path, "parquet", use_cache=False)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", [pa.list_(pa.int64(), 2), pa.list_(pa.int64())])
def test_whole_numbers_in_lists_stay_whole_beside_missing_ones(tmp_path, kind, shuffle):
    index = nulls_inside(tmp_path / "inside.parquet", kind)
    with pytest.raises(ShardError, match=r"'v'.*int64.*fill="):
        list(loader(index, 2, shuffle=shuffle))
    rows = {}
    for batch in loader(index, 2, shuffle=shuffle, fill={"v": -1}):
        rows |= {int(i): row for i, row in zip(batch["id"], batch["v"], strict=True)}
    assert [rows[i].tolist() for i in range(5)] == [[BIG, 1], [2, 3], [BIG, -1], [4, 5], [6, 7]]
    assert {row.dtype for row in rows.values()} == {np.dtype("int64")}


def test_filling_lists_keeps_missing_and_empty_ones(tmp_path):
    values = [None, [], [1, None], None, [2], [None]]
    path = tmp_path / "lists.parquet"
    pq.write_table(pa.table({"v": pa.array(values, pa.list_(pa.int32()))}), path)
    index = build_index(path, "parquet", use_cache=False)
    (batch,) = loader(index, 6, shuffle=False, fill={"v": 0}, ragged="list")
    given = [None if row is None else row.tolist() for row in batch["v"]]
    assert given == [None, [], [1, 0], None, [2], [0]]


def test_missing_real_numbers_in_lists_are_nan(tmp_path):
    for number, kind in enumerate((pa.list_(pa.float64(), 2), pa.list_(pa.float64()))):
        index = nulls_inside(tmp_path / f"{number}.parquet", kind, big=0.5)
        (batch,) = loader(index, 5, shuffle=False)
        assert np.isnan(batch["v"][2][1])
        assert batch["v"][4].tolist() == [6.0, 7.0]


def test_missing_rows_of_an_array_are_an_error_without_a_remedy_that_fails(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"v": pa.array([[1, 2], None], pa.list_(pa.int64(), 2))}), path)
    with pytest.raises(ShardError, match="leave the column out") as caught:
        list(loader(build_index(path, "parquet", use_cache=False), 2, fill={"v": 0}))
    assert "fill=" not in str(caught.value)


def named(path, column):
    pq.write_table(pa.table({column: [5, 6, 7], "a": [1, 2, 3]}), path)
    return build_index(path, "parquet", use_cache=False)


@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("__id__", {"ids": True}),
        ("__id__", {"ids": True, "output": "arrow"}),
        ("__valid__", {"last": "pad"}),
    ],
)
def test_columns_of_the_data_are_not_replaced(tmp_path, column, options):
    index = named(tmp_path / "named.parquet", column)
    with pytest.raises(ShardError, match=f"column '{column}'"):
        loader(index, 3, **options)
    (batch,) = loader(index, 3, shuffle=False)
    assert batch[column].tolist() == [5, 6, 7]
    (batch,) = loader(index, 3, columns=["a"], shuffle=False, **options)
    assert column in (batch.column_names if options.get("output") else batch)


def test_decoded_samples_may_use_but_not_give_a_column_that_is_added(tmp_path):
    index = named(tmp_path / "named.parquet", "__id__")
    reading = loader(index, 3, shuffle=False, ids=True, decode=lambda s: {"own": s["__id__"]})
    (batch,) = reading
    assert batch["own"].tolist() == [5, 6, 7]
    assert batch["__id__"].tolist() == [0, 1, 2]
    with pytest.raises(ShardError, match="column '__id__'"):
        list(loader(index, 3, ids=True, decode=lambda s: s))


def test_mixture_does_not_replace_a_column(tmp_path):
    source = FileSource(named(tmp_path / "named.parquet", "__dataset__"), 10)
    with pytest.raises(ShardError, match="__dataset__"):
        Mixture({"a": (source, 1.0)})


@pytest.mark.parametrize("output", ["torch", "jax"])
def test_framework_that_is_not_installed_is_named_with_the_command(index, monkeypatch, output):
    monkeypatch.setitem(sys.modules, output, None)
    with pytest.raises(
        ConfigError, match=f"output='{output}'.*not installed: pip install {output}"
    ):
        loader(index, output=output)


def test_column_that_is_not_there_is_answered_with_those_that_are(index):
    with pytest.raises(ShardError, match="no column 'vektor': did you mean 'vector'") as caught:
        loader(index, columns=["vektor"])
    assert "there are 'id', 'small', 'real'" in str(caught.value)


def test_error_in_a_thread_comes_without_the_frames_that_it_passed(index):
    def message():
        try:
            list(loader(index, columns=["holes"]))
        except ShardError as exc:
            return traceback.format_exception(exc)
        raise AssertionError("no error")

    shown = "".join(message())
    assert "'holes'" in shown
    assert shown.count("File ") <= 5


def test_error_of_the_user_keeps_its_frames(index):
    def decode(sample):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        list(loader(index, columns=["id"], decode=decode))
    assert caught.traceback[-1].name == "decode"
