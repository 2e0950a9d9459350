"""How files of a format are to be read, where there is a choice."""

from __future__ import annotations

import msgspec


class ParquetOptions(msgspec.Struct, frozen=True, tag="parquet"):
    """Parquet describes itself: there is nothing to choose."""


class CsvOptions(msgspec.Struct, frozen=True, tag="csv", forbid_unknown_fields=True):
    """The dialect of CSV files. Fields are quoted by ``"``, which is doubled inside."""

    delimiter: str = ""
    """One character; by default a comma, and a tab in files named ``.tsv``."""
    header: bool = True
    """Whether the first row names the columns; else they are ``f0``, ``f1`` and so on."""
    types: dict[str, str] = {}
    """Arrow type names (``"int32"``, ``"string"``) of columns whose type is not to be inferred."""

    def __post_init__(self) -> None:
        if self.delimiter and (
            len(self.delimiter.encode()) != 1 or self.delimiter in '"\r\n' or self.delimiter > "~"
        ):
            raise ValueError(f"delimiter must be one ASCII character, not {self.delimiter!r}")


class TfrecordOptions(msgspec.Struct, frozen=True, tag="tfrecord", forbid_unknown_fields=True):
    """What TFRecord files hold."""

    raw: bool = False
    """Give each record as it is, in the column ``record``, and do not parse it as an Example."""


Options = ParquetOptions | CsvOptions | TfrecordOptions
