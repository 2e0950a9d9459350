"""Training data: the files that a path, folder, glob or URL names, and reading them.

Every read notices a file that is not the one that was indexed.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from .._background import Ahead, side_by_side
from ..errors import ShardError, ShardNotFoundError
from .backend import changed, data_error, storage_errors
from .object_client import (
    IMPATIENT,
    ObjectUrl,
    StoreOptions,
    list_pages,
    parse_object_url,
    store_for,
)
from .urls import absolute, is_remote

if TYPE_CHECKING:
    from obstore import ObjectMeta

if TYPE_CHECKING:
    from obstore import GetOptions


_WILDCARD = re.compile(r"[*?[]")
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class FileStat:
    """One file or object, as it was when it was listed."""

    url: str
    """An absolute local path, or the URL of an object."""
    size: int
    fingerprint: str
    """Changes with the content: an object's ETag, a local file's size and modification time."""

    @property
    def is_local(self) -> bool:
        """Whether it is in this machine's file system."""
        return "://" not in self.url


def expand(path: str | os.PathLike[str], suffixes: Sequence[str] = ()) -> list[FileStat]:
    """Return the files that ``path`` names, in an order that is the same on every machine.

    A file is taken as it is. A folder is searched to any depth for names that end in one of
    ``suffixes`` (all names when there are none). A glob (``*``, ``?``, ``[...]``, and ``**`` for
    any depth) takes the files it matches and searches the folders it matches; ``suffixes`` choose
    among them when they fit any. Names that start with ``.`` or ``_`` are left out. Numbers in
    names are ordered by value: ``part-2`` comes before ``part-10``.

    Raises ``ShardNotFoundError`` if nothing is there, and ``StorageError`` if the store fails.
    """
    place = absolute(path)
    stats = _find_objects(parse_object_url(place)) if is_remote(place) else _find_files(place)
    if isinstance(stats, FileStat):
        return [stats]
    named_by_glob = _WILDCARD.search(place) is not None
    files = {name: stat for name, stat in stats.items() if not _is_hidden(name)}
    chosen = _choose(files, suffixes, named_by_glob)
    if not chosen:
        raise _nothing(place, files, suffixes, named_by_glob)
    return [files[name] for name in sorted(chosen, key=natural_order)]


def look(path: str | os.PathLike[str]) -> FileStat:
    """Return any file that ``path`` names, to see whether something is there and can be reached.

    Raises as :func:`expand` does, and does not wait long for a store that does not answer.
    """
    place = absolute(path)
    if not is_remote(place):
        return expand(place)[0]
    url = parse_object_url(place)
    root, pattern = _split_glob(url.key)
    exact = _head(url, patient=False) if url.key and pattern is None else None
    if exact is not None:
        return exact
    for name, stat in _objects_under(url, root, patient=False):
        if not _is_hidden(name) and (pattern is None or pattern.fullmatch(name)):
            return stat
    raise ShardNotFoundError(f"{url} has no objects")


def natural_order(name: str) -> tuple[tuple[tuple[str | int, ...], ...], str]:
    """A sort key that orders numbers in names by value, and folders before what follows them."""
    parts = (re.split(r"([0-9]+)", part) for part in name.split("/"))
    keys = (tuple(int(p) if i % 2 else p for i, p in enumerate(part)) for part in parts)
    return tuple(keys), name


def local_stat(path: str, info: os.stat_result | None = None) -> FileStat:
    """The state of a local file."""
    info = info or os.stat(path)
    return FileStat(path, info.st_size, f"{info.st_size}-{info.st_mtime_ns}")


def _find_files(place: str) -> FileStat | dict[str, FileStat]:
    """A local file itself, or the files under a folder or glob by name relative to its root."""
    with storage_errors("read", place, data=True):
        if os.path.isfile(place):
            return local_stat(place)
        if os.path.isdir(place):
            return {os.path.relpath(file, place): local_stat(file) for file in _walk(place)}
        if not _WILDCARD.search(place):
            raise _missing(place, _local_names)
        files = {file for match in glob.glob(place, recursive=True) for file in _walk(match)}
        return {os.path.relpath(file, _glob_root(place)): local_stat(file) for file in files}


