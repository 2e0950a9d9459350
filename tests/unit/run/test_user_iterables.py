"""Batches that the user iterates: where they go on, and what is said of them."""

import gc
import itertools
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtruntime import Run
from dtruntime.data import Loader, NumberSource
from dtruntime.data.torch import TorchLoader
from dtruntime.run.crew import Crew
from dtruntime.run.tracked_state import seed_rng
from dtruntime.run.user_iterables import UserStream

ALONE = Crew((0,), 0, 0)
PAIR = Crew((0, 1), 0, 0)


@pytest.fixture(autouse=True)
def _same_chance() -> None:
    seed_rng(5)


def read(folder: Path, data: Any, stop_after: int | None = None, **options: Any) -> list[Any]:
    """What a run is given, each batch with chance of the program's own beside it."""
    seen = []
    with Run(folder, data, **{"epochs": 3, "save_steps": 1000, **options}) as run:
        for batch in itertools.islice(run, stop_after):
            with run.guard():
                seen.append((np.asarray(batch).tolist(), random.random(), np.random.random()))
    return seen


class Shuffled:
    """Draws its order when it is iterated, and something for each batch."""

    def __iter__(self):
        for number in np.random.permutation(8):
            yield np.array([number, random.random()])


@pytest.mark.parametrize("cut", [1, 5, 8, 11, 23, 24])
def test_order_that_is_drawn_by_chance_goes_on_as_it_was(tmp_path: Path, cut: int) -> None:
    expected = read(tmp_path / "whole", Shuffled())
    seed_rng(5)
    before = read(tmp_path / "cut", Shuffled(), stop_after=cut)
    seed_rng(99)
    assert before + read(tmp_path / "cut", Shuffled()) == expected


@pytest.mark.parametrize(
    ("workers", "own_generator"), [(0, False), (0, True), (1, False), (1, True)]
)
def test_shuffled_data_loader_goes_on_in_the_same_permutation(
    tmp_path: Path, workers: int, own_generator: bool
) -> None:
    def data() -> Any:
        generator = torch.Generator().manual_seed(3) if own_generator else None
        return torch.utils.data.DataLoader(
            list(range(20)), 2, shuffle=True, num_workers=workers, generator=generator
        )

    expected = read(tmp_path / "whole", data(), epochs=2)
    seed_rng(5)
    before = read(tmp_path / "cut", data(), stop_after=13, epochs=2)
    seed_rng(99)
    again = read(tmp_path / "cut", data(), stop_after=4, epochs=2)
    seed_rng(98)
    assert before + again + read(tmp_path / "cut", data(), epochs=2) == expected


@pytest.mark.parametrize("cut", [3, 13])
def test_loader_whose_processes_are_kept_goes_on_in_the_same_permutation(
    tmp_path: Path, cut: int
) -> None:
    def data() -> Any:
        return torch.utils.data.DataLoader(
            list(range(20)), 2, shuffle=True, num_workers=1, persistent_workers=True
        )

    expected = read(tmp_path / "whole", data(), epochs=2)
    seed_rng(5)
    loader = data()
    before = read(tmp_path / "cut", loader, stop_after=cut, epochs=2)
    seed_rng(99)
    again = read(tmp_path / "cut", loader, stop_after=3, epochs=2)
    seed_rng(98)
    assert before + again + read(tmp_path / "cut", data(), epochs=2) == expected


