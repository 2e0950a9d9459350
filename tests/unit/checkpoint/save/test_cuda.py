"""Tensors on a GPU: saved from the device, and loaded back onto it."""

import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dtruntime import CheckpointManager
from dtruntime.checkpoint.dcp import StrataReader, StrataWriter
from dtruntime.checkpoint.save import cuda
from dtruntime.checkpoint.save.staging import SLAB
from dtruntime.checkpoint.state_dict.torch_tensors import DTYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

MIB = 2**20


@pytest.fixture(params=["copied on the device", "fetched at once"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With room for a copy on the device, and without."""
    if request.param == "fetched at once":
        monkeypatch.setattr(cuda, "SPARE_BYTES", 2**60)
    return str(request.param)


def on_gpu(nbytes, seed, dtype="int32"):
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=seeded(seed))
    return raw.cuda().view(DTYPES[dtype])


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def bits(tensor):
    """The bytes of the elements in their order, whatever they mean."""
    size = tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    shape, strides = (*tensor.shape, size), (*(size * step for step in tensor.stride()), 1)
    raw.set_(tensor.untyped_storage(), tensor.storage_offset() * size, shape, strides)
    return raw.cpu().numpy().tobytes()


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"bool"}))
def test_every_type_of_elements_comes_back_to_the_device(tmp_path, dtype):
    whole = on_gpu(6 * 64 * DTYPES[dtype].itemsize, 1, dtype).view(6, 64)
    state = {
        "whole": whole,
        "row": whole[2],
        "turned": whole.t(),
        "gaps": on_gpu(64 * DTYPES[dtype].itemsize, 2, dtype)[::2],
        "expanded": on_gpu(4 * DTYPES[dtype].itemsize, 3, dtype).expand(3, 4),
        "empty": whole[:0],
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1).wait()
        back = manager.load_state(1)
        hosted = manager.load_state(1, map_location="cpu")
    for name, tensor in state.items():
        for found, device in ((back[name], tensor.device), (hosted[name], torch.device("cpu"))):
            assert (found.dtype, found.shape, found.device) == (tensor.dtype, tensor.shape, device)
            assert bits(found) == bits(tensor)
    pointers = {back[name].untyped_storage().data_ptr() for name in ("whole", "row", "turned")}
    assert len(pointers) == 1, "tensors that shared memory share it again"


def test_what_is_changed_right_after_a_save_is_not_in_it(tmp_path):
    state = {f"layer.{i}": on_gpu(64 * MIB, i) for i in range(8)}
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    busy = torch.randn(4096, 4096, device="cuda")
    with CheckpointManager(tmp_path) as manager:
        for step in range(3):
            for _ in range(50):
                busy = torch.nn.functional.normalize(busy @ busy)
            for name, tensor in state.items():
                tensor.add_(1)
                expected[name].add_(1)
            handle = manager.save(state, step)
            for tensor in state.values():
                tensor.mul_(3)
            handle.wait()
            loaded = manager.load_state(step, map_location="cpu")
            assert all(torch.equal(loaded[name], expected[name]) for name in state)
            for tensor in expected.values():
                tensor.mul_(3)


def test_work_of_the_caller_s_stream_is_waited_for(tmp_path):
    tensor = torch.zeros(128 * MIB // 4, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    with CheckpointManager(tmp_path) as manager, torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for _ in range(100):
            busy = torch.nn.functional.normalize(busy @ busy)
        tensor.fill_(7)
        handle = manager.save({"t": tensor}, 1)
        tensor.fill_(8)
        handle.wait()
        assert torch.equal(manager.load_state(1)["t"], torch.full_like(tensor, 7))


@pytest.mark.parametrize("host", [1, 40, 200])
def test_states_of_device_and_host_keep_to_the_memory_budget(tmp_path, host):
    budget = 2 * SLAB
    state = {
        "gpu": {str(i): on_gpu(50 * MIB, i) for i in range(8)},
        "torch": torch.randn(host * MIB // 8, generator=seeded(1)),
        "numpy": np.random.default_rng(1).integers(0, 256, host * MIB // 2, np.uint8),
        "gaps": torch.randn(1000, 1000, device="cuda")[:, ::3],
        "step": 4,
    }
    with CheckpointManager(tmp_path, memory_budget=budget) as manager:
        for step in (1, 2):
            manager.save(state, step).wait()
        assert manager.engine.options.pool.allocated <= budget
        back = manager.load_state(2)
    assert all(torch.equal(back["gpu"][name], t) for name, t in state["gpu"].items())
    assert torch.equal(back["torch"], state["torch"])
    assert np.array_equal(back["numpy"], state["numpy"])
    assert torch.equal(back["gaps"], state["gaps"])
    assert back["step"] == 4


def test_saves_of_several_threads_share_a_small_budget(tmp_path):
    states = [{"t": on_gpu(300 * MIB, seed)} for seed in range(3)]
    handles = {}

    def save(number):
        handles[number] = manager.save(states[number], number)

    with CheckpointManager(tmp_path, keep_count=9, memory_budget=2 * SLAB) as manager:
        threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a save waits for memory that nobody gives back"
        for number in range(3):
            handles[number].wait(120)
            assert torch.equal(manager.load_state(number)["t"], states[number]["t"])


def test_memory_is_let_go_when_a_manager_ends(tmp_path, caplog):
    for step in range(6):
        with CheckpointManager(tmp_path, memory_budget=2 * SLAB) as manager:
            manager.save({"t": on_gpu(100 * MIB, step)}, step).wait()
        del manager
    assert "checkpoint.memory_not_pinned" not in caplog.text


def test_unchanged_tensors_are_not_stored_again(tmp_path):
    state = {"frozen": on_gpu(64 * MIB, 1), "trained": on_gpu(8 * MIB, 2)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1).wait()
        state["trained"].add_(1)
        saved = manager.save(state, 2, is_full=False).wait()
        assert 8 * MIB <= saved.written_bytes < 9 * MIB
        back = manager.load_state(2)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_distributed_checkpoints_of_device_tensors(tmp_path, asynchronous):
    state = {f"t{i}": on_gpu(40 * MIB, i) for i in range(4)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    if asynchronous:
        future = dcp.async_save(state, storage_writer=StrataWriter(tmp_path, 1), no_dist=True)
        for tensor in state.values():
            tensor.add_(1)
        future.result()
    else:
        dcp.save(state, storage_writer=StrataWriter(tmp_path, 1), no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=StrataReader(tmp_path, 1), no_dist=True)
    assert all(torch.equal(loaded[name], expected[name]) for name in state)
