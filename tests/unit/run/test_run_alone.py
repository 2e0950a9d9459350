"""A run of one process: it resumes, saves, and leaves when it is told to."""

import itertools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import (
    CheckpointManager,
    CheckpointNotFoundError,
    ConfigError,
    Run,
    StrataError,
    load_tracked,
)
from dtruntime.data import NumberSource
from dtruntime.run.tracked_state import capture_rng, restore_rng, seed_rng

SAMPLES, BATCH = 1_000, 50


class Walk:
    """Something to train: it moves by what it is shown, and by chance."""

    def __init__(self) -> None:
        self.place = np.zeros(4)

    def step(self, samples: np.ndarray) -> None:
        self.place += np.sin(samples[:4]) + np.random.random(4) + random.random()

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.place = state["place"].copy()


def make(folder: Path, walk: Walk, **options: Any) -> Run:
    given: dict[str, Any] = {
        "data": SAMPLES,
        "batch_size": BATCH,
        "epochs": 2,
        "save_steps": 7,
        **options,
    }
    return Run(folder, track={"walk": walk}, **given)


def train(run: Run, walk: Walk, stop_after: int | None = None) -> list[list[int]]:
    batches = []
    with run:
        for batch in itertools.islice(run, stop_after):
            with run.guard():
                walk.step(batch["sample"])
            batches.append(batch["sample"].tolist())
    return batches


@pytest.fixture(autouse=True)
def _same_chance() -> None:
    seed_rng(5)


def test_whole_run_reads_every_sample_once_per_epoch(tmp_path):
    walk = Walk()
    run = make(tmp_path, walk)
    batches = train(run, walk)
    for epoch in range(2):
        seen = itertools.chain(*batches[epoch * 20 : epoch * 20 + 20])
        assert sorted(seen) == list(range(SAMPLES))
    assert run.ending == "finished"
    assert run.step == 40


@pytest.mark.parametrize("cut", [1, 7, 13, 20, 33, 40])
def test_run_that_was_stopped_ends_with_the_same_bits(tmp_path, cut):
    whole = Walk()
    expected = train(make(tmp_path / "whole", whole), whole)
    seed_rng(5)
    first = Walk()
    before = train(make(tmp_path / "cut", first), first, stop_after=cut)
    seed_rng(99)  # another process has other random numbers
    second = Walk()
    after = train(make(tmp_path / "cut", second), second)
    assert before + after == expected
    assert np.array_equal(second.place, whole.place)


def test_batch_that_the_loop_was_left_with_unused_is_read_again(tmp_path):
    with Run(tmp_path, data=40, batch_size=10, save_steps=1, loader={"shuffle": False}) as run:
        for batch in run:
            if run.step == 2:
                break
            used = batch["sample"][-1]
    assert (used, run.ending) == (19, "")
    with Run(tmp_path, data=40, batch_size=10, loader={"shuffle": False}) as run:
        assert [int(batch["sample"][0]) for batch in run] == [20, 30]


def test_finished_run_may_be_made_longer(tmp_path):
    walk = Walk()
    train(make(tmp_path, walk, epochs=1), walk)
    assert len(train(make(tmp_path, walk, epochs=3), walk)) == 40
    with Run(tmp_path / "steps", max_steps=3) as run:
        assert list(run) == [0, 1, 2]
    with Run(tmp_path / "steps", max_steps=5) as run:
        assert list(run) == [3, 4]


def test_finished_run_has_nothing_more_to_do(tmp_path):
    walk = Walk()
    train(make(tmp_path, walk), walk)
    again = Walk()
    run = make(tmp_path, again)
    assert train(run, again) == []
    assert run.ending == "finished"
    assert np.array_equal(again.place, walk.place)


def test_exception_keeps_what_was_saved_and_nothing_of_the_failed_step(tmp_path):
    walk = Walk()

    def fail_in_the_tenth(batch: object) -> None:
        if run.step == 10:
            raise ZeroDivisionError

    run = make(tmp_path, walk)
    with pytest.raises(ZeroDivisionError), run:
        list(map(fail_in_the_tenth, run))
    with make(tmp_path, Walk()) as again:
        assert again.step == 7


