"""Readers: one for each file format, behind one interface.

A *row block* is the unit in which a file is read: a row group of Parquet, a run of records of CSV
and TFRecord. Read ``format_reader`` first, then ``parquet``.
"""

from __future__ import annotations

from ...errors import ShardError
from ...storage import DiskCache, data_files
from ...types import FORMATS
from .csv import CsvReader
from .format_reader import (
    CsvOptions,
    IndexedFile,
    Options,
    ParquetOptions,
    Reader,
    RowBlocks,
    SchemaConflict,
    TfrecordOptions,
)
from .parquet import ParquetReader
from .tfrecord import TfrecordReader

__all__ = [
    "CsvOptions",
    "IndexedFile",
    "Options",
    "ParquetOptions",
    "Reader",
    "RowBlocks",
    "SchemaConflict",
    "TfrecordOptions",
    "default_options",
    "reader_for",
]


def default_options(format: str) -> Options:
    """The default options of a format; ``ShardError`` when it is unknown."""
    options: dict[str, Options] = {
        "parquet": ParquetOptions(),
        "csv": CsvOptions(),
        "tfrecord": TfrecordOptions(),
    }
    if format not in options:
        raise ShardError(f"format {format!r} is unknown: use {', '.join(FORMATS)}")
    return options[format]


def reader_for(options: Options, cache: DiskCache | None = None) -> Reader:
    """Return a reader of the options' format; with a ``cache`` it reads objects through that."""
    source = data_files if cache is None else cache
    match options:
        case CsvOptions():
            return CsvReader(options, source)
        case TfrecordOptions():
            return TfrecordReader(options, source)
        case ParquetOptions():
            return ParquetReader(source)
