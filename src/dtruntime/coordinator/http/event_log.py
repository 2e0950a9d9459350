"""The journal for people: levels, sentences, search and export."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..state import Event
from ..state.journal import ALARMS
from .views import Level, LogEntry

_Fields = Mapping[str, str]


def _of(fields: _Fields, name: str) -> str:
    return fields.get(name, "?")


def _why(fields: _Fields, name: str = "reason") -> str:
    return f": {fields[name]}" if fields.get(name) else ""


def _counted(fields: _Fields, name: str) -> str:
    """A number of things that are named in the plural: ``1 shard``, ``3 shards``."""
    number = _of(fields, name)
    return f"{number} {name.removesuffix('s') if number == '1' else name}"


_SENTENCES: dict[str, Callable[[_Fields], str]] = {
    "worker.registered": lambda f: f"{_of(f, 'worker')} joined as rank {_of(f, 'rank')}",
    "worker.dead": lambda f: f"{_of(f, 'worker')} (rank {_of(f, 'rank')}) was lost{_why(f)}",
    "worker.left": lambda f: f"{_of(f, 'worker')} (rank {_of(f, 'rank')}) left{_why(f)}",
    "worker.slow": lambda f: (
        f"{_of(f, 'worker')} is slow: {_of(f, 'step_seconds')} s a step, "
        f"the median is {_of(f, 'median_seconds')} s"
    ),
    "worker.recovered_speed": lambda f: f"{_of(f, 'worker')} keeps up again",
    "epoch.began": lambda f: f"epoch {_of(f, 'epoch')} of dataset {_of(f, 'dataset')} began",
    "epoch.segment": lambda f: (
        f"what is left of epoch {_of(f, 'epoch')} of dataset {_of(f, 'dataset')} was dealt anew"
        f"{_why(f, 'why')}"
    ),
    "epoch.completed": lambda f: (
        f"epoch {_of(f, 'epoch')} of dataset {_of(f, 'dataset')} is complete"
        if "dataset" in f
        else f"every worker has finished epoch {_of(f, 'epoch')}"
    ),
    "barrier.timed_out": lambda f: (
        f"barrier {_of(f, 'barrier')} timed out; {_of(f, 'missing_count')} missing: "
        f"{_of(f, 'missing')}"
    ),
    "checkpoint.begun": lambda f: f"{_of(f, 'ranks')} ranks began to save step {_of(f, 'step')}",
    "checkpoint.committed": lambda f: (
        f"checkpoint {_of(f, 'checkpoint')} of step {_of(f, 'step')} was committed"
    ),
    "checkpoint.aborted": lambda f: (
        f"checkpoint {_of(f, 'checkpoint')} of step {_of(f, 'step')} was given up{_why(f)}"
    ),
    "checkpoint.verified": lambda f: (
        f"checkpoint {_of(f, 'checkpoint')} of step {_of(f, 'step')} was read and is good"
    ),
    "checkpoint.damaged": lambda f: (
        f"checkpoint {_of(f, 'checkpoint')} of step {_of(f, 'step')} is damaged{_why(f)}"
    ),
    "checkpoint.removed": lambda f: (
        f"checkpoint {_of(f, 'checkpoint')} of step {_of(f, 'step')} was deleted{_why(f)}"
    ),
    "epoch.incomplete": lambda f: (
        f"epoch {_of(f, 'epoch')} of dataset {_of(f, 'dataset')} ended with {_of(f, 'missing')} of "
        f"{_of(f, 'expected')} samples missing: {_counted(f, 'workers')} reported"
    ),
    "dataset.registered": lambda f: (
        f"dataset {_of(f, 'dataset')} was registered: {_counted(f, 'samples')} in "
        f"{_counted(f, 'shards')}"
    ),
    "dataset.removed": lambda f: f"dataset {_of(f, 'dataset')} was removed",
    "job.forgotten": lambda f: (
        f"the job was idle and had nothing to keep: it gave way to {_of(f, 'in_favour_of')}"
    ),
    "job.removed": lambda f: (
        f"the job was removed: {_counted(f, 'datasets')}, {_counted(f, 'checkpoints')} on record, "
        f"{_counted(f, 'workers')} alive"
    ),
    "action.requested": lambda f: (
        f"{_of(f, 'what')} was asked for{' of ' + f['worker'] if f.get('worker') else ''}{_why(f)}"
    ),
    "action.completed": lambda f: f"{_of(f, 'what')} is done{_why(f, 'outcome')}",
    "coordinator.stalled": lambda f: f"the coordinator stood still for {_of(f, 'seconds')} s",
    "coordinator.state_lost": lambda f: (
        f"worker {_of(f, 'worker')} was registered in state {_of(f, 'state')}, "
        + (
            "after the copy of it that this coordinator was restored from"
            if f.get("restored") == "True"
            else "which this coordinator has never had"
        )
    ),
    "journal.entry_damaged": lambda f: "this entry of the journal is damaged",
}


def level_of(kind: str) -> Level:
    """How much an event matters."""
    return ALARMS.get(kind, "info")


def sentence(event: Event) -> str:
    """An event in words."""
    say = _SENTENCES.get(event.kind)
    if say is not None:
        return say(event.fields)
    told = " ".join(f"{key}={value}" for key, value in event.fields.items())
    return f"{event.kind} {told}".strip()


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
    """Whether an event is of a job, or of all."""
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
    wanted = search.casefold()
    found = []
    for event in events:
        if not concerns(event, job) or event.id <= after or (before and event.id >= before):
            continue
        if (level and level_of(event.kind) != level) or not _is_kind(event.kind, kind):
            continue
        shown = entry(event)
        if wanted and not _mentions(shown, wanted):
            continue
        found.append(shown)
    return found[::-1]


def _is_kind(kind: str, wanted: str) -> bool:
    return not wanted or kind == wanted or kind.startswith(f"{wanted}.")


def _mentions(shown: LogEntry, wanted: str) -> bool:
    texts = (shown.message, shown.event, *shown.fields.values())
    return any(wanted in text.casefold() for text in texts)


def as_jsonl(entries: Iterable[LogEntry]) -> bytes:
    """One JSON object per line."""
    return b"".join(msgspec.json.encode(one) + b"\n" for one in entries)


def as_csv(entries: Iterable[LogEntry]) -> bytes:
    """A table for spreadsheets, in which no text is taken for a formula."""
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
