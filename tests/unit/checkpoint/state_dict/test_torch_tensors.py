"""Tensors and other values of torch in a state."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.checkpoint.state_dict import flatten
from dtruntime.checkpoint.state_dict.torch_tensors import DTYPES
from tests.support.state_dict_round_trip import round_trip, same, stored

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor):
    """The elements by their bits, whatever they mean."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    raw = plain.view(BITS[plain.element_size()])
    return [str(element) for element in raw.reshape(-1).tolist()]


def alike(one, other):
    facts = [(type(t), t.dtype, t.shape, t.requires_grad, t.is_conj()) for t in (one, other)]
    return facts[0] == facts[1] and bits(one) == bits(other)


def random_bits(dtype, shape, seed):
    count = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=seeded(seed))
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@st.composite
def tensors(draw):
    """Tensors of any bits: contiguous, transposed, with gaps, sliced or expanded."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = random_bits(dtype, shape, draw(st.integers(0, 99)))
    changes = {
        "none": lambda t: t,
        "transposed": lambda t: t.permute(tuple(reversed(range(t.dim())))),
        "gaps": lambda t: t[(slice(None, None, 2),) * t.dim()],
        "sliced": lambda t: t[1:] if t.dim() else t,
        "expanded": lambda t: t.expand(3, *t.shape),
        "expanded inside": lambda t: t.unsqueeze(-1).expand(*t.shape, 2),
    }
    return changes[draw(st.sampled_from(sorted(changes)))](tensor)


@settings(deadline=None)
@given(tensors())
def test_tensors_are_restored_with_type_shape_and_bits(tensor):
    assert alike(round_trip({"t": tensor})["t"], tensor)


def test_every_type_of_elements_but_quantised_ones_is_stored():
    found = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    left = {str(dtype).removeprefix("torch.") for dtype in found - set(DTYPES.values())}
    assert left == {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}


@settings(deadline=None)
@given(st.lists(tensors(), max_size=4))
def test_tensors_in_a_state_are_restored_in_their_places(found):
    back = round_trip([[tensor, i] for i, tensor in enumerate(found)])
    assert [number for _, number in back] == list(range(len(found)))
    assert all(alike(tensor, back[i][0]) for i, tensor in enumerate(found))


def test_strides_of_dense_tensors_are_kept_and_need_no_copy():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    buffer = flatten(image).buffers[0]
    assert buffer.memory() is not None
    assert round_trip(image).stride() == image.stride()


def test_expanded_tensor_is_stored_unexpanded_and_restored_expanded():
    tensor = torch.tensor([1.0, 2.0]).expand(1000, 2)
    assert [len(part) for part in stored(tensor)[1]] == [8]
    back = round_trip(tensor)
    assert back.stride() == (0, 1)
    assert torch.equal(back, tensor)


def test_memory_is_the_tensors_own():
    tensor = torch.zeros(4)
    view = flatten(tensor).buffers[0].memory()
    tensor[0] = 1.0
    assert view is not None
    assert view[:4] == torch.ones(1).numpy().tobytes()


def test_parameters_and_gradients_are_kept():
    state = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "counter": torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 2,
        "plain": torch.ones(2),
        "empty": torch.nn.Parameter(torch.ones(0, 3)),
    }
    back = round_trip(state)
    assert all(alike(back[key], state[key]) for key in state)
    assert back["result"].is_leaf


def test_conjugated_and_negated_views_are_restored_as_such():
    base = torch.randn(3, dtype=torch.complex64)
    state = {"base": base, "conj": base.conj(), "imag": base.conj().imag, "part": base.conj()[::2]}
    assert [len(part) for part in stored(state)[1]] == [24]
    back = round_trip(state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert back["conj"].is_conj()
    assert back["imag"].is_neg()


def test_sizes_types_and_devices_are_values_too():
    state = [
        torch.Size([1, 2]),
        torch.bfloat16,
        torch.qint8,
        torch.device("cuda:3"),
        torch.Size([]),
    ]
    assert same(round_trip(state), state)


def test_random_generator_continues_from_its_state():
    generator = seeded(5)
    torch.rand(3, generator=generator)
    other = torch.Generator()
    other.set_state(round_trip({"rng": generator.get_state()})["rng"])
    assert torch.equal(torch.rand(3, generator=other), torch.rand(3, generator=generator))


def test_module_and_optimizer_continue_alike():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    step(model, optimizer)
    back = round_trip({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert type(back["model"]) is OrderedDict
    assert vars(back["model"])["_metadata"] == model.state_dict()._metadata
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(back["model"])
    other_optimizer = torch.optim.AdamW(other.parameters(), amsgrad=True)
    other_optimizer.load_state_dict(back["optimizer"])
    step(model, optimizer)
    step(other, other_optimizer)
    assert all(alike(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(15.0).view(5, 3)).square().sum().backward()
    optimizer.step()


def test_version_changes_with_every_change_in_place():
    weight = torch.nn.Parameter(torch.zeros(3))
    buffers = flatten({"a": weight.detach(), "b": torch.zeros(2)}).buffers
    before = [buffer.version() for buffer in buffers]
    with torch.no_grad():
        weight.add_(1)
    assert [buffer.version() == old for buffer, old in zip(buffers, before, strict=True)] == [
        False,
        True,
    ]


def test_version_of_shared_memory_changes_with_any_of_its_tensors():
    base = torch.zeros(4)
    buffer = flatten([base[:3], base.data[1:]]).buffers[0]
    before = buffer.version()
    buffer.sources[1].add_(1)
    assert buffer.version() != before


def test_tensors_of_inference_mode_have_no_version_but_are_stored():
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert flatten(tensor).buffers[0].version() is None
    assert torch.equal(round_trip(tensor), torch.ones(3))


def test_memory_that_was_replaced_since_is_not_read():
    tensor = torch.zeros(4)
    buffer = flatten({"weights": tensor}).buffers[0]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weights was moved to other memory"):
        buffer.copy_into(memoryview(bytearray(16)))


def test_bytes_on_the_device_are_a_view_unless_there_are_gaps():
    tensor = torch.arange(6, dtype=torch.int16)
    buffers: Any = flatten([tensor, torch.zeros(4, 4)[:, 1]]).buffers
    whole, gaps = buffers
    whole.bytes()[0] = 9
    assert tensor[0] == 9
    assert whole.in_one_piece
    assert not gaps.in_one_piece
    assert gaps.bytes().shape == (16,)


class Marked(torch.Tensor):
    pass


def quantised():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (quantised, TypeError, "quantised"),
        (lambda: torch.ones(2).to_sparse(), TypeError, "to_dense"),
        (lambda: torch.empty(2, device="meta"), ValueError, "meta device"),
        (lambda: torch.ones(2).as_subclass(Marked), TypeError, "DCP integration"),
        (lambda: torch.nn.UninitializedParameter(), TypeError, "UninitializedParameter"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), TypeError, "nested"),
        (lambda: torch.nn.Linear(1, 1), TypeError, r"save its \.state_dict"),
        (lambda: torch.Generator(), TypeError, "get_state"),
        (lambda: torch.ones(2).untyped_storage(), TypeError, "UntypedStorage"),
        (lambda: torch.float32.to_real, TypeError, "function"),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused_with_a_remedy(make, error, reason):
    with pytest.raises(error, match=rf"^state\['x'\] .*{reason}"):
        flatten({"x": make()})


def test_tensor_whose_memory_was_freed_is_refused():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^state\['x'\] .*has been freed"):
        flatten({"x": tensor})


def test_distributed_tensor_is_refused_in_favour_of_dcp(tmp_path):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        tensor = distribute_tensor(torch.ones(2), DeviceMesh("cpu", [0]), [Replicate()])
        with pytest.raises(TypeError, match=r"DTensor.*torch\.distributed\.checkpoint"):
            flatten({"x": tensor})
    finally:
        torch.distributed.destroy_process_group()