def _walk(path: str) -> Iterator[str]:
    """The file itself, or every file under a folder; an unreadable folder is an error."""
    if not os.path.isdir(path):
        yield path
        return

    def fail(error: OSError) -> None:
        raise error

    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(path, onerror=fail, followlinks=True):
        info = os.stat(folder)
        if (info.st_dev, info.st_ino) in seen:  # a link back to where we came from
            folders.clear()
            continue
        seen.add((info.st_dev, info.st_ino))
        yield from (os.path.join(folder, name) for name in names)


def _find_objects(url: ObjectUrl) -> FileStat | dict[str, FileStat]:
    """An object itself, or the objects under a prefix or glob by name relative to its root."""
    root, pattern = _split_glob(url.key)
    if pattern is None:
        exact = _head(url) if url.key else None
        return exact or dict(_objects_under(url, root)) or _no_objects(url)
    return {name: stat for name, stat in _objects_under(url, root) if pattern.fullmatch(name)}


def _split_glob(key: str) -> tuple[str, re.Pattern[str] | None]:
    """The folder to search, and what the names in it must match when ``key`` is a glob."""
    wildcard = _WILDCARD.search(key)
    if wildcard is None:
        return key, None
    root = key[: wildcard.start()].rpartition("/")[0]
    return root, glob_pattern(key[len(root) :].lstrip("/"))


def _head(url: ObjectUrl, *, patient: bool = True) -> FileStat | None:
    import obstore

    store = store_for(url, patient=patient)
    with storage_errors("read", str(url), data=True):
        try:
            return _object_stat(url, obstore.head(store, url.key))
        except FileNotFoundError:
            return None


def _objects_under(
    url: ObjectUrl, prefix: str, *, patient: bool = True
) -> Iterator[tuple[str, FileStat]]:
    store = store_for(url, patient=patient)
    options = StoreOptions() if patient else IMPATIENT
    with storage_errors("list", f"{url.base}{prefix}", data=True):
        for page in list_pages(store, prefix, options.retry_seconds):
            for meta in page:
                yield meta["path"][len(prefix) :].lstrip("/"), _object_stat(url, meta)


def _object_stat(url: ObjectUrl, meta: ObjectMeta) -> FileStat:
    return FileStat(url.base + meta["path"], meta["size"], _fingerprint(meta))


def _fingerprint(meta: ObjectMeta) -> str:
    tag = meta["e_tag"]
    if not tag:
        return f"{meta['size']}-{meta['last_modified'].isoformat()}"
    # Azure leaves out the quotes in listings.
    return tag if tag.startswith(('"', "W/")) else f'"{tag}"'


def glob_pattern(text: str) -> re.Pattern[str]:
    """A pattern for the relative names that a glob matches, or that lie under a match."""
    pieces: list[str] = []
    parts = text.split("/")
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            pieces.append(".*" if last else "(?:[^/]+/)*")
        else:
            pieces.append(_segment_pattern(part) + ("" if last else "/"))
    return re.compile("".join(pieces) + "(?:/.*)?", re.DOTALL)


def _segment_pattern(part: str) -> str:
    def convert(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] == "*":
            return "[^/]*"
        if token == "?":
            return "[^/]"
        if len(token) > 1:
            inside = token[1:-1].replace("\\", r"\\")
            return f"[{'^' + inside[1:] if inside[0] == '!' else inside}]"
        return re.escape(token)

    return re.sub(r"\*+|\?|\[!?[^\]]+\]|.", convert, part, flags=re.DOTALL)


