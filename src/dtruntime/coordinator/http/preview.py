"""The first rows of a registered dataset, read only where that is allowed and cheap."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from functools import partial
from typing import Any

import msgspec

from ..._threads import abandonable
from ...config import CoordinatorConfig, split_address
from ...errors import StrataError
from ...telemetry import EventLog
from ..state.records import DatasetRecord
from .answers import Failure
from .views import Preview

log = EventLog("http")

ROWS_MOST = 100
COLUMNS_MOST = 64
CELL_LENGTH = 200
BYTES_MOST = 64 * 1024 * 1024
"""A file, or a part of one that can only be decoded whole, that is larger is not read."""
AT_ONCE = 2
SECONDS = 20.0


class Previews:
    """Reads rows in other threads, a few at a time, also when some of them hang."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.enabled = config.preview == "on" or (
            config.preview == "auto" and is_loopback(config.http_address)
        )
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def read(self, record: DatasetRecord, rows: int) -> Preview:
        """The first rows; raises `Failure` that says why there are none."""
        if not self.enabled:
            raise Failure(
                403,
                "preview_disabled",
                'rows of datasets are not shown by this coordinator: set preview = "on" in '
                "[coordinator], or bind --http to loopback",
            )
        path = first_file(record)
        slow = f"{AT_ONCE} other previews have not ended within {SECONDS:g} s"
        try:
            async with asyncio.timeout(SECONDS):
                await self._turns.acquire()
                slow = f"{path} took longer than {SECONDS:g} s"
                return await asyncio.shield(self._begin(path, record, min(rows, ROWS_MOST)))
        except TimeoutError:
            raise _unreadable(record, slow) from None
        except ImportError as exc:
            raise _unreadable(
                record, f"{exc}; install it with: pip install 'dtruntime[data]'"
            ) from None
        except (StrataError, OSError, ValueError) as exc:
            log.warning("preview.failed", dataset=record.dataset_id, error=str(exc))
            raise _unreadable(record, str(exc)) from exc

    def _begin(self, path: str, record: DatasetRecord, rows: int) -> asyncio.Future[Preview]:
        """Read on a thread, which has the turn until it ends, however long nobody waits for it."""
        try:
            reading = abandonable(partial(_read, path, record, rows), "strata-preview")
        except RuntimeError:  # no thread could be started
            self._turns.release()
            raise
        reading.add_done_callback(self._ended)
        return reading

    def _ended(self, reading: asyncio.Future[Preview]) -> None:
        self._turns.release()
        reading.exception()  # is then not missed where nobody waits for it any more


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
    if not address:
        return False
    host = split_address(address)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def first_file(record: DatasetRecord) -> str:
    """The first registered file; no other is ever read."""
    layout = record.layout
    if layout is None or not layout.files:
        raise Failure(
            409,
            "files_unknown",
            f"dataset {record.dataset_id!r} was registered by its numbers alone: nobody has seen "
            "its files",
        )
    return layout.root + layout.files[0]


def _read(path: str, record: DatasetRecord, rows: int) -> Preview:
    from ...data.readers import IndexedFile, Options, default_options, reader_for
    from ...storage.locations import look

    options = default_options(record.format)
    if record.layout is not None and record.layout.options:
        options = msgspec.json.decode(record.layout.options, type=Options)
    reader = reader_for(options)
    if not path.split("?")[0].endswith(reader.suffixes):
        raise ValueError(f"{path} does not have the name of a {record.format} file")
    if "://" not in path and not os.path.isfile(path):
        raise ValueError(f"{path} is not a file on the coordinator's machine")
    stat = look(path)
    if record.format != "parquet" and stat.size > BYTES_MOST:
        raise ValueError(f"{path} has {stat.size} bytes, more than a preview reads ({BYTES_MOST})")
    found = reader.index_file(stat, lambda _: None)
    if len(found.blocks) and int(found.blocks.lengths[0]) > BYTES_MOST:
        raise ValueError(f"the first part of {path} is larger than a preview reads ({BYTES_MOST})")
    file = IndexedFile(stat, found.blocks, found.schema, found.seekable)
    names = found.schema.names[:COLUMNS_MOST]
    table = reader.read(file, 0, min(rows, file.samples), names or None)
    columns = [column.to_pylist() for column in table.columns]
    cells = [[_text(column[row]) for column in columns] for row in range(table.num_rows)]
    return Preview(list(table.column_names), cells)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        shown = value[: CELL_LENGTH // 2].hex(" ")
        return f"{len(value)} bytes: {shown}"[:CELL_LENGTH]
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= CELL_LENGTH else f"{text[:CELL_LENGTH]}…"


def _unreadable(record: DatasetRecord, why: str) -> Failure:
    return Failure(
        409, "unreadable", f"the files of dataset {record.dataset_id!r} cannot be shown: {why}"
    )
