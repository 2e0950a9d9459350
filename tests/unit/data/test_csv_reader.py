"""CSV files: records found as Arrow finds them, and types that hold everywhere."""

from __future__ import annotations

import bz2
import gzip
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtruntime.data import CsvOptions, DatasetRows, build_index
from dtruntime.data.readers import format_reader
from dtruntime.data.readers.csv import find_lines
from dtruntime.errors import ShardError
from dtruntime.storage import data_files


def index_of(path: Path | str, **options: Any) -> DatasetRows:
    return DatasetRows(
        build_index(path, "csv", options=CsvOptions(**options), use_cache=False, workers=2)
    )


def plain_read(data: bytes, schema: pa.Schema, delimiter: str = ",") -> pa.Table:
    return arrow_csv.read_csv(
        pa.BufferReader(data),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(
            column_types={field.name: field.type for field in schema}
        ),
    )


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few records, so that small files have many."""
    monkeypatch.setattr(format_reader, "BLOCK_BYTES", 40)


NASTY = st.text(st.sampled_from('ab1,;"\n\r\t é\ufeff'), max_size=8)
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(NASTY, min_size=width, max_size=width), min_size=1, max_size=25)
)


@settings(max_examples=100, deadline=None)
@given(
    st.data(), TABLES, st.sampled_from(["\n", "\r\n", "\r"]), st.sampled_from(",;\t"), st.booleans()
)
def test_any_partition_gives_every_row_once(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    table: list[list[str]],
    ending: str,
    delimiter: str,
    marked: bool,
) -> None:
    names = [f"column {i}" for i in range(len(table[0]))]
    always = data.draw(st.booleans())
    text = "".join(as_line(row, delimiter, always) + ending for row in [names, *table])
    content = (b"\xef\xbb\xbf" if marked else b"") + text.encode()
    path = tmp_path_factory.mktemp("csv") / "nasty.csv"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_reader, "BLOCK_BYTES", data.draw(st.sampled_from([1, 40, 2**18])))
        types = dict.fromkeys(names, "string")
        rows = index_of(path, delimiter=delimiter, types=types)
    assert rows.index.schema.names == names
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=5)))
    bounds = [0, *cuts, len(rows)]
    found = [rows.read(a, b).to_pylist() for a, b in itertools.pairwise(bounds)]
    expected = [dict(zip(names, row, strict=True)) for row in table]
    assert [row for part in found for row in part] == expected


def as_line(row: list[str], delimiter: str, always: bool) -> str:
    """A record with quotes around every field, or where they are needed."""
    special = re.compile(rf'["\r\n{delimiter}]')
    alone = len(row) == 1 and not row[0]  # unquoted, it would be an empty line
    return delimiter.join(
        '"' + value.replace('"', '""') + '"' if always or alone or special.search(value) else value
        for value in row
    )


LEXED = st.text(st.sampled_from('a,"\n\r'), max_size=30)


@settings(max_examples=500, deadline=None)
@given(LEXED)
@example('5" x\n"a\nb"\n')
@example('"a"b"\n,"\n"\n')
@example('"""\n"\n\r\r\n\r')
def test_lines_end_where_arrow_ends_them(text: str) -> None:
    """Each line by itself parses to the same rows as all together, so none is cut or joined."""
    data = text.encode()
    lines = find_lines(data + b"\n", ",")
    if not len(lines.ends) or lines.ends[-1] <= len(data) - 1:
        return  # a quote that does not close: reported elsewhere
    starts = np.concatenate(([0], lines.ends[:-1]))
    pieces = [(data + b"\n")[a:b] for a, b in zip(starts, lines.ends, strict=True)]
    apart = [parsed_rows(piece) for piece in pieces]
    assert [bool(rows) for rows in apart] == lines.filled.tolist()
    together = parsed_rows(data + b"\n")
    assert [row for rows in apart for row in rows] == together


def parsed_rows(data: bytes) -> list[Any]:
    """Rows of any number of fields, through Arrow's handler of rows that do not fit."""
    seen: list[Any] = []

    def keep(row: Any) -> str:
        seen.append(row.text)
        return "skip"

    impossible = 50
    arrow_csv.read_csv(
        pa.BufferReader(data),
        read_options=arrow_csv.ReadOptions(
            column_names=[str(i) for i in range(impossible)], use_threads=False
        ),
        parse_options=arrow_csv.ParseOptions(newlines_in_values=True, invalid_row_handler=keep),
    )
    return seen