def _glob_root(place: str) -> str:
    """The folder that holds everything a glob can match."""
    return os.path.dirname(_WILDCARD.split(place, maxsplit=1)[0]) or "/"


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/")) or name.endswith("/")


def _choose(names: Iterable[str], suffixes: Sequence[str], named_by_glob: bool) -> list[str]:
    """The names that fit; numbered parts (``train-00001-of-00128``) often have no suffix."""
    names = list(names)
    ending = re.compile(f"(?:{'|'.join(map(re.escape, suffixes))})(?:-\\d+-of-\\d+)?$", re.I)
    fitting = [name for name in names if ending.search(name)]
    if fitting or not suffixes:
        return fitting or names
    return names if named_by_glob else [name for name in names if "." not in Path(name).name]


def _nothing(
    place: str, files: dict[str, FileStat], suffixes: Sequence[str], named_by_glob: bool
) -> ShardNotFoundError:
    if named_by_glob:
        root = _glob_root(place)
        return ShardNotFoundError(f"no file matches {place!r}: check the pattern under {root!r}")
    if not files:
        return ShardNotFoundError(f"{place!r} has no files in it")
    others = ", ".join(sorted(files, key=natural_order)[:_NAMES_SHOWN])
    return ShardNotFoundError(
        f"{place!r} has no file that ends in {' or '.join(suffixes)}, only {len(files)} others "
        f"({others}): name the files by a glob if they have another ending"
    )


def _no_objects(url: ObjectUrl) -> dict[str, FileStat]:
    def names(place: str) -> list[str]:
        import obstore

        prefix = parse_object_url(place).key
        with storage_errors("list", place, data=True):
            listing = obstore.list_with_delimiter(store_for(url), prefix or None)
        paths = [*listing["common_prefixes"], *(meta["path"] for meta in listing["objects"])]
        return [path.rpartition("/")[2] for path in paths]

    if not url.key:
        raise ShardNotFoundError(f"{url} has no objects in it")
    raise _missing(str(url), names)


def _local_names(place: str) -> list[str]:
    return sorted(os.listdir(place)) if os.path.isdir(place) else []


def _missing(place: str, names_in: Callable[[str], list[str]]) -> ShardNotFoundError:
    """The error for a place that is not there, with what is nearby."""
    name, parent = place, place
    names: list[str] = []
    while not names and parent.rstrip("/").count("/") > (2 if is_remote(place) else 0):
        parent, _, name = parent.rstrip("/").rpartition("/")
        names = names_in(parent or "/")
    close = difflib.get_close_matches(name, names, _NAMES_SHOWN, 0.5) or names[:_NAMES_SHOWN]
    nearby = f"; {parent or '/'} has {', '.join(close)}" if close else ""
    rest = len(names) - len(close)
    more = f" and {rest} more" if close and rest > 0 else ""
    return ShardNotFoundError(f"there is no file or folder {place!r}{nearby}{more}")


PART = 16 * 2**20
"""Longer ranges of an object are fetched in parallel, in parts of this size."""
PARALLEL_PARTS = 8
CHUNK = 8 * 2**20


