"""What earlier releases stored is read by this one: checkpoints, loader states, a coordinator's.

The archives were made by ``stored_programs.py``; see there what is in them.
"""

import json
import tarfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dtruntime import CheckpointManager, DatasetRegistry, TrainingOrchestrator
from dtruntime.checkpoint.dcp import StrataReader
from dtruntime.client.observer import Observer
from dtruntime.testing import LocalCoordinator
from tests.support.paths import STORED
from tests.support.programs import stored_programs as stored

ARCHIVES = sorted(STORED.glob("stored-*.tar.gz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def folder(request, tmp_path):
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert found == expected


def test_states_full_and_incremental(folder):
    with CheckpointManager(folder / "states") as manager:
        assert manager.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            loaded = manager.load_state(step)
            assert_same(loaded, stored.state(step))
            weight, tied = loaded["model"]["weight"], loaded["model"]["tied"]
            assert weight.data_ptr() == tied.data_ptr(), "they share their memory"
        manager.save(stored.state(4), step=4, is_full=False).wait()
        assert_same(manager.load_state(4), stored.state(4))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_bytes_and_distributed_checkpoints(folder):
    with CheckpointManager(folder / "bytes") as manager:
        assert manager.load_bytes() == bytes(range(256)) * 64
    expected = stored.state(4)["model"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with CheckpointManager(folder / "distributed") as manager:
        dcp.load(loaded, storage_reader=StrataReader(manager), no_dist=True)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_run_goes_on_to_the_same_weights(folder):
    step, weights = stored.train(folder, stored.STEPS)
    assert step == stored.STEPS
    assert np.array_equal(weights.numpy(), np.load(folder / "weights.npy"))


def test_coordinator_and_loader_go_on(folder):
    """Started on the directory of another version, in the middle of an epoch."""
    left = json.loads((folder / "loader.json").read_text())
    with LocalCoordinator(folder / "coordinator") as coordinator:
        with Observer(coordinator.url) as observer:
            assert [item.step for item in observer.checkpoints(stored.JOB)] == [30]
        worker = TrainingOrchestrator(coordinator_url=coordinator.url, job=stored.JOB, world_size=1)
        worker.register()
        loader = DatasetRegistry().loader("numbers", batch_size=stored.BATCH, seed=3)
        loader.load_state_dict(left["state"])
        rest = [int(number) for batch in loader for number in batch["sample"]]
        worker.deregister()
    assert sorted(left["read"] + rest) == list(range(stored.SAMPLES))