def test_max_steps_and_no_data(tmp_path):
    with Run(tmp_path, max_steps=12, save_steps=5, state={"total": 0}) as run:
        for number in run:
            run.state["total"] += number
    assert run.state["total"] == sum(range(12))
    with Run(tmp_path, max_steps=12, state={"total": -1}) as again:
        assert list(again) == []
    assert again.state["total"] == sum(range(12))


@pytest.mark.parametrize("options", [{}, {"max_steps": 30}])
def test_last_step_is_saved_once_as_the_end(tmp_path, options):
    walk = Walk()
    train(make(tmp_path, walk, save_steps=10, **options), walk)
    steps = list(range(0, options.get("max_steps", 40) + 1, 10))
    with CheckpointManager(tmp_path, keep_count=3) as manager:
        assert manager.steps() == steps[-len(manager.steps()) :]
        kept = manager.checkpoints()
        assert [info.step for info in kept if info.metadata] == steps[-1:]
        assert len(kept) == len({info.step for info in kept}) > 1
        assert np.array_equal(load_tracked(tmp_path, "walk")["walk"]["place"], walk.place)


def test_batches_of_ones_own_are_read_up_to_the_position(tmp_path):
    batches = [np.full(3, i) for i in range(10)]
    with Run(tmp_path, batches, epochs=2) as run:
        seen = []
        for batch in itertools.islice(run, 13):
            with run.guard():
                seen.append(int(batch[0]))
    with Run(tmp_path, batches, epochs=2) as run:
        seen += [int(batch[0]) for batch in run]
    assert seen == [*range(10), *range(10)]


def test_loader_with_a_state_of_its_own_goes_on_from_it(tmp_path):
    class Counting:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self):
            while self.at < 10:
                self.at += 1
                yield np.array([self.at])
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    with Run(tmp_path, Counting(), epochs=1) as run:
        seen = []
        for batch in itertools.islice(run, 4):
            with run.guard():
                seen.append(int(batch[0]))
    with Run(tmp_path, Counting(), epochs=1) as run:
        seen += [int(b[0]) for b in run]
    assert seen == list(range(1, 11))


def test_source_may_be_given(tmp_path):
    with Run(tmp_path, NumberSource(100, 10), batch_size=10) as run:
        assert len(list(run)) == 10


def test_files_by_path(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "data").mkdir()
    for i in range(3):
        table = pa.table({"x": np.arange(i * 100, i * 100 + 100)})
        pq.write_table(table, tmp_path / "data" / f"{i}.parquet", row_group_size=25)
    with Run(tmp_path / "ck", tmp_path / "data", batch_size=30) as run:
        seen = np.concatenate([batch["x"] for batch in run])
    assert sorted(seen.tolist()) == list(range(300))


def test_notice_file_ends_the_run_after_the_step_with_a_checkpoint(tmp_path):
    notice = tmp_path / "notice"
    walk = Walk()
    run = make(tmp_path / "ck", walk, preemption_file=notice, save_steps=1000)

    def train_until_told(batch: dict[str, np.ndarray]) -> None:
        walk.step(batch["sample"])
        if run.step == 4:
            notice.touch()
            run._notices._looked = -1e9

    with pytest.raises(SystemExit) as ended, run:
        list(map(train_until_told, run))
    assert ended.value.code == 143
    assert run.ending == "preempted"
    with make(tmp_path / "ck", Walk()) as again:
        assert again.step == run.step == 5


PROGRAM = """
import sys, os, signal
from dtruntime import Run
with Run(sys.argv[1], data=100_000, batch_size=10, save_steps=100_000) as run:
    for batch in run:
        if run.step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        if run.step > 30:
            print("went on", flush=True)
"""


def test_sigterm_saves_and_ends_with_its_exit_status(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "ck")],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 143, done.stderr
    assert "went on" not in done.stdout
    with Run(tmp_path / "ck", data=100_000, batch_size=10) as run:
        assert run.step == 21
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_tracked_object_without_a_state_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"cannot track 'x'.*state="):
        Run(tmp_path, max_steps=1, track={"x": 3})


