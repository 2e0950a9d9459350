"""Tells a coordinator what ``strata checkpoints`` found or did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..client import Observer
from ..types import REPORTED_AT_ONCE, CheckpointCondition, CheckpointInfo
from .checkpoints_report import Removal, Verification


@dataclass(frozen=True, slots=True)
class CheckpointFinding:
    """What became of one checkpoint."""

    checkpoint_id: str
    condition: CheckpointCondition
    detail: str = ""
    file: str = ""
    """Its manifest, where the id cannot be read."""


def found(report: Verification) -> list[CheckpointFinding]:
    """What verifying has found."""
    findings = []
    for one in report.checkpoints:
        if one.good:
            findings.append(CheckpointFinding(one.checkpoint_id, CheckpointCondition.GOOD))
            continue
        first = one.damages[0]
        file = "" if one.checkpoint_id else first.file
        detail = f"{first.file}: {first.detail}"
        findings.append(
            CheckpointFinding(one.checkpoint_id, CheckpointCondition.DAMAGED, detail, file)
        )
    return findings


def gone(report: Removal) -> list[CheckpointFinding]:
    """What was removed."""
    removed = CheckpointCondition.REMOVED
    return [CheckpointFinding(key, removed, "by an operator") for key in report.removed_ids]


def tell(
    observer: Observer, job: str | None, place: str, findings: Sequence[CheckpointFinding]
) -> int:
    """Tell the job that is named, or all that have checkpoints in this place; returns how often."""
    told = 0
    for name in observer.jobs() if job is None else [job]:
        known = [
            one for one in observer.checkpoints(name) if job is not None or _lies_in(one, place)
        ]
        for condition, detail, ids in _grouped(findings, known):
            told += observer.report_checkpoints(name, ids, condition, detail)
    return told


def _grouped(
    findings: Sequence[CheckpointFinding], known: Sequence[CheckpointInfo]
) -> Iterator[tuple[CheckpointCondition, str, list[str]]]:
    """The ids of those that are known, as many together as can be said at once."""
    ids = {one.checkpoint_id for one in known}
    paths = {one.path: one.checkpoint_id for one in known}
    groups: dict[tuple[CheckpointCondition, str], list[str]] = {}
    for finding in findings:
        key = finding.checkpoint_id if finding.checkpoint_id in ids else paths.get(finding.file)
        if key:
            groups.setdefault((finding.condition, finding.detail), []).append(key)
    for (condition, detail), keys in groups.items():
        for start in range(0, len(keys), REPORTED_AT_ONCE):
            yield condition, detail, keys[start : start + REPORTED_AT_ONCE]


def _lies_in(checkpoint: CheckpointInfo, place: str) -> bool:
    return checkpoint.path.startswith(place.rstrip("/") + "/")