class ByteSource(Protocol):
    """Where readers get bytes from: this module, or a cache in front of it."""

    def read_range(self, file: FileStat, offset: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``offset`` on."""

    def read_ranges(self, file: FileStat, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each ``(offset, length)``."""

    def stream(self, file: FileStat) -> Iterator[bytes]:
        """Yield a file's bytes from first to last."""


def read_range(file: FileStat, offset: int, length: int) -> bytes:
    """Return ``length`` bytes of a file from ``offset`` on.

    ``ShardError`` if the file is shorter, or is not the one that ``file`` describes.
    """
    check_range(file, offset, length)
    if length == 0:
        return b""
    if file.is_local:
        with open_local(file) as source:
            return _read_exactly(source, offset, length, file.url)
    return read_ranges(file, [(offset, length)])[0]


def check_range(file: FileStat, offset: int, length: int) -> None:
    """Raise ``ShardError`` if a file is too short to have a range."""
    if length and offset + length > file.size:
        raise ShardError(
            f"{file.url} has {file.size} bytes, and {length} at {offset} were asked for: "
            "index the dataset again"
        )


def read_ranges(file: FileStat, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of each ``(offset, length)``, of an object in parallel."""
    if file.is_local:
        return [read_range(file, offset, length) for offset, length in ranges]
    parts = [list(_parts(*span)) for span in ranges]
    every = [part for span in parts for part in span]
    lanes = max(1, min(PARALLEL_PARTS, len(every)))
    fetched = iter(side_by_side(every, lambda part: _fetch(file, *part), lanes))
    return [b"".join(next(fetched) for _ in span) for span in parts]


def stream(file: FileStat, chunk: int = CHUNK) -> Iterator[bytes]:
    """Yield a file's bytes from first to last; an object's next chunk is fetched meanwhile."""
    if file.is_local:
        with open_local(file) as source, storage_errors("read", file.url, data=True):
            while data := source.read(chunk):
                yield data
        return
    yield from read_ahead(file, chunk, _fetch)


def read_ahead(
    file: FileStat, chunk: int, read: Callable[[FileStat, int, int], bytes]
) -> Iterator[bytes]:
    """Yield a file in chunks; while one is used, the next is read by another thread."""
    chunks = (read(file, at, min(chunk, file.size - at)) for at in range(0, file.size, chunk))
    ahead = Ahead(chunks, 1, "strata-read-ahead")
    try:
        yield from ahead
    finally:
        ahead.close()


def download(file: FileStat, destination: str | os.PathLike[str]) -> None:
    """Copy a file to a local path, where it appears only when it is complete."""
    target = os.path.abspath(os.fspath(destination))
    with storage_errors("write", target, data=True):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".download-")
        try:
            with os.fdopen(handle, "wb") as sink:
                for data in stream(file):
                    sink.write(data)
            os.replace(partial, target)
        except BaseException:
            os.unlink(partial)
            raise


def open_local(file: FileStat) -> BinaryIO:
    """Open a local file; ``ShardError`` if it is not the one that ``file`` describes."""
    try:
        source = open(file.url, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
    except OSError as exc:
        raise data_error(exc, "read", file.url) from exc
    if local_stat(file.url, os.fstat(source.fileno())).fingerprint != file.fingerprint:
        source.close()
        raise changed(file.url)
    return source


def check_unchanged(file: FileStat) -> None:
    """Raise ``ShardError`` if a local file is not the one that ``file`` describes."""
    try:
        now = local_stat(file.url)
    except OSError as exc:
        raise data_error(exc, "read", file.url) from exc
    if now.fingerprint != file.fingerprint:
        raise changed(file.url)


def _read_exactly(source: BinaryIO, offset: int, length: int, name: str) -> bytes:
    with storage_errors("read", name, data=True):
        data = os.pread(source.fileno(), length, offset)
        while len(data) < length:
            more = os.pread(source.fileno(), length - len(data), offset + len(data))
            if not more:
                raise changed(name)
            data += more
    return data


def _parts(offset: int, length: int) -> Iterator[tuple[int, int]]:
    end = offset + length
    return ((at, min(PART, end - at)) for at in range(offset, end, PART))


def _fetch(file: FileStat, offset: int, length: int) -> bytes:
    """Fetch one range of an object, on the condition that it is the object that was indexed."""
    import obstore

    url = parse_object_url(file.url)
    options: GetOptions = {"range": (offset, offset + length)}
    if file.fingerprint.startswith('"'):
        options["if_match"] = file.fingerprint
    store = store_for(url)
    with storage_errors("read", file.url, data=True):
        data = bytes(obstore.get(store, url.key, options=options).bytes())
    if len(data) != length:
        raise changed(file.url)
    return data
