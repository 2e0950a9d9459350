"""Strata's batches inside PyTorch's data loading, also as torchdata checks it."""

import json
import multiprocessing
import random
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from dtruntime.data import build_index
from dtruntime.data.loader import Loader
from dtruntime.data.source import FileSource, NumberSource
from dtruntime.data.torch import StrataDataset, TorchLoader
from dtruntime.errors import ShardError

pytestmark = pytest.mark.filterwarnings(
    # Said by torch and torchdata themselves.
    "ignore:This DataLoader will create:UserWarning",
    "ignore:'set_vital' is deprecated:UserWarning",
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning",
)
METHODS = ("fork", "spawn")
SAMPLES, BATCH = 300, 16


def loader(batch=BATCH, **options):
    return Loader(NumberSource(SAMPLES, 20), batch, output="torch", window=3, **options)


def lists(batches):
    return [batch["sample"].tolist() for batch in batches]


@pytest.fixture(scope="module")
def expected():
    reading = loader()
    return [lists(reading) for _ in range(3)]


def stateful(samples, workers, method):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(
        StrataDataset(loader(), samples=samples),
        batch_size=BATCH if samples else None,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
    )


@pytest.mark.parametrize(
    ("samples", "workers", "method"),
    [
        (False, 0, None),
        (True, 0, None),
        (False, 3, "fork"),
        (True, 3, "fork"),
        pytest.param(False, 1, "spawn", marks=pytest.mark.long),
    ],
)
def test_stateful_dataloader_resumes_with_the_same_batches(samples, workers, method, expected):
    first = stateful(samples, workers, method)
    got, state = [], None
    for batch in first:
        got.append(batch["sample"].tolist())
        if len(got) == 7:
            state = first.state_dict()
            break
    again = stateful(samples, workers, method)
    again.load_state_dict(state)
    assert got + lists(again) == expected[0]


def test_stateful_dataloader_reads_several_epochs(expected):
    reading = stateful(False, 0, None)
    assert [lists(reading) for _ in range(3)] == expected
    with_workers = stateful(False, 2, "fork")
    runs = []
    for epoch in range(3):
        with_workers.dataset.set_epoch(epoch)
        runs.append(lists(with_workers))
    assert runs == expected


def test_stateful_dataloader_state_at_the_end_of_an_epoch_gives_the_next(expected):
    first = stateful(False, 0, None)
    assert lists(first) == expected[0]
    again = stateful(False, 0, None)
    again.load_state_dict(first.state_dict())
    assert lists(again) == expected[1]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_order_does_not_depend_on_loader_processes(workers, expected):
    method = "fork" if workers else None
    reading = TorchLoader(loader(), num_workers=workers, multiprocessing_context=method)
    assert len(reading) == len(expected[0])
    assert [lists(reading) for _ in range(2)] == expected[:2]


def test_state_moves_between_any_numbers_of_processes(expected):
    got, state = [], None
    for workers, method in [(2, "fork"), (0, None), (3, "fork"), (1, "fork")]:
        reading = TorchLoader(loader(), num_workers=workers, multiprocessing_context=method)
        if state is not None:
            reading.load_state_dict(json.loads(json.dumps(state)))
        for batch in reading:
            got.append(batch["sample"].tolist())
            if len(got) % 4 == 0:
                break
        state = reading.state_dict()
        assert len(json.dumps(state)) < 4096
    plain = loader()
    plain.load_state_dict(state)
    assert got + lists(plain) == expected[0]


def test_state_moves_to_other_worlds_and_batch_sizes():
    seen, state = [], None
    for world, batch in [(2, 16), (3, 7), (1, 50)]:
        for rank in range(world):
            reading = TorchLoader(loader(batch, rank=rank, world_size=world), num_workers=rank)
            if state is not None:
                reading.load_state_dict(state)
            for count, got in enumerate(reading, 1):
                seen.append(got["sample"])
                if count == 3 and world > 1:
                    break
        state = reading.state_dict()
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(SAMPLES))


def test_plain_dataloader_collates_samples(expected):
    dataset = StrataDataset(loader(), samples=True)
    assert lists(DataLoader(dataset, batch_size=BATCH)) == expected[0]


@pytest.mark.parametrize("method", METHODS)
def test_files_are_read_in_loader_processes_after_the_parent_used_them(tmp_path, method):
    ids = np.arange(1000)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": ids, "name": [f"n{i}" for i in ids]}), path, row_group_size=50)
    source = FileSource(build_index(path, "parquet", use_cache=False), 50)
    first = Loader(source, 30, output="torch")
    begun = next(iter(first))["id"].tolist()
    reading = TorchLoader(first, num_workers=2, multiprocessing_context=method)
    rest = [i for batch in reading for i in batch["id"].tolist()]
    assert sorted(begun + rest) == list(range(1000))


def test_loader_processes_end_with_the_iteration():
    reading = TorchLoader(loader(), num_workers=2, multiprocessing_context="fork")
    before = set(multiprocessing.active_children())
    for _ in reading:
        break
    del _
    reading.loader.close()
    left = set(multiprocessing.active_children()) - before
    for child in left:
        child.join(10)
    assert not set(multiprocessing.active_children()) - before