def test_checkpoint_without_a_tracked_object_says_so(tmp_path):
    with Run(tmp_path, max_steps=1, track={"a": Walk()}) as run:
        list(run)
    with (
        pytest.raises(ValueError, match=r"no state of b.*it has a"),
        Run(tmp_path, max_steps=1, track={"a": Walk(), "b": Walk()}),
    ):
        pass


def test_run_without_data_needs_an_end(tmp_path):
    with pytest.raises(ValueError, match="max_steps"):
        Run(tmp_path)


def test_run_is_used_in_a_with_statement_once(tmp_path):
    run = Run(tmp_path, max_steps=1)
    with pytest.raises(StrataError, match="not open"):
        next(iter(run))
    with run:
        list(run)
    with pytest.raises(StrataError, match="once"), run:
        pass


def test_several_workers_without_a_coordinator_are_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="strata coordinator"):
        Run(tmp_path, max_steps=1)


def test_random_numbers_of_all_libraries_are_restored():
    torch = pytest.importorskip("torch")
    kept = capture_rng()
    drawn = (random.random(), np.random.normal(), torch.rand(3))
    seed_rng(1)
    restore_rng(kept)
    again = (random.random(), np.random.normal(), torch.rand(3))
    assert drawn[:2] == again[:2]
    assert torch.equal(drawn[2], again[2])


@pytest.mark.parametrize("name", ["step", "epoch", "state", "step_seconds"])
def test_metric_with_a_name_of_the_runs_own_is_refused(tmp_path: Path, name: str) -> None:
    with Run(tmp_path, max_steps=1) as run, pytest.raises(ValueError, match=f"reports {name}"):
        run.report(**{name: 1.0})


def test_what_a_run_tracked_can_be_loaded_without_it(tmp_path: Path) -> None:
    walk = Walk()
    train(make(tmp_path, walk), walk)
    assert (load_tracked(tmp_path, "walk")["walk"]["place"] == walk.place).all()
    assert load_tracked(tmp_path).keys() == {"walk"}
    (*_, before, last) = CheckpointManager(tmp_path).steps()
    assert (load_tracked(tmp_path, "walk", step=before)["walk"]["place"] != walk.place).any()
    assert last == 2 * SAMPLES // BATCH


def test_run_that_has_saved_nothing_or_something_else_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        load_tracked(tmp_path / "nothing")
    walk = Walk()
    train(make(tmp_path, walk), walk)
    with pytest.raises(KeyError, match="shared/objects/model"):
        load_tracked(tmp_path, "model")


def test_column_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    def mistype():
        with make(tmp_path, Walk()) as run:
            for batch in run:
                with run.guard():
                    batch["simple"]

    with pytest.raises(KeyError, match="simple") as caught:
        mistype()
    notes = "".join(caught.value.__notes__)
    assert notes == "the batch has no column 'simple': did you mean 'sample'? there are 'sample'"


@pytest.mark.parametrize("number", [0, -1])
def test_damaged_manifest_does_not_keep_a_run_from_starting(tmp_path, number):
    whole, walk = Walk(), Walk()
    train(make(tmp_path / "whole", whole), whole)
    seed_rng(5)
    train(make(tmp_path / "cut", walk), walk, stop_after=30)
    damaged = sorted((tmp_path / "cut" / "manifests").iterdir())[number]
    damaged.write_bytes(damaged.read_bytes()[:-40])
    again = Walk()
    run = make(tmp_path / "cut", again)
    train(run, again)
    assert run.ending == "finished"
    assert np.array_equal(again.place, whole.place)


@pytest.mark.parametrize("kind", ["manifests", "packs"])
def test_finished_run_whose_last_checkpoint_is_damaged_trains_the_rest_again(tmp_path, kind):
    walk = Walk()
    train(make(tmp_path, walk), walk)
    newest = max((tmp_path / kind).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2 if kind == "manifests" else -1] ^= 1
    newest.write_bytes(data)
    for _ in range(2):
        again = Walk()
        run = make(tmp_path, again)
        train(run, again)
        assert (run.ending, run.step) == ("finished", 40)
        assert np.array_equal(again.place, walk.place)
