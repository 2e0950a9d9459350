"""What a demonstration has shown: each claim checked against what the workers left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..display import size
from ..errors import StorageError
from ..types import CheckpointInfo, EpochCoverage
from .dataset import HELD_OUT, held_out, read_ids
from .files import load_checkpoint
from .model import Classifier
from .plan import Plan, WorkerResult


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, and whether it holds."""

    name: str
    passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """All claims, and what the workers counted."""

    checks: tuple[Check, ...]
    results: tuple[WorkerResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(check.passed for check in self.checks)


def judge(
    plan: Plan,
    checkpoints: int,
    latest: CheckpointInfo | None,
    proofs: Sequence[EpochCoverage],
) -> Verdict:
    """Check a run whose workers have all ended well; the rest is what the coordinator says."""
    results = tuple(_result(plan, rank) for rank in range(plan.workers))
    checks = [
        _agreement(plan, results),
        _coverage(plan),
        _proof(plan, proofs),
        *_checkpoint(plan, checkpoints, latest, results),
    ]
    return Verdict(tuple(checks), results)


def _result(plan: Plan, rank: int) -> WorkerResult:
    return msgspec.json.decode(plan.worker_file(rank, "json").read_bytes(), type=WorkerResult)


def _agreement(plan: Plan, results: tuple[WorkerResult, ...]) -> Check:
    digests = {result.digest for result in results}
    steps = {result.steps for result in results}
    passed = len(digests) == 1 and steps == {plan.total_steps}
    text = f"{plan.workers} of {plan.workers} ended well, with "
    text += "identical parameters" if len(digests) == 1 else f"{len(digests)} different models"
    text += f" after {' or '.join(f'{n:,}' for n in sorted(steps))} steps"
    return Check("workers", passed, text)


def _coverage(plan: Plan) -> Check:
    """Compare the ids that the training steps have used with those in the files."""
    expected = read_ids(plan.data_folder)
    lost = repeated = read = 0
    for epoch in range(plan.epochs):
        used = _used_ids(plan, epoch)
        ids, counts = np.unique(used, return_counts=True)
        read += len(used)
        lost += len(np.setdiff1d(expected, ids))
        repeated += int((counts - np.isin(ids, expected)).sum())
    if lost or repeated:
        text = f"{lost:,} samples lost and {repeated:,} repeated in {plan.epochs} epochs"
    else:
        text = f"{read:,} reads: each of {len(expected):,} samples exactly once in each epoch"
    return Check("coverage", not lost and not repeated, text)


def _proof(plan: Plan, proofs: Sequence[EpochCoverage]) -> Check:
    """What the coordinator can prove from the digests that the loaders reported."""
    lost = sum(proof.missing for proof in proofs)
    repeated = sum(proof.repeated for proof in proofs)
    complete = sum(proof.complete and not proof.assumed for proof in proofs)
    passed = complete == plan.epochs and not lost and not repeated
    text = f"digests of {complete} of {plan.epochs} epochs: {lost:,} lost, {repeated:,} repeated"
    return Check("proof", passed, text)


def _used_ids(plan: Plan, epoch: int) -> NDArray[np.int64]:
    files = (plan.worker_file(rank, f"epoch-{epoch}.npy") for rank in range(plan.workers))
    return np.concatenate([np.load(file, allow_pickle=False) for file in files])


def _checkpoint(
    plan: Plan, count: int, latest: CheckpointInfo | None, results: tuple[WorkerResult, ...]
) -> list[Check]:
    """Load what the coordinator calls the latest checkpoint, and judge that model."""
    if latest is None:
        return [Check("checkpoint", False, "the coordinator knows of no checkpoint")]
    try:
        model, step = load_checkpoint(Path(latest.path), plan.hidden)
    except StorageError as exc:
        return [Check("checkpoint", False, str(exc))]
    same = step == latest.step and all(model.digest() == result.digest for result in results)
    text = f"last of {count}, step {step:,}, {size(latest.size_bytes)}; "
    text += "loads and is the final model" if same else "loads, but is not the final model"
    judged = held_out(plan.seed)
    before = Classifier.initial(plan.hidden, plan.seed).score(judged).accuracy
    after = model.score(judged).accuracy
    learned = f"{before:.1%} → {after:.1%} on {HELD_OUT:,} digits held out from training"
    return [Check("checkpoint", same, text), Check("accuracy", after > before, learned)]
