"""In which format the files of a run's data are, by their names."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError, ShardNotFoundError
from ..storage.data_files import absolute, expand, is_remote

_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}
_NAMES_SHOWN = 4


def format_by_name(name: str) -> str | None:
    """The format that the name of a file tells."""
    for suffix in Path(name).suffixes:
        if suffix.lower() in _SUFFIXES:
            return _SUFFIXES[suffix.lower()]
    return "tfrecord" if "tfrecord" in Path(name).name.lower() else None


def format_of(data: str | os.PathLike[str]) -> str:
    """The format that the name tells, or else those of the files that it names.

    ``ShardNotFoundError`` when no file is there, ``ConfigError`` when no name tells the format.
    """
    place = os.fspath(data)
    if found := format_by_name(place):
        return found
    if is_remote(place):
        raise ConfigError(
            f"the format of {place} is not clear from its name: give format='parquet', 'csv' or "
            "'tfrecord'"
        )
    names = [Path(file.url).name for file in expand(absolute(place))]
    told = list(filter(None, map(format_by_name, names)))
    if not told:
        raise _unknown(place, names)
    return told[0]


def _unknown(place: str, names: list[str]) -> ShardNotFoundError:
    some = ", ".join(names[:_NAMES_SHOWN]) + ", ..." * (len(names) > _NAMES_SHOWN)
    return ShardNotFoundError(
        f"{place} has no files whose names tell that they are parquet, csv or tfrecord, only "
        f"{some}: if they are, give format=; other formats cannot be read from files, pass "
        "something that gives batches when it is iterated"
    )
