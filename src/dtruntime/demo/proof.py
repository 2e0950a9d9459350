"""What a demonstration has shown: each claim checked against what the workers left behind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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

Ids = NDArray[np.int64]


class Kill(StrEnum):
    """Who is killed in the middle."""

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
    """Whether what was to be shown was to be seen: a kill in one run, and none in the other."""
    survived = [incident for incident in disturbed.incidents if incident.is_over]
    text = f"{count(len(survived), 'kill')} survived by the first run, "
    text += f"{count(len(undisturbed.incidents), 'kill')} in the second"
    if kill is not Kill.NONE and not survived:
        text += "; it was over before anybody could be killed: give it more --epochs"
    passed = (bool(survived) or kill is Kill.NONE) and not undisturbed.incidents
    return Check("disturbance", passed, text, plan.disturbed.logs)


def check_samples(plan: Scenario, files: RunFiles) -> Check:
    """Compare the ids that the workers noted with those in the dataset's files."""
    steps = last_notes(NoteReader(files.notes).news())
    used: list[list[int]] = [[] for _ in range(plan.epochs)]
    for notes in steps.values():
        for note in notes:
            used[note.epoch] += note.ids
    expected = read_ids(plan.data_folder)
    lost, repeated = np.sum([_compare(np.array(ids), expected) for ids in used], axis=0)
    text = f"{lost:,} lost, {repeated:,} repeated in {count(plan.epochs, 'epoch')}, by the ids "
    text += "that the workers noted"
    missing = set(range(1, plan.total_steps + 1)) - steps.keys()
    if missing:
        text += f"; {count(len(missing), 'step')} not noted"
    passed = not (lost or repeated or missing)
    return Check("samples", passed, text, files.notes)


def _compare(used: Ids, expected: Ids) -> tuple[int, int]:
    """How many samples are missing, and how many are there more than once or out of nowhere."""
    ids, counts = np.unique(used, return_counts=True)
    lost = len(np.setdiff1d(expected, ids))
    return lost, int((counts - np.isin(ids, expected)).sum())


def check_coverage(plan: Scenario, ran: RunResult) -> Check:
    """What the coordinator can prove by the digests that the loaders sent to it."""
    lost = sum(epoch.missing for epoch in ran.coverage)
    repeated = sum(epoch.repeated for epoch in ran.coverage)
    exact = sum(epoch.exact for epoch in ran.coverage)
    text = f"{lost:,} lost, {repeated:,} repeated in {count(plan.epochs, 'epoch')}, by the "
    text += "coordinator's digests"
    if exact != plan.epochs:
        text += f", which prove {exact}"
    passed = exact == plan.epochs == len(ran.coverage)
    return Check("coverage", passed, text, plan.coordinator_folder)


def check_checkpoints(files: RunFiles) -> Check:
    """Read every byte of every checkpoint, and compare it with its digests."""
    with open_backend(str(files.checkpoints)) as backend:
        catalog = Catalog(backend)
        verifier = Verifier(catalog, catalog.entries())
        verdicts = list(verifier.run())
        stored = verifier.stored_bytes
    damaged = [verdict for verdict in verdicts if not verdict.good]
    text = f"{len(verdicts) - len(damaged)} of {len(verdicts)} whole, every byte verified "
    text += f"({size(stored)})"
    if damaged:
        first = damaged[0]
        text += f"; step {first.entry.step:,}: {first.damages[0].file} {first.damages[0].detail}"
    return Check("checkpoints", bool(verdicts) and not damaged, text, files.checkpoints)


def check_weights(plan: Scenario) -> Check:
    """Compare what all workers of both runs have in the end, bit for bit."""
    where = plan.disturbed.root
    try:
        (name, expected), *others = [
            *_final_weights(plan, plan.undisturbed),
            *_final_weights(plan, plan.disturbed),
        ]
    except (OSError, StorageError) as exc:
        return Check("weights", False, str(exc), where)
    for other, weights in others:
        if weights.tobytes() != expected.tobytes():
            differ = int((weights.view(np.uint32) != expected.view(np.uint32)).sum())
            text = f"{differ:,} of {expected.size:,} in {other} differ from those in {name}"
            return Check("weights", False, text, where)
    text = f"all {expected.size:,} equal bit for bit those of {plan.workers} undisturbed workers"
    return Check("weights", True, text, where)


def _final_weights(plan: Scenario, files: RunFiles) -> list[tuple[str, Floats]]:
    """What each worker had in the end, and what the last checkpoint has."""
    paths = [files.root / f"weights-{rank}.npy" for rank in range(plan.workers)]
    weights: list[tuple[str, Floats]] = [(str(path), np.load(path)) for path in paths]
    return [*weights, (str(files.checkpoints), _saved_weights(files))]


def _saved_weights(files: RunFiles) -> Floats:
    weights: Floats = load_tracked(files.checkpoints, "model")["model"]["parameters"]
    return weights


def check_learning(plan: Scenario) -> Check:
    """Judge the last checkpoint's model by pictures that nobody was trained on."""
    judged = draw(HELD_OUT, plan.seed, 1)  # which belong to no shard
    before = Classifier.initial(plan.hidden, plan.seed).accuracy(judged)
    try:
        model = Classifier(plan.hidden, _saved_weights(plan.disturbed))
    except StorageError as exc:
        return Check("accuracy", False, str(exc), plan.disturbed.checkpoints)
    after = model.accuracy(judged)
    text = f"{before:.1%} → {after:.1%} on {HELD_OUT:,} digits held out from training"
    return Check("accuracy", after > before, text, plan.disturbed.root)