COLUMNS = {
    "int": ["1", "-7", "", "12"],
    "hex": ["0x1F", "3", "4", "5"],
    "real": ["1.5", "2", "nan", "1e9"],
    "grown": ["1", "2", "3", "4.5"],
    "truth": ["true", "False", "", "true"],
    "bits": ["1", "0", "1", "true"],
    "mixed hex": ["0x1F", "3", "4", "4.5"],
    "date": ["2020-01-01", "2021-02-03", "", "2022-01-01"],
    "day or time": ["2020-01-01", "2020-01-01 10:00:00", "2020-01-01", "2020-01-01 10:00:00.5"],
    "zoned": ["2020-01-01T10:00:00Z"] * 4,
    "old": ["1600-01-01 00:00:00", "2020-01-01 00:00:00", "2020-01-01", "2020-01-01 00:00:00.5"],
    "clock": ["10:00:00", "11:00", "", "12:00:00"],
    "text": ["a", "1", "2", "3"],
    "late text": ["1", "2", "3", "x"],
    "none": ["", "", "", ""],
    "bytes": ["a", "b", "c", "\udcff"],
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("files", [1, 4], ids=["one file", "four files"])
def test_types_are_those_of_a_plain_read_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: int
) -> None:
    """Each row is inferred apart from the others, and the outcome is as if it were not."""
    values = COLUMNS[name]
    rows = [f"{value},x\n".encode("utf-8", "surrogateescape") for value in values]
    if files == 1:
        (tmp_path / "all.csv").write_bytes(b"c,d\n" + b"".join(rows))
        in_small_chunks(monkeypatch)
    else:
        for number, row in enumerate(rows):
            (tmp_path / f"{number}.csv").write_bytes(b"c,d\n" + row)
    found = index_of(tmp_path)
    expected = arrow_csv.read_csv(pa.BufferReader(b"c,d\n" + b"".join(rows)))
    assert found.index.schema == expected.schema
    assert found.read(0, 4).to_pylist() == expected.to_pylist() or name == "real"


def in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = data_files.stream
    monkeypatch.setattr(data_files, "stream", lambda file: whole(file, 8))


@pytest.mark.usefixtures("small_blocks")
def test_empty_lines_and_missing_last_newline_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "gaps.csv"
    path.write_bytes(b"\n\r\na,b\r\n\r\n1,2\r\n\n\n3,4\r\n\r\n5,6")
    rows = index_of(path)
    assert rows.read(0, 3).to_pydict() == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert rows.read(1, 2).to_pydict() == {"a": [3], "b": [4]}


@pytest.mark.usefixtures("small_blocks")
def test_byte_order_mark_is_removed_at_the_start_of_a_file_only(tmp_path: Path) -> None:
    path = tmp_path / "marks.csv"
    values = [f"\ufeffvalue of row {i:020}" for i in range(20)]
    path.write_text("\n".join(["\ufeffname", *values]))
    rows = index_of(path)
    assert len(rows.index.files[0].blocks) > 5
    assert [rows.read(i, i + 1).to_pydict() for i in range(20)] == [{"name": [v]} for v in values]


@pytest.mark.parametrize("ending", ["csv.gz", "csv.bz2", "csv.zst", "csv"])
def test_compressed_file_is_read_like_a_plain_one(tmp_path: Path, ending: str) -> None:
    lines = "".join(f'{i},"line\n{i}"\n' for i in range(30_000))
    content = ("number,text\n" + lines).encode()
    path = tmp_path / f"data.{ending}"
    compress: dict[str, Any] = {
        "csv.gz": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
        "csv.bz2": bz2.compress,
        "csv.zst": lambda data: bytes(pa.Codec("zstd").compress(data)),
        "csv": lambda data: data,
    }
    path.write_bytes(compress[ending](content))
    rows = index_of(path)
    assert len(rows) == 30_000
    for start, stop in ((29_990, 30_000), (0, 10), (14_000, 16_000)):
        expected = [{"number": i, "text": f"line\n{i}"} for i in range(start, stop)]
        assert rows.read(start, stop).to_pylist() == expected


