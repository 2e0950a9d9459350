"""Events of the journal as people read them: how much each kind matters, and a sentence for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

Level = Literal["info", "warning", "error"]
ALARMS: Mapping[str, Literal["warning", "error"]] = {
    "worker.dead": "error",
    "worker.slow": "warning",
    "barrier.timed_out": "warning",
    "checkpoint.aborted": "warning",
    "checkpoint.damaged": "error",
    "epoch.incomplete": "error",
    "coordinator.stalled": "warning",
    "coordinator.state_lost": "error",
    "journal.entry_damaged": "error",
}
"""How grave each kind of event is that somebody should look at; the others are news."""


class JournalEvent(Protocol):
    """An event, as it is stored or as it was received."""

    @property
    def id(self) -> int:
        """Ascending in the order in which events happened."""

    @property
    def at(self) -> float:
        """When it happened, in seconds since the epoch."""

    @property
    def job(self) -> str:
        """Empty: it concerns the coordinator as a whole."""

    @property
    def kind(self) -> str:
        """Such as ``worker.dead``."""

    @property
    def fields(self) -> Mapping[str, str]:
        """What else is known, by name."""


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


def sentence(event: JournalEvent) -> str:
    """An event in words."""
    say = _SENTENCES.get(event.kind)
    if say is not None:
        return say(event.fields)
    told = " ".join(f"{key}={value}" for key, value in event.fields.items())
    return f"{event.kind} {told}".strip()
