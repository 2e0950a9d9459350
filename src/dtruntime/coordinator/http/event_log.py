"""The journal in the HTTP API: search and export."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

import msgspec

from ...events import level_of, sentence
from ..state import Event
from .views import LogEntry


def entry(event: Event) -> LogEntry:
    """An event as it is shown."""
    return LogEntry(
        id=event.id,
        at=event.at,
        level=level_of(event.kind),
        event=event.kind,
        job=event.job,
        message=sentence(event),
        fields=event.fields,
    )


def concerns(event: Event, job: str) -> bool:
    """Whether an event concerns a job."""
    return not job or not event.job or event.job == job


def find(
    events: Iterable[Event],
    *,
    job: str = "",
    search: str = "",
    level: str = "",
    kind: str = "",
    after: int = 0,
    before: int = 0,
) -> list[LogEntry]:
    """The entries that match, newest first."""
    text = search.casefold()
    matches = []
    for event in events:
        if not concerns(event, job) or event.id <= after or (before and event.id >= before):
            continue
        if (level and level_of(event.kind) != level) or (
            kind and not f"{event.kind}.".startswith(f"{kind}.")
        ):
            continue
        shown = entry(event)
        if text and not _mentions(shown, text):
            continue
        matches.append(shown)
    return matches[::-1]


def _mentions(shown: LogEntry, text: str) -> bool:
    texts = (shown.message, shown.event, *shown.fields.values())
    return any(text in value.casefold() for value in texts)


def as_jsonl(entries: Iterable[LogEntry]) -> bytes:
    """One JSON object per line."""
    return b"".join(msgspec.json.encode(one) + b"\n" for one in entries)


def as_csv(entries: Iterable[LogEntry]) -> bytes:
    """CSV for spreadsheets, in which no text is taken for a formula."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(["id", "at", "level", "event", "job", "message", "fields"])
    for one in entries:
        fields = msgspec.json.encode(one.fields).decode()
        texts = (one.level, one.event, one.job, one.message, fields)
        writer.writerow([one.id, f"{one.at:.3f}", *(_plain(text) for text in texts)])
    return out.getvalue().encode()


def _plain(text: str) -> str:
    return f"'{text}" if text[:1] in "=+-@\t\r" and text else text
