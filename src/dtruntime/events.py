"""Severity and wording of journal events."""

from __future__ import annotations

from collections.abc import Mapping
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
"""The kinds of events that need attention; all others are informational."""


class JournalEvent(Protocol):
    """An event, stored or received."""

    @property
    def id(self) -> int:
        """Ascending in the order in which events happened."""

    @property
    def at(self) -> float:
        """When it happened, in seconds since 1970."""

    @property
    def job(self) -> str:
        """Empty: it concerns the coordinator as a whole."""

    @property
    def kind(self) -> str:
        """Such as ``worker.dead``."""

    @property
    def fields(self) -> Mapping[str, str]:
        """The details, by name."""


_SENTENCES = {
    "worker.registered": "{worker} joined as rank {rank}",
    "worker.dead": "{worker} (rank {rank}) was lost{~reason}",
    "worker.left": "{worker} (rank {rank}) left{~reason}",
    "worker.slow": "{worker} is slow: {step_seconds} s a step, the median is {median_seconds} s",
    "worker.recovered_speed": "{worker} keeps up again",
    "epoch.began": "epoch {epoch} of dataset {dataset} began",
    "epoch.segment": "the rest of epoch {epoch} of dataset {dataset} was reassigned{~why}",
    "epoch.completed": "epoch {epoch} of dataset {dataset} is complete",
    "epoch.incomplete": (
        "epoch {epoch} of dataset {dataset} ended with {missing} of {expected} samples missing: "
        "{#workers} reported"
    ),
    "barrier.timed_out": "barrier {barrier} timed out; {missing_count} missing: {missing}",
    "checkpoint.begun": "{ranks} ranks began to save step {step}",
    "checkpoint.committed": "checkpoint {checkpoint} of step {step} was committed",
    "checkpoint.aborted": "checkpoint {checkpoint} of step {step} was given up{~reason}",
    "checkpoint.verified": "checkpoint {checkpoint} of step {step} was read and is good",
    "checkpoint.damaged": "checkpoint {checkpoint} of step {step} is damaged{~reason}",
    "checkpoint.removed": "checkpoint {checkpoint} of step {step} was deleted{~reason}",
    "dataset.registered": "dataset {dataset} was registered: {#samples} in {#shards}",
    "dataset.removed": "dataset {dataset} was removed",
    "job.forgotten": "the job was idle and had nothing to keep: it gave way to {in_favour_of}",
    "job.removed": ("the job was removed: {#datasets}, {#checkpoints} on record, {#workers} alive"),
    "action.requested": "{what} was requested{@worker}{~reason}",
    "action.completed": "{what} is done{~outcome}",
    "coordinator.stalled": "the coordinator stalled for {seconds} s",
    "coordinator.state_lost": "worker {worker} was registered in state {state}, {restored}",
    "journal.entry_damaged": "this entry of the journal is damaged",
}
"""``{name}`` is a field, ``{#name}`` a count with its noun; ``{~name}`` stands for ": field" and
``{@name}`` for " of field", or for nothing where the field is empty."""
_RESTORED = {
    "True": "after the copy of it that this coordinator was restored from",
    "False": "which this coordinator has never had",
}


_LINKS = {"~": ": ", "@": " of "}


class _Words(dict[str, str]):
    def __missing__(self, key: str) -> str:
        mark, name = key[0], key[1:]
        if mark in _LINKS:
            return _LINKS[mark] + self[name] if self.get(name) else ""
        if mark != "#":
            return "?"
        return f"{self[name]} {name.removesuffix('s') if self[name] == '1' else name}"


def level_of(kind: str) -> Level:
    """The severity of a kind of events."""
    return ALARMS.get(kind, "info")


def sentence(event: JournalEvent) -> str:
    """An event in words."""
    words, template = _Words(event.fields), _SENTENCES.get(event.kind)
    if event.kind == "epoch.completed" and "dataset" not in words:
        template = "every worker has finished epoch {epoch}"
    if event.kind == "coordinator.state_lost":
        words["restored"] = _RESTORED.get(words["restored"], _RESTORED["False"])
    if template is not None:
        return template.format_map(words)
    fields = " ".join(f"{key}={value}" for key, value in event.fields.items())
    return f"{event.kind} {fields}".strip()
