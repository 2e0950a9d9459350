"""The promises about what is said of committed checkpoints, followed over time."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.records import CheckpointRecord
from dtruntime.types import CheckpointCondition
from tests.support.promises.promise_model import Applied, JobModel, demand


def check_change(model: JobModel, applied: Applied, record: CheckpointRecord) -> None:
    """A record of a commit was stored again: only what somebody said of it may have changed."""
    command, before = applied.command, model.commits[record.checkpoint_id]
    demand(isinstance(command, c.ReportCheckpoints), "committed twice", record)
    demand(not before.removed_at, "a report on what is deleted changed it", command, before)
    same = replace(
        before,
        verified=record.verified,
        verified_at=record.verified_at,
        verified_by=record.verified_by,
        removed_at=record.removed_at,
    )
    demand(same == record, "a report changed more than it says", before, record)
    removed = command.condition is CheckpointCondition.REMOVED
    demand(removed == bool(record.removed_at), "deleted, or not", command, record)
    if not removed:
        good = command.condition is CheckpointCondition.GOOD
        demand(record.verified is good, "another verdict than was reported", command, record)
    model.commits[record.checkpoint_id] = record


def check_answer(model: JobModel, command: c.ReportCheckpoints, reply: Any) -> None:
    """An answer leaves: what was said is stored."""
    stored = [model.stored_commits.get(key) for key in command.checkpoint_ids]
    known = [record for record in stored if record is not None]
    demand(reply.known == len(known), "other checkpoints are known", command, reply)
    for record in known:
        if command.condition is CheckpointCondition.REMOVED:
            demand(record.removed_at, "told, and not stored", command, record)
        else:
            told = record.removed_at or record.verified is not None
            demand(told, "told, and not stored", command, record)


def newest_there(model: JobModel) -> CheckpointRecord | None:
    """The newest commit that nobody has deleted."""
    return next((r for r in reversed(model.commits.values()) if not r.removed_at), None)
