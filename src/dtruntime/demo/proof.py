"""What a demonstration has shown: each claim checked against what the workers left behind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from ..checkpoint.load.verify import Verifier
from ..checkpoint.store.catalog import Catalog
from ..display import count, size
from ..errors import StorageError
from ..run import load_tracked
from ..storage import open_backend
from ..types import EpochCoverage
from .digits import HELD_OUT, Classifier, Floats, draw, read_ids
from .scenario import RunFiles, Scenario
from .timeline import Incident, NoteReader, last_notes


class Kill(StrEnum):
    """What is killed in the middle."""

    WORKER = "worker"
    COORDINATOR = "coordinator"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run whose workers have all ended well."""

    incidents: tuple[Incident, ...]
    coverage: tuple[EpochCoverage, ...]
    """What the coordinator can prove."""
    training_seconds: float
    """From the first step to the last."""


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, and whether it holds."""

    name: str
    passed: bool
    text: str
    where: Path | None = None
    """The folder to look into when it does not hold."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a demonstration has shown."""

    disturbed: RunResult
    undisturbed: RunResult
    checks: tuple[Check, ...]
    seconds: float
    """From the first file written to the last check."""

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(check.passed for check in self.checks)


def judge(
    plan: Scenario, kill: Kill, disturbed: RunResult, undisturbed: RunResult
) -> tuple[Check, ...]:
    """Check two runs whose workers have all ended well."""
    return (
        check_disturbance(plan, kill, disturbed, undisturbed),
        check_samples(plan, plan.disturbed),
        check_coverage(plan, disturbed),
        check_checkpoints(plan.disturbed),
        check_weights(plan),
        check_learning(plan),
    )


def check_disturbance(
    plan: Scenario, kill: Kill, disturbed: RunResult, undisturbed: RunResult
) -> Check:
    """A kill that was survived in one run, and none in the other."""
    survived = [incident for incident in disturbed.incidents if incident.is_over]
    text = f"{count(len(survived), 'kill')} survived by the first run, "
    text += f"{count(len(undisturbed.incidents), 'kill')} in the second"
    if kill is not Kill.NONE and not survived:
        text += "; it was over before anything could be killed: give it more --epochs"
    passed = (bool(survived) or kill is Kill.NONE) and not undisturbed.incidents
    return Check("disturbance", passed, text, plan.disturbed.logs)


def check_samples(plan: Scenario, files: RunFiles) -> Check:
    """Compare the ids that the workers noted with those in the dataset's files."""
    steps = last_notes(NoteReader(files.notes).news())
    expected = read_ids(plan.data_folder)
    lost = repeated = 0
    for epoch in range(plan.epochs):
        notes = [note for of_step in steps.values() for note in of_step if note.epoch == epoch]
        used = np.array([sample for note in notes for sample in note.ids])
        ids, counts = np.unique(used, return_counts=True)
        lost += len(np.setdiff1d(expected, ids))
        # Samples that are there more than once, or that do not belong to the data.
        repeated += int((counts - np.isin(ids, expected)).sum())
    text = _lost_and_repeated(plan, lost, repeated, "the ids that the workers noted")
    missing = set(range(1, plan.total_steps + 1)) - steps.keys()
    if missing:
        text += f"; {count(len(missing), 'step')} not noted"
    return Check("samples", not (lost or repeated or missing), text, files.notes)


def check_coverage(plan: Scenario, ran: RunResult) -> Check:
    """What the coordinator can prove by the digests that the loaders sent to it."""
    lost = sum(epoch.missing for epoch in ran.coverage)
    repeated = sum(epoch.repeated for epoch in ran.coverage)
    exact = sum(epoch.exact for epoch in ran.coverage)
    text = _lost_and_repeated(plan, lost, repeated, "the coordinator's digests")
    if exact != plan.epochs:
        text += f", which prove {exact}"
    passed = exact == plan.epochs == len(ran.coverage)
    return Check("coverage", passed, text, plan.coordinator_folder)


def _lost_and_repeated(plan: Scenario, lost: int, repeated: int, source: str) -> str:
    epochs = count(plan.epochs, "epoch")
    return f"{lost:,} lost, {repeated:,} repeated in {epochs}, by {source}"


def check_checkpoints(files: RunFiles) -> Check:
    """Read every byte of every checkpoint, and compare it with its digests."""
    with open_backend(str(files.checkpoints)) as backend:
        catalog = Catalog(backend)
        verifier = Verifier(catalog, catalog.entries())
        verdicts = list(verifier.run())
    damaged = [verdict for verdict in verdicts if not verdict.good]
    text = f"{len(verdicts) - len(damaged)} of {len(verdicts)} whole, every byte verified "
    text += f"({size(verifier.stored_bytes)})"
    if damaged:
        first = damaged[0]
        text += f"; step {first.entry.step:,}: {first.damages[0].file} {first.damages[0].detail}"
    return Check("checkpoints", bool(verdicts) and not damaged, text, files.checkpoints)


def check_weights(plan: Scenario) -> Check:
    """Compare the final weights of all workers and checkpoints of both runs, bit for bit."""
    weights: dict[str, Floats] = {}
    try:
        for files in (plan.undisturbed, plan.disturbed):
            for rank in range(plan.workers):
                path = files.root / f"weights-{rank}.npy"
                weights[str(path)] = np.load(path)
            weights[str(files.checkpoints)] = _saved_weights(files)
    except (OSError, StorageError) as exc:
        return Check("weights", False, str(exc), plan.disturbed.root)
    (name, expected), *others = weights.items()
    text = f"all {expected.size:,} equal bit for bit those of {plan.workers} undisturbed workers"
    passed = True
    for other, values in others:
        if values.tobytes() != expected.tobytes():
            differ = int((values.view(np.uint32) != expected.view(np.uint32)).sum())
            text = f"{differ:,} of {expected.size:,} in {other} differ from those in {name}"
            passed = False
    return Check("weights", passed, text, plan.disturbed.root)


def _saved_weights(files: RunFiles) -> Floats:
    weights: Floats = load_tracked(files.checkpoints, "model")["model"]["parameters"]
    return weights


def check_learning(plan: Scenario) -> Check:
    """Judge the last checkpoint's model by pictures that it was not trained on."""
    judged = draw(HELD_OUT, plan.seed, 1)  # which belong to no shard
    before = Classifier.initial(plan.hidden, plan.seed).accuracy(judged)
    try:
        model = Classifier(plan.hidden, _saved_weights(plan.disturbed))
    except StorageError as exc:
        return Check("accuracy", False, str(exc), plan.disturbed.checkpoints)
    after = model.accuracy(judged)
    text = f"{before:.1%} → {after:.1%} on {HELD_OUT:,} digits held out from training"
    return Check("accuracy", after > before, text, plan.disturbed.root)