def test_large_compressed_file_is_read_as_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtruntime.data.readers.compression import InflatedFiles

    path = tmp_path / "large.csv.gz"
    path.write_bytes(gzip.compress(b"n\n" + b"".join(b"%d\n" % i for i in range(200_000))))
    rows = index_of(path)
    rows._reader._inflated = InflatedFiles(kept_bytes=1000)  # type: ignore[attr-defined]
    for start in (0, 100_000, 150_000, 149_000, 5, 199_990):
        assert rows.read(start, start + 10)["n"].to_pylist() == list(range(start, start + 10))


def test_columns_in_another_order_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,x\n")
    (tmp_path / "2.csv").write_text("b,a\ny,2\n")
    assert index_of(tmp_path).read(0, 2).to_pydict() == {"a": [1, 2], "b": ["x", "y"]}


def test_dialect_is_chosen_by_options_or_ending(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("a;b\n1;2,5\n")
    assert index_of(tmp_path / "s.csv", delimiter=";").read(0, 1).to_pydict() == {
        "a": [1],
        "b": ["2,5"],
    }
    (tmp_path / "t.tsv").write_text("a\tb\n1\t2\n")
    assert index_of(tmp_path / "t.tsv").read(0, 1).to_pydict() == {"a": [1], "b": [2]}
    (tmp_path / "n.csv").write_text("1,2\n3,4\n")
    assert index_of(tmp_path / "n.csv", header=False).read(0, 2).to_pydict() == {
        "f0": [1, 3],
        "f1": [2, 4],
    }
    typed = index_of(tmp_path / "n.csv", header=False, types={"f0": "string", "f1": "float32"})
    assert [column.type for column in typed.index.columns] == ["string", "float"]


def test_record_larger_than_a_chunk_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wide.csv"
    path.write_text('a,b\n1,"' + "x\n" * 2_000_000 + '"\n2,y\n')
    rows = index_of(path)
    assert rows.read(1, 2).to_pydict() == {"a": [2], "b": ["y"]}
    assert len(rows.read(0, 1)["b"][0].as_py()) == 4_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'a,b\n1,2\n3,"4\n5,6\n', "bad.csv: the record after 2 others, at byte 8, has a quoted"),
        (b"a,b\n1,2\n3\n4,5\n", r"bad.csv: row 1 \(from byte 4\) .*Expected 2 columns, got 1: 3"),
        (b"a,a\n1,2\n", "bad.csv has two columns named 'a'"),
        (b"a\0b,c\n1,2\n", "bad.csv is not a csv file"),
        (b"PAR1....", "bad.csv is not a csv file but looks like parquet.*format='parquet'"),
        (gzip.compress(b"a,b\n1,2\n")[:-9], "bad.csv cannot be decompressed as gzip"),
    ],
    ids=["quote", "short row", "names", "binary", "parquet", "cut off"],
)
def test_damaged_file_is_named_with_place_and_remedy(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(ShardError, match=message):
        index_of(path)


def test_value_that_is_not_of_the_given_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "given.csv"
    path.write_text("a,b\n1,2\nx,3\n")
    with pytest.raises(ShardError, match=r"given\.csv: .*int32: invalid value 'x'"):
        index_of(path, types={"a": "int32"})


def test_mixed_columns_name_both_files_and_the_difference(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("a,c\n1,2\n")
    message = r"1\.csv and .*2\.csv .*only the first has 'b'; only the second has 'c'"
    with pytest.raises(ShardError, match=message):
        index_of(tmp_path)


def test_files_without_rows_are_allowed_beside_others(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n")
    (tmp_path / "2.csv").write_bytes(b"")
    (tmp_path / "3.csv").write_text("a,b\n1,2\n")
    assert index_of(tmp_path).read(0, 1).to_pydict() == {"a": [1], "b": [2]}
    (tmp_path / "3.csv").unlink()
    with pytest.raises(ShardError, match="has 2 files and no samples"):
        index_of(tmp_path)
