"""TFRecord files: golden bytes, random Examples, corruption."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dtruntime.data import DatasetRows, TfrecordOptions, build_index
from dtruntime.data.readers.format_reader import masked_crc
from dtruntime.errors import ShardError
from tests.support.data.record_files import crc32c, example, feature, field, frame, write_records

GOLDEN_RAW = bytes.fromhex(
    # The records b"hello" and b"", as tensorboardX 2.6 writes them.
    "0500000000000000eab2043e68656c6c6fbb1f1c19000000000000000029039807d8ea82a2"
)
GOLDEN_EXAMPLE = bytes.fromhex(
    # One Example, as the package tfrecord 1.14 writes it with Google's protobuf.
    "4300000000000000b18525a00a410a180a056c6162656c120f1a0d0a0b03ffffffffffffffffff010a120a04"
    "6e616d65120a0a080a067374726174610a110a0573636f7265120812060a040000003f87ddc423"
)


def index_of(path: Path, **options: Any) -> DatasetRows:
    chosen = TfrecordOptions(**options)
    return DatasetRows(build_index(path, "tfrecord", options=chosen, use_cache=False))


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_checksum_matches_published_vectors(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc
    assert masked_crc(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_golden_files_give_what_other_programs_wrote(tmp_path: Path) -> None:
    path = tmp_path / "golden.tfrecord"
    path.write_bytes(GOLDEN_RAW)
    assert index_of(path, raw=True).read(0, 2).to_pydict() == {"record": [b"hello", b""]}
    path.write_bytes(GOLDEN_EXAMPLE)
    expected = {"label": [[3, -1]], "name": [b"strata"], "score": [0.5]}
    assert index_of(path).read(0, 1).to_pydict() == expected


ITEMS: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(max_size=20),
    "float": st.floats(width=32, allow_nan=False),
    "int64": st.integers(-(2**63), 2**63 - 1),
}
ARROW = {"bytes": pa.binary(), "float": pa.float32(), "int64": pa.int64()}


@st.composite
def datasets(draw: st.DrawFn) -> list[dict[str, tuple[str, Any]]]:
    """Records whose features have one kind each, in any order, some of them missing."""
    names = draw(st.lists(st.text(max_size=12), min_size=1, max_size=5, unique=True))
    kinds = {name: draw(st.sampled_from(sorted(ARROW))) for name in names}
    full = draw(st.booleans())
    records = []
    for _ in range(draw(st.integers(1, 20))):
        chosen = names if full else draw(st.lists(st.sampled_from(names), unique=True))
        record = {}
        for name in draw(st.permutations(chosen)):
            most = 1 if full else 5
            items = st.lists(ITEMS[kinds[name]], min_size=int(full), max_size=most)
            record[name] = kinds[name], draw(items)
        records.append(record)
    assume(any(records))
    return records


def columns_of(records: list[dict[str, tuple[str, Any]]]) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for name in sorted({name for record in records for name in record}):
        kind = ARROW[next(record[name][0] for record in records if name in record)]
        lists = [list(record[name][1]) if name in record else None for record in records]
        if all(values is not None and len(values) == 1 for values in lists):
            columns[name] = pa.array([values[0] for values in lists if values], kind)
        else:
            columns[name] = pa.array(lists, pa.list_(kind))
    return pa.table(columns)


def cuts_of(draw: Any, total: int) -> list[tuple[int, int]]:
    inner = draw(st.lists(st.integers(0, total), max_size=6))
    bounds = [0, *sorted(inner), total]
    return list(itertools.pairwise(bounds))


@settings(max_examples=60, deadline=None)
@given(st.data(), datasets(), st.booleans())
def test_any_partition_gives_every_example_once(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    records: list[dict[str, tuple[str, Any]]],
    packed: bool,
) -> None:
    path = tmp_path_factory.mktemp("records") / "random.tfrecord"
    write_records(path, (example(record, packed=packed) for record in records))
    rows = index_of(path)
    expected = columns_of(records)
    assert rows.index.schema == expected.schema
    assert len(rows) == len(records)
    ranges = cuts_of(data.draw, len(records))
    parts = [rows.read(start, stop) for start, stop in ranges]
    assert pa.concat_tables(parts).to_pydict() == expected.to_pydict()


def test_many_blocks_are_read_from_any_place(tmp_path: Path) -> None:
    records = [example({"i": ("int64", [i]), "b": ("bytes", [bytes(900)])}) for i in range(2000)]
    rows = index_of(write_records(tmp_path / "many.tfrecord", records))
    assert len(rows.index.files[0].blocks) > 4
    for start in range(0, 2000, 333):
        stop = min(start + 400, 2000)
        assert rows.read(start, stop, ["i"]).to_pydict() == {"i": list(range(start, stop))}


def test_long_lists_of_strings_keep_their_order(tmp_path: Path) -> None:
    words = [str(i).encode() for i in range(3000)]
    records = [example({"w": ("bytes", words)}), example({"w": ("bytes", [b"x"])})]
    rows = index_of(write_records(tmp_path / "lists.tfrecord", records))
    assert rows.read(0, 2).to_pydict() == {"w": [words, [b"x"]]}


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress], ids=["gzip", "zlib"])
def test_compressed_file_is_read_like_a_plain_one(tmp_path: Path, compress: Any) -> None:
    records = [example({"i": ("int64", [i])}) for i in range(500)]
    path = tmp_path / "data.tfrecord.gz"
    path.write_bytes(compress(b"".join(map(frame, records))))
    rows = index_of(path)
    assert not rows.index.files[0].seekable
    assert rows.read(490, 500).to_pydict() == {"i": list(range(490, 500))}
    assert rows.read(0, 3).to_pydict() == {"i": [0, 1, 2]}


def test_last_of_repeated_fields_counts_as_protobuf_says(tmp_path: Path) -> None:
    twice = field(1, field(1, b"a") + field(2, feature("int64", [1])))
    twice += field(1, field(1, b"a") + field(2, feature("int64", [2])))
    merged = field(1, field(1, b"a") + field(2, feature("int64", [3]) + feature("int64", [4])))
    rows = index_of(write_records(tmp_path / "odd.tfrecord", [field(1, twice), field(1, merged)]))
    assert rows.read(0, 2).to_pydict() == {"a": [[2], [3, 4]]}


def test_unknown_fields_are_skipped(tmp_path: Path) -> None:
    unknown = field(9, b"later") + b"\x78\x96\x01" + b"\x7d" + bytes(4) + b"\x79" + bytes(8)
    record = unknown + example({"a": ("int64", [7])}) + unknown
    rows = index_of(write_records(tmp_path / "unknown.tfrecord", [record]))
    assert rows.read(0, 1).to_pydict() == {"a": [7]}


@pytest.mark.parametrize(
    "record",
    [b"no example at all", b"\x0a\xff", b"\x0a\x05\x0a\x03abc", b"\xff" * 30],
    ids=["text", "no length", "no entry", "no number"],
)
def test_record_that_is_no_example_is_named(tmp_path: Path, record: bytes) -> None:
    path = write_records(tmp_path / "raw.tfrecord", [example({"a": ("int64", [1])}), record])
    with pytest.raises(ShardError, match=r"raw\.tfrecord: record 1 at byte 30: .*raw=True"):
        index_of(path)
    assert index_of(path, raw=True).read(1, 2).to_pydict() == {"record": [record]}


def test_sequence_example_is_refused_instead_of_losing_its_lists(tmp_path: Path) -> None:
    record = example({"a": ("int64", [1])}) + field(2, b"")
    path = write_records(tmp_path / "sequence.tfrecord", [record])
    with pytest.raises(ShardError, match="record 0 at byte 0: it is a SequenceExample"):
        index_of(path)


def test_records_without_features_are_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "none.tfrecord", [b"", b""])
    with pytest.raises(ShardError, match="none of its 2 records has features"):
        index_of(path)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_crash_the_parser(
    tmp_path_factory: pytest.TempPathFactory, record: bytes
) -> None:
    path = write_records(tmp_path_factory.mktemp("fuzz") / "x.tfrecord", [record])
    with contextlib.suppress(ShardError):
        assert len(index_of(path)) == 1


def test_feature_of_two_kinds_names_the_record(tmp_path: Path) -> None:
    records = [example({"a": ("int64", [1])})] * 3 + [example({"a": ("float", [1.0])})]
    path = write_records(tmp_path / "kinds.tfrecord", records)
    with pytest.raises(ShardError, match=r"record 3 .*'a' is float, and int64 in another record"):
        index_of(path)


def corrupt(path: Path, offset: int, replacement: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(replacement)] = replacement
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("offset", "what"), [(0, "length"), (8, "length"), (12, "data"), (17, "data")]
)
def test_bad_checksum_names_record_and_offset(tmp_path: Path, offset: int, what: str) -> None:
    records = [b"hello"] * 10
    path = write_records(tmp_path / "bad.tfrecord", records)
    size = len(frame(b"hello"))
    corrupt(path, 6 * size + offset, b"\x01")
    message = rf"bad\.tfrecord: record 6 at byte {6 * size} is corrupt: the checksum of its {what}"
    with pytest.raises(ShardError, match=message):
        index_of(path, raw=True)


def test_corruption_after_indexing_is_found_when_reading(tmp_path: Path) -> None:
    path = write_records(tmp_path / "late.tfrecord", [b"hello"] * 10)
    rows = index_of(path, raw=True)
    stat = path.stat()
    corrupt(path, 3 * len(frame(b"hello")) + 13, b"?")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert rows.read(0, 3).num_rows == 3
    with pytest.raises(ShardError, match="record 3 at byte 63 is corrupt"):
        rows.read(0, 4)


def test_huge_length_with_correct_checksum_is_a_cut_off_file(tmp_path: Path) -> None:
    path = write_records(tmp_path / "cut.tfrecord", [b"hello"] * 3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError, match="ends within record 2, which starts at byte 42"):
        index_of(path, raw=True)
    length = struct.pack("<Q", 2**50)
    path.write_bytes(frame(b"hello") + length + b"\0\0\0\0" + b"x" * 40)
    with pytest.raises(ShardError, match="record 1 at byte 21 is corrupt"):
        index_of(path, raw=True)


def test_cut_off_compressed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.tfrecord.gz"
    path.write_bytes(gzip.compress(frame(b"hello" * 1000))[:-12])
    with pytest.raises(ShardError, match=r"cut\.tfrecord\.gz cannot be decompressed as gzip"):
        index_of(path, raw=True)
