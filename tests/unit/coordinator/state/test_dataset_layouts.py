"""Datasets whose files were seen: which rows each shard has, and what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.coordinator.state import Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.datasets import Dataset
from dtruntime.coordinator.state.effects import Put
from dtruntime.coordinator.state.records import (
    DatasetRecord,
    IndexRecord,
    LayoutRecord,
    pack,
    unpack,
)
from dtruntime.rpc import decode, encode
from dtruntime.rpc.gen import coordinator_pb2 as pb
from tests.support.machine_bench import JOB, Bench, refusal

LAYOUT: dict[str, Any] = {
    "fingerprint": "abc",
    "shard_samples": [4, 3, 5],
    "shard_bytes": [40, 30, 50],
    "root": "/data/",
    "files": ["a.csv", "b.csv", "c.csv"],
    "file_samples": [6, 0, 6],
    "total_bytes": 120,
    "columns": ["x: int64"],
    "options": '{"type":"csv"}',
}
INFO: dict[str, Any] = {
    "dataset_id": "d",
    "path": "/data",
    "format": "csv",
    "total_samples": 12,
    "shard_size": 4,
    "index": b"opaque",
}


def request(info: dict[str, Any] | None = None, **layout: Any) -> pb.DatasetInfo:
    return pb.DatasetInfo(
        layout=pb.DatasetLayout(**{**LAYOUT, **layout}), job=JOB, **{**INFO, **(info or {})}
    )


def command(info: dict[str, Any] | None = None, **layout: Any) -> c.RegisterDataset:
    return decode.register_dataset(request(info, **layout))


def record(shard_samples: list[int], file_samples: list[int]) -> DatasetRecord:
    layout = LayoutRecord(
        fingerprint="f",
        shard_count=len(shard_samples),
        shard_samples=pack(np.array(shard_samples, np.uint64)),
        shard_bytes=pack(np.zeros(len(shard_samples), np.uint64)),
        root="s3://b/",
        files=tuple(f"{n}.csv" for n in range(len(file_samples))),
        file_samples=pack(np.array(file_samples, np.uint64)),
        total_bytes=1,
    )
    return DatasetRecord("d", "s3://b", "csv", sum(shard_samples), 1, False, 0, layout=layout)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any), st.data())
def test_shards_have_the_rows_of_their_files(files: list[int], data: st.DataObject) -> None:
    total = sum(files)
    cuts = sorted(data.draw(st.sets(st.integers(1, total), max_size=8)) | {total})
    sizes = [int(n) for n in np.diff([0, *cuts])]
    dataset = Dataset(record(sizes, files))
    rows = [(f"s3://b/{n}.csv", row) for n, count in enumerate(files) for row in range(count)]
    for number, shard in enumerate(dataset.shards(np.arange(len(sizes)))):
        assert shard == dataset.shard(number)
        assert shard.end - shard.start == sizes[number]
        assert len(set(shard.file_paths)) == len(shard.file_paths)
        held = [
            (path, row)
            for path, start, count in zip(
                shard.file_paths, shard.row_starts, shard.row_counts, strict=True
            )
            for row in range(start, start + count)
        ]
        assert held == rows[shard.start : shard.end]


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_packed_numbers_come_back(numbers: list[int]) -> None:
    assert unpack(pack(np.array(numbers, np.uint64)), len(numbers)).tolist() == numbers


def test_packed_numbers_are_as_short_as_the_largest_allows() -> None:
    assert [len(pack(np.array([1, n], np.uint64))) for n in (255, 256, 2**16, 2**32)] == [
        2,
        4,
        8,
        16,
    ]


def test_layout_survives_a_restart_and_the_index_is_stored_beside_it(bench: Bench) -> None:
    reply = bench.apply(command())
    assert reply == c.DatasetRegistered("d", 3, created=True)
    puts = {effect.kind: effect.record for effect in bench.effects if isinstance(effect, Put)}
    assert puts["index"] == IndexRecord(b"opaque")
    before = list(bench.job.datasets.get("d").shards(range(3)))
    assert [shard.file_paths for shard in before] == [
        ("/data/a.csv",),
        ("/data/a.csv", "/data/c.csv"),
        ("/data/c.csv",),
    ]
    bench.restart()
    assert list(bench.job.datasets.get("d").shards(range(3))) == before
    assert bench.apply(command()) == c.DatasetRegistered("d", 3, created=False)
    assert bench.effects == []


def test_stored_layout_whose_lists_do_not_fit_is_unreadable() -> None:
    good = msgspec.json.encode(record([1, 2, 3], [6]))
    assert msgspec.json.decode(good, type=DatasetRecord).shard_count == 3
    bad = good.replace(b'"shard_count":3', b'"shard_count":5')
    with pytest.raises(msgspec.ValidationError, match="shard_samples has 3 bytes for 5 numbers"):
        msgspec.json.decode(bad, type=DatasetRecord)


@pytest.mark.parametrize(
    ("again", "named"),
    [
        (command(fingerprint="xyz"), "the files differ: registered 3 files of 120 bytes"),
        (command(options='{"type":"csv","header":false}'), "options: registered {"),
        (command(shard_samples=[3, 4, 5]), "shards: registered 3, given 3"),
        (command(root="/elsewhere/"), "folder of the files: registered '/data/'"),
        (command({"exact": True}, shard_samples=[4, 4, 4]), "exact: registered False, given True"),
        (command({"shard_size": 5}), "shard_size: registered 4, given 5"),
    ],
)
def test_other_files_are_a_conflict_that_shows_what_differs(
    bench: Bench, again: c.RegisterDataset, named: str
) -> None:
    bench.apply(command())
    refused = refusal(bench.apply, again)
    assert refused.reason == "dataset_conflict"
    assert named in str(refused)


def test_who_has_not_seen_the_files_contradicts_nothing(bench: Bench) -> None:
    bench.apply(command())
    unseen = c.RegisterDataset(JOB, "d", 12, 4, path="/data", format="csv")
    assert bench.apply(unseen) == c.DatasetRegistered("d", 3, created=False)


def test_files_that_appear_later_are_a_conflict(bench: Bench) -> None:
    bench.apply(c.RegisterDataset(JOB, "d", 12, 4, path="/data", format="csv"))
    assert "registered without any having been seen" in str(refusal(bench.apply, command()))


@pytest.mark.parametrize(
    ("info", "layout", "named"),
    [
        ({}, {"shard_samples": [4, 3, 4]}, "shard_samples add up to 11 and not to total_samples"),
        ({}, {"shard_samples": [4, 0, 8]}, "shard 1 has no samples"),
        ({}, {"shard_samples": []}, "shard_samples must have 1 to"),
        ({}, {"shard_samples": [2**63, 2**63, 12]}, "add up to 2**63 or more"),
        ({}, {"shard_samples": [*[2**62] * 4, 12]}, "add up to 2**63 or more"),
        ({}, {"shard_bytes": [1, 2]}, "shard_bytes has 2 entries for 3 shards"),
        ({}, {"shard_bytes": [2**62, 2**62, 1]}, "shard_bytes together are 2**63 or more"),
        ({}, {"files": []}, "files must have 1 to"),
        ({}, {"files": ["a", "b", "a"]}, "file 'a' is listed twice"),
        ({}, {"files": ["a", "", "c"]}, "file name must have 1 to"),
        ({}, {"files": ["a", "b\n", "c"]}, "file name 'b\\n' contains characters"),
        ({}, {"files": ["a", "b", "c" * 4092]}, "file name must have 1 to 4090 characters"),
        ({}, {"file_samples": [12]}, "file_samples has 1 entries for 3 files"),
        ({}, {"file_samples": [6, 6, 6]}, "file_samples add up to 18 and not to total_samples, 12"),
        ({}, {"fingerprint": ""}, "fingerprint must have 1 to"),
        ({}, {"fingerprint": "f" * 129}, "fingerprint must have 1 to"),
        ({}, {"root": "r" * 4097}, "root must have 0 to"),
        ({}, {"total_bytes": 2**63}, "total_bytes"),
        ({}, {"columns": ["x"] * 10_001}, "10001 columns"),
        ({}, {"columns": ["x\0"]}, "column"),
        ({}, {"options": "o" * 300_000}, "options must have"),
        ({"exact": True}, {}, "shard 1 has 3 samples and not exactly 4"),
        ({"exact": True}, {"shard_samples": [4, 4, 4]}, ""),
        ({"exact": True, "shard_size": 6}, {"shard_samples": [6, 6]}, "shard_bytes has 3"),
        ({"exact": True, "shard_size": 3}, {"shard_samples": [3, 3, 6]}, "shard 2 has 6 samples"),
        ({"path": ""}, {}, "needs path and format"),
        ({"format": ""}, {}, "needs path and format"),
        ({"index": bytes(decode.INDEX_BYTES + 1)}, {}, "the index has"),
        ({"index": bytes(decode.INDEX_BYTES)}, {}, ""),
    ],
)
def test_impossible_layout_is_refused(
    info: dict[str, Any], layout: dict[str, Any], named: str
) -> None:
    if not named:
        assert command(info, **layout).layout is not None
        return
    with pytest.raises(Refused) as caught:
        command(info, **layout)
    assert caught.value.reason == "invalid"
    assert named in str(caught.value)
    assert "'d'" in str(caught.value)


def test_index_without_a_layout_is_refused() -> None:
    with pytest.raises(Refused, match="useful only together with a layout"):
        decode.register_dataset(pb.DatasetInfo(**INFO))


def test_layout_for_the_wire_is_short_unless_all_is_asked_for() -> None:
    known = command().layout
    assert known is not None
    assert encode.layout(known, full=True) == request().layout
    short = encode.layout(known, full=False)
    assert (short.fingerprint, short.root, short.total_bytes) == ("abc", "/data/", 120)
    lists = (short.shard_samples, short.shard_bytes, short.files, short.file_samples)
    assert not any(lists)


MANY = 2_000_000


def of_numbers(shards: int) -> DatasetRecord:
    return DatasetRecord(
        dataset_id="d",
        path="",
        format="",
        total_samples=shards,
        shard_size=1,
        shuffle=True,
        seed=3,
        metadata={},
    )


@contextmanager
def allocated() -> Iterator[Callable[[], tuple[int, int]]]:
    """Tells how much memory is held and how much was, at most."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