class Noise(torch.utils.data.Dataset[float]):
    """Samples that are drawn where they are read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> float:
        return float(torch.rand(()))


@pytest.mark.parametrize(("persistent", "cut"), [(False, 3), (False, 13), (True, 3), (True, 10)])
def test_random_numbers_of_loader_processes_are_drawn_again(
    tmp_path: Path, persistent: bool, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    def data() -> Any:
        return torch.utils.data.DataLoader(Noise(), 2, num_workers=1, persistent_workers=persistent)

    seed_rng(5)
    expected = read(tmp_path / "whole", data(), epochs=2)
    seed_rng(5)
    before = read(tmp_path / "cut", data(), stop_after=cut, epochs=2)
    seed_rng(99)
    assert before + read(tmp_path / "cut", data(), epochs=2) == expected
    assert "worker_random_numbers_are_not_saved" not in caplog.text


def test_random_numbers_of_kept_processes_in_later_epochs_are_said_to_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def data() -> Any:
        return torch.utils.data.DataLoader(Noise(), 2, num_workers=1, persistent_workers=True)

    read(tmp_path / "cut", data(), stop_after=13, epochs=2)
    assert "worker_random_numbers_are_not_saved" not in caplog.text
    read(tmp_path / "cut", data(), epochs=2)
    assert "run.worker_random_numbers_are_not_saved" in caplog.text


def test_generator_of_a_data_loader_goes_on_when_a_finished_run_is_made_longer(
    tmp_path: Path,
) -> None:
    def data() -> Any:
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.DataLoader(list(range(9)), shuffle=True, generator=generator)

    expected = read(tmp_path / "whole", data(), epochs=2)
    seed_rng(5)
    before = read(tmp_path / "longer", data(), epochs=1)
    assert before + read(tmp_path / "longer", data(), epochs=2) == expected


def test_torch_loader_does_not_repeat_an_epoch_whose_last_step_was_saved(tmp_path: Path) -> None:
    def data() -> TorchLoader:
        return TorchLoader(Loader(NumberSource(40, 10), 10, seed=1))

    def samples(stop_after: int | None = None) -> list[list[int]]:
        with Run(tmp_path, data(), epochs=3) as run:
            seen = []
            for batch in itertools.islice(run, stop_after):
                with run.guard():
                    seen.append(batch["sample"].tolist())
        return seen

    seen = samples(stop_after=4) + samples(stop_after=1) + samples()
    assert len(seen) == 12
    for epoch in range(3):
        found = itertools.chain(*seen[epoch * 4 : epoch * 4 + 4])
        assert sorted(found) == list(range(40))


def test_checkpoint_that_does_not_tell_the_order_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = UserStream(list(range(5)))
    for _ in range(2):
        stream.open(ALONE)
        stream.restore([{"epoch": 0, "read": 2, "inner": None}], 0)
        assert [batch for batch, _ in stream.batches()] == [2, 3, 4]
    assert [vars(r)["event"] for r in caplog.records] == ["run.order_is_not_saved"]


def test_position_of_the_first_worker_is_taken_by_one_more(caplog) -> None:
    first, other = UserStream(Shuffled()), UserStream(Shuffled())
    first.open(ALONE)
    passing = first.batches()
    for _ in range(3):
        next(passing)
        first.used()
    state = first.state()
    rest = [int(batch[0]) for batch, _ in passing]
    other.restore([state], 1)
    assert [int(batch[0]) for batch, _ in other.batches()] == rest


def test_sampler_is_told_the_epoch(tmp_path: Path) -> None:
    sampler = torch.utils.data.DistributedSampler(list(range(8)), num_replicas=2, rank=0)
    data = torch.utils.data.DataLoader(list(range(8)), sampler=sampler)
    seen = [int(batch) for (batch,), *_ in read(tmp_path, data, epochs=2)]
    sampler.set_epoch(1)
    assert seen[4:] == list(sampler)
    assert seen[:4] != seen[4:]


@pytest.mark.parametrize("crew", [ALONE, PAIR, Crew((0, 1), 1, 0)])
def test_data_that_every_worker_iterates_is_told_of_once(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    stream = UserStream([1, 2])
    stream.open(crew)
    stream.open(crew)
    assert [vars(r)["event"] for r in caplog.records] == ["run.data_is_not_divided"] * (
        crew == PAIR
    )


def test_data_that_divides_itself_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    UserStream(Loader(NumberSource(8, 4), 2, rank=0, world_size=2)).open(PAIR)
    assert not caplog.records


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (np.array(3), 1),
        (np.float32(3), 1),
        ({"lr": np.array(0.1), "x": np.ones(4)}, 4),
        ((np.array(1.0),), 1),
        ((np.ones((3, 2)), np.ones(3)), 3),
        ("abc", 1),
        (["a", "bc"], 2),
        ({"text": ["a", "bc"]}, 2),
        ({"lr": 0.1}, 1),
        ({}, 0),
        (None, 1),
    ],
)
def test_samples_of_a_batch_are_counted(batch: Any, samples: int) -> None:
    stream = UserStream([batch])
    stream.open(ALONE)
    assert [count for _, count in stream.batches()] == [samples]


def test_data_without_batches_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no batches: this list is empty"):
        read(tmp_path / "empty", [])
    with pytest.raises(ValueError, match=r"epoch 1: this generator can be iterated once"):
        read(tmp_path / "once", (number for number in range(3)))


def test_data_is_freed_with_its_run_without_garbage_collection(tmp_path: Path) -> None:
    """Collected in a cycle, a `DataLoader` would lose its queues before its processes: torch then
    waits 5 s for each of them."""

    def use(data: Any) -> weakref.ref[Any]:
        read(tmp_path, data, stop_after=5)
        return weakref.ref(data)

    gc.disable()
    try:
        data = use(Shuffled())
        assert data() is None
    finally:
        gc.enable()
