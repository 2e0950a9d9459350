"""Streams: where a run's batches come from, and what its ``data`` argument means."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ShardNotFoundError
from ..storage.data_files import expand
from ..storage.urls import absolute, is_remote
from ..types import check_whole
from .crew import Crew

_PACKAGE = __name__.partition(".")[0]
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What to read, and how."""

    data: Any
    format: str | None
    dataset: str
    loader: Mapping[str, Any]


class Stream(ABC):
    """Batches from a position on, which is saved with the rest of the run."""

    epoch: int

    @abstractmethod
    def open(self, crew: Crew) -> None:
        """Prepare to read as a member of a crew, from the start."""

    @abstractmethod
    def batches(self) -> Iterator[tuple[Any, int]]:
        """Batches up to the end of the epoch, each with its number of samples."""

    def steps_in(self, epochs: int, step: int) -> int | None:
        """The number of steps in so many epochs, if this is ``step``; None if nobody knows."""
        return None

    @abstractmethod
    def used(self) -> None:
        """Move the position behind the last batch: it has been used."""

    @abstractmethod
    def state(self) -> Any:
        """The position behind the last batch that was used."""

    @abstractmethod
    def restore(self, states: Sequence[Any], index: int) -> None:
        """Go on from what the ranks saved; this rank is now at ``index``.

        Of many ranks only the states of the first and of this one are given; others are None.
        """

    def explain(self, error: BaseException) -> str:
        """What may have caused an error in the work on a batch; empty if nothing is known."""
        return ""

    def close(self) -> None:  # noqa: B027 - some have nothing to close
        """Stop reading ahead."""


class StepNumbers(Stream):
    """The stream of a run without data: the numbers of the steps, without an end."""

    def __init__(self) -> None:
        self.epoch = 0
        self._next = 0

    def open(self, crew: Crew) -> None:
        """Start at 0."""
        self._next = 0

    def batches(self) -> Iterator[tuple[Any, int]]:
        """The numbers from the position on."""
        for number in count(self._next):
            yield number, 1

    def used(self) -> None:
        """Go to the next number."""
        self._next += 1

    def state(self) -> Any:
        """The next number."""
        return {"next": self._next}

    def restore(self, states: Sequence[Any], index: int) -> None:
        """Go on with the next number."""
        self._next = states[0]["next"]


# The data argument


def is_count(data: Any) -> bool:
    """Whether it is a number of samples."""
    return isinstance(data, Integral) and not isinstance(data, bool)


def is_iterated(data: Any) -> bool:
    """Whether a run iterates it as it is."""
    if is_count(data) or isinstance(data, str | os.PathLike):
        return False
    is_ours = any(kind.__module__.partition(".")[0] == _PACKAGE for kind in type(data).__mro__)
    return not is_ours or hasattr(data, "__iter__")


def check_data(data: Any, options: Iterable[str]) -> None:
    """``TypeError`` or ``ValueError`` if data cannot be read, or not with options of `Loader`."""
    if is_count(data):
        check_whole("data", data, 1)
    if isinstance(data, str) and not data:
        raise ValueError("data is an empty path: name a file, a folder, a glob or a URL")
    if not is_iterated(data):
        return
    kind = type(data).__name__
    if isinstance(data, Mapping) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise TypeError(
            f"data must be files (a path, glob or URL), a number of samples, a source for Loader, "
            f"or something that gives batches when it is iterated, not a {kind}"
        )
    if isinstance(data, list | tuple) and data and all(map(_names_a_file, data)):
        raise ValueError(
            f"data is a {kind} of {len(data)} paths, which would be iterated as batches: name "
            "their folder, or all of them by a glob such as 'data/*.parquet'"
        )
    if names := sorted(options):
        raise ValueError(
            f"{', '.join(names)} cannot be used with this {kind}: a run iterates it as it is, one "
            "item per step; put samples into batches yourself (torch.utils.data.DataLoader does), "
            "or give files, a number of samples or a source"
        )


def check_lockstep(loader: Mapping[str, Any]) -> None:
    """``ValueError`` if workers would have different numbers of steps: they save together."""
    if loader.get("order") == "affinity" and loader.get("last", "keep") == "keep":
        raise ValueError(
            "with order='affinity' and last='keep' workers have different numbers of steps, and "
            "could not save together: use last='pad' or last='drop', or order='global'"
        )


def _names_a_file(item: Any) -> bool:
    if isinstance(item, os.PathLike):
        return True
    return isinstance(item, str) and "\n" not in item and format_by_name(item) is not None


def format_by_name(name: str) -> str | None:
    """The format of a file by its name."""
    for suffix in Path(name).suffixes:
        if suffix.lower() in _SUFFIXES:
            return _SUFFIXES[suffix.lower()]
    return "tfrecord" if "tfrecord" in Path(name).name.lower() else None


def format_of(data: str | os.PathLike[str]) -> str:
    """The format of data by its name, or else by the names of its files.

    ``ShardNotFoundError`` if there is no file, ``ConfigError`` if the names do not say.
    """
    place = os.fspath(data)
    if format := format_by_name(place):
        return format
    if is_remote(place):
        raise ConfigError(
            f"the format of {place} is not clear from its name: give format='parquet', 'csv' or "
            "'tfrecord'"
        )
    names = [Path(file.url).name for file in expand(absolute(place))]
    if formats := list(filter(None, map(format_by_name, names))):
        return formats[0]
    some = ", ".join(names[:_NAMES_SHOWN]) + ", ..." * (len(names) > _NAMES_SHOWN)
    raise ShardNotFoundError(
        f"{place} has no files whose names say that they are parquet, csv or tfrecord, only "
        f"{some}: if they are, give format=; other formats cannot be read from files, pass "
        "something that gives batches when it is iterated"
    )