def test_dataset_of_many_shards_costs_nothing_before_somebody_reads_it() -> None:
    with allocated() as memory:
        dataset = Dataset(of_numbers(10_000_000))
        dataset.forget_assignment()
        assert memory()[1] < 100_000


@pytest.mark.parametrize("view", [(1, frozenset[int]()), (3, frozenset({1}))])
def test_dealing_of_many_shards_keeps_little(view: tuple[int, frozenset[int]]) -> None:
    with allocated() as memory:
        dataset = Dataset(of_numbers(MANY))
        dataset.shard_in_order(0, 0, view, 0)
        held, most = memory()
        assert held < 12 * MANY
        assert most < 64 * MANY
        dataset.shard_in_order(0, 1, view, 17)
        assert memory()[1] == most, "another epoch needs nothing more"


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.sets(st.integers(1, 4)),
    st.integers(0, 3),
    st.booleans(),
)
def test_shard_in_order_is_that_of_the_whole_order(
    shards: int, slots: int, holes: set[int], epoch: int, shuffle: bool
) -> None:
    dataset = Dataset(msgspec.structs.replace(of_numbers(shards), shuffle=shuffle))
    view = slots, frozenset(hole for hole in holes if hole < slots)
    order = dataset.order(0, epoch, view).tolist()
    assert dataset.load(0, view) == len(order)
    found = [dataset.shard_in_order(0, epoch, view, i).shard_id for i in range(len(order))]
    assert found == order