def test_tensors_have_the_arrays_types_and_may_be_changed():
    batch = next(iter(Loader(NumberSource(100, 10), 10, output="torch", shuffle=False, ids=True)))
    assert batch["sample"].dtype == batch["__id__"].dtype == torch.int64
    batch["sample"] += 1
    assert batch["sample"].tolist() == list(range(1, 11))
    assert batch["__id__"].tolist() == list(range(10))


def test_options_that_belong_to_the_loader_are_refused():
    for name in ("batch_size", "shuffle", "sampler", "drop_last"):
        with pytest.raises(TypeError, match=name):
            TorchLoader(loader(), **{name: 1})
    with pytest.raises(TypeError, match="persistent_workers"):
        TorchLoader(loader(), num_workers=1, persistent_workers=True)


def test_order_of_arrival_is_refused():
    with pytest.raises(TypeError, match="in_order"):
        TorchLoader(loader(), num_workers=2, in_order=False)
    assert len(TorchLoader(loader(), num_workers=2, in_order=True)) == len(loader())


@pytest.mark.parametrize("workers", [0, 2])
def test_older_iteration_ends_when_another_begins(workers, expected):
    reading = TorchLoader(
        loader(), num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    older = iter(reading)
    got = [next(older)["sample"].tolist()]
    newer = iter(reading)
    got.append(next(newer)["sample"].tolist())
    with pytest.raises(RuntimeError, match="this iteration has ended"):
        next(older)
    assert got + lists(newer) == expected[0]
    assert reading.epoch == 1


def kept(samples=False, method="fork"):
    dataset = StrataDataset(loader(), samples=samples)
    reading = DataLoader(
        dataset,
        batch_size=BATCH if samples else None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    return dataset, reading


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_kept_loader_processes_follow_set_epoch(method, expected):
    """Whatever epoch comes next, and wherever the one before was left."""
    dataset, reading = kept(method=method)
    for epoch in (0, 2, 1, 1):
        dataset.set_epoch(epoch)
        for _ in zip(range(3), reading, strict=False):
            pass
        dataset.set_epoch(epoch)
        assert lists(reading) == expected[epoch]


@pytest.mark.parametrize("samples", [False, True])
def test_kept_loader_processes_refuse_to_go_on_in_an_epoch_that_was_left(samples, expected):
    _, reading = kept(samples)
    for _ in zip(range(3), reading, strict=False):
        pass
    with pytest.raises(RuntimeError, match="set_epoch"):
        lists(reading)


def test_kept_loader_processes_go_to_the_next_epoch_by_themselves(expected):
    _, reading = kept()
    assert [lists(reading) for _ in range(3)] == expected


def test_loader_processes_begin_where_the_training_process_left_the_dataset(expected):
    dataset = StrataDataset(loader())
    got = []
    for batch in DataLoader(dataset, batch_size=None):
        got.append(batch["sample"].tolist())
        if len(got) == 2:
            break
    reading = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert got + lists(reading) == expected[0]


def test_lengths_of_lists_that_differ_between_loader_processes_are_an_error(tmp_path):
    """Each process by itself sees one length only."""
    table = pa.table({"v": pa.array([[1, 2], [1, 2, 3]] * 20, pa.list_(pa.int8()))})
    pq.write_table(table, tmp_path / "all.parquet")
    source = FileSource(build_index(tmp_path, "parquet", use_cache=False))
    reading = Loader(source, 1, shuffle=False, output="torch")
    batches = TorchLoader(reading, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(ShardError, match=r"'v' has rows, in different batches, .*\(2, 3\)"):
        list(batches)
    assert reading.position == 1


def noisy(batch):
    """A transform that draws random numbers as people do."""
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return {**batch, "drawn": drawn}


def noise(batches):
    return [(batch["sample"].tolist(), batch["drawn"]) for batch in batches]


def test_random_numbers_of_loader_processes_survive_a_resume_with_other_processes():
    def reading(workers):
        made = loader(transform=noisy)
        return TorchLoader(made, num_workers=workers, multiprocessing_context="fork")

    torch.manual_seed(1)
    whole = reading(2)
    expected = [noise(whole), noise(whole)]
    assert len({str(drawn) for epoch in expected for _, drawn in epoch}) == 2 * len(expected[0])
    torch.manual_seed(2)
    first = reading(1)
    got = noise(first)
    for batch in first:
        got += noise([batch])
        if len(got) == len(expected[0]) + 5:
            break
    torch.manual_seed(3)
    again = reading(3)
    again.load_state_dict(first.state_dict())
    assert got + noise(again) == expected[0] + expected[1]


def test_random_numbers_of_kept_loader_processes_are_those_of_the_epoch():
    def reading():
        dataset = StrataDataset(loader(transform=noisy))
        return dataset, DataLoader(
            dataset,
            batch_size=None,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
        )

    _, undisturbed = reading()
    expected = [noise(undisturbed) for _ in range(2)]
    dataset, restarted = reading()
    dataset.set_epoch(1)
    assert noise(restarted) == expected[1]
