"""What has to hold after a round, whatever was done to the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from dtruntime import CheckpointManager, DatasetRegistry
from dtruntime.checkpoint.store.checkpoint_store import CheckpointStore
from dtruntime.cli.checkpoints_report import verify
from dtruntime.storage import open_backend
from dtruntime.storage.backend import PARTIAL
from tests.support.kill_rounds import let_partial_files_age

from .model import Fold, undisturbed, value_of
from .plan import RoundPlan
from .traces import Traces

if TYPE_CHECKING:
    from .rounds import Round

LEFTOVERS = 8
"""Files of a folder that may wait for the next sweep, for each worker."""


def prove(round_: Round, places: list[str], s3: Mapping[str, str]) -> dict[str, Any]:
    """Check everything; returns what was checked, and how much of it."""
    plan = round_.plan
    round_.traces.read()
    expected = expected_state(plan)
    check_endings(round_, expected)
    check_batches(plan, round_.traces)
    check_worlds(round_)
    check_coverage(round_)
    with mock.patch.dict(os.environ, s3):
        verified = [check_checkpoints(place, plan) for place in places]
        check_final_state(places, plan, expected)
        left = [check_leftovers(p, plan) for p in places if "://" not in p]
    return {
        "steps": plan.steps,
        "samples": plan.samples * plan.epochs,
        "checkpoints": verified,
        "leftover_files": left,
    }


def expected_state(plan: RoundPlan) -> Fold:
    """What the run has to end with, computed without any run."""
    fold = Fold()
    order = undisturbed(plan.samples, plan.epochs, plan.batch, plan.reading)
    for step, (epoch, samples) in enumerate(order):
        fold.step(step, value_of(samples, epoch))
    return fold


def check_endings(round_: Round, expected: Fold) -> None:
    """Everybody finished with the same state, and nobody gave up without a reason."""
    ends = [w.outcome for w in round_.crew.workers if w.outcome.get("ending") == "finished"]
    assert len(ends) >= round_.plan.world, "not everybody has finished"
    wanted = {"ending": "finished", "step": round_.plan.steps, "digest": expected.digest}
    wrong = [end for end in ends if end != wanted]
    assert not wrong, f"finished with {wrong}, not {wanted}"
    allowed = "StorageError" if round_.storage_failed else None
    wrong_ends = [e for e in round_.crew.errors if allowed is None or allowed not in e]
    assert not wrong_ends, f"workers gave up: {wrong_ends}"


def check_batches(plan: RoundPlan, traces: Traces) -> None:
    """The last try at each step had the batch that an undisturbed loader gives."""
    attempts = traces.last_attempts()
    assert sorted(attempts) == list(range(1, plan.steps + 1)), "steps are missing, or too many"
    order = undisturbed(plan.samples, plan.epochs, plan.batch, plan.reading)
    for step, (_, samples) in enumerate(order, start=1):
        attempt = attempts[step]
        assert len(attempt.parts) == attempt.world, f"step {step} was not done by all: {attempt}"
        found = np.sort(np.concatenate([np.array(p, np.int64) for p in attempt.parts.values()]))
        assert np.array_equal(found, samples), f"step {step} had another batch: {attempt}"


def check_worlds(round_: Round) -> None:
    """Nobody trains in a crew of fewer than the run has without saying so."""
    crews = {(entry["crew"], entry["world"]) for entry in round_.traces.entries}
    smaller = sorted(world for _, world in crews if world < round_.plan.world)
    logs = [worker.log for worker in round_.crew.workers]
    for world in smaller:
        said = f"run.goes_on_smaller workers={world} "
        assert any(said in log for log in logs), f"a crew of {world} without a word"


def check_coverage(round_: Round) -> None:
    """The coordinator's own account: every sample of every epoch once."""
    registry = DatasetRegistry(round_.coordinator.url, job=round_.job)
    found = registry.coverage("train")
    assert len(found) == round_.plan.epochs, found
    wrong = [c for c in found if not c.exact or c.covered != round_.plan.samples]
    assert not wrong, f"coverage is not exact: {wrong}"


def check_checkpoints(place: str, plan: RoundPlan) -> int:
    """All that are listed are whole, and the newest is the last step; returns how many."""
    found = verify(place, [], lambda size: lambda read: None)
    damaged = [checkpoint for checkpoint in found.checkpoints if checkpoint.damages]
    assert not damaged, f"damaged in {place}: {damaged}"
    assert found.checkpoints, f"no checkpoint in {place}"
    assert found.checkpoints[-1].step == plan.steps, f"the newest in {place} is not the last"
    return len(found.checkpoints)


def check_final_state(places: list[str], plan: RoundPlan, expected: Fold) -> None:
    """The last checkpoint has the state that the run has to end with."""
    for place in places:
        with CheckpointManager(place) as manager:
            newest = manager.checkpoints()[-1]
            assert newest.step == plan.steps
            assert newest.metadata.get("finished") == "yes", newest
            first = manager.ranks(newest.step)[0]
            state = manager.load_state(newest.step, rank=first, keys=["shared"])
        fold = Fold()
        fold.load_state_dict(state["shared"]["objects"]["model"])
        assert fold.equals(expected), f"the state in {place} is not what it has to be"


def check_leftovers(place: str, plan: RoundPlan) -> int:
    """Dead writers leave a bounded number of files, and the next sweep leaves none of them."""
    folder = Path(place)
    before = _unneeded(place)
    assert len(before) <= LEFTOVERS * plan.world, f"{len(before)} files are left: {before}"
    let_partial_files_age(folder)
    opened = CheckpointStore(open_backend(place))
    for _ in range(2):
        opened.catalog.sweep(opened.session.is_dead)
    opened.session.forget_dead()
    opened.backend.sweep(60.0)
    opened.close()
    left = [name for name in _unneeded(place) if not name.startswith("filler")]
    assert not left, f"the sweep leaves {left}"
    assert not list((folder / "locks").iterdir()), "locks of dead writers are left"
    return len(before)


def _unneeded(place: str) -> list[str]:
    """Packs, parts and partial files that no checkpoint needs."""
    folder, opened = Path(place), CheckpointStore(open_backend(place))
    needed: set[str] = set()
    for entry in opened.catalog.entries():
        needed |= opened.catalog.manifest(entry).files
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)) for path in files}
    stored = {name for name in names if name.startswith(("packs/", "parts/"))}
    partial = {name for name in names if Path(name).name.startswith(PARTIAL)}
    return sorted((stored - needed) | partial)
