"""Whatever goes into a manager comes out of it again, by any way of storing it."""

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from dtruntime.checkpoint.file_format.chunks import CHUNK, LARGE
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.storage import open_backend
from tests.support.state_dict_round_trip import same

_places = itertools.count()

DTYPES = st.one_of(
    st_np.boolean_dtypes(),
    st_np.integer_dtypes(endianness="?"),
    st_np.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    st_np.complex_number_dtypes(),
    st_np.datetime64_dtypes(),
    st_np.byte_string_dtypes(max_len=9),
    st_np.array_dtypes(max_size=3),
)


def random_array(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray:
    """An array of random bits."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).bytes(size)
    return np.frombuffer(bytearray(data), dtype).reshape(shape) if size else np.empty(shape, dtype)


small = st.builds(
    random_array,
    DTYPES,
    st_np.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
    st.integers(0, 99),
)
edges = [LARGE - 1, LARGE, LARGE + 1, CHUNK - 1, CHUNK, CHUNK + 1]
large = st.builds(
    lambda size, seed: random_array(np.dtype(np.uint8), (size,), seed),
    st.sampled_from(edges) | st.integers(0, 3 * LARGE),
    st.integers(0, 3),
)
smooth = st.builds(
    lambda size, seed: np.linspace(0, 1 + seed, size, dtype=np.float32),
    st.integers(0, LARGE // 2),
    st.integers(0, 3),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
states = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        scalars | small | large | smooth,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=4,
)
options = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "gzip", "zstd"]),
        "incremental": st.booleans(),
        "delta": st.booleans(),
    }
)


def changed(state: Any) -> Any:
    """The same state after some training: small changes to arrays of floats."""
    if isinstance(state, dict):
        return {key: changed(value) for key, value in state.items()}
    if isinstance(state, np.ndarray) and state.dtype == np.float32:
        return state * np.float32(1 - 2**-18)
    return state


@pytest.mark.parametrize("kind", ["memory", "local"])
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(state=states, other=states, options=options)
def test_states_come_back(
    kind: str, state: dict[str, Any], other: dict[str, Any], options: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = folder if kind == "local" else f"memory://round-trips-{next(_places)}"
        steps = [state, changed(state), {**other, "first": state}, other, state]
        with CheckpointManager(url, keep_count=None, **options) as manager:
            for step, value in enumerate(steps):
                manager.save(value, step).wait()
            for step, value in enumerate(steps):
                assert same(manager.load_state(step), value), step
        with CheckpointManager(url) as manager:
            assert same(manager.load_state(), state)
        if kind == "memory":
            backend = open_backend(url)
            backend.delete_many([file.name for file in backend.list()])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(
    size=st.sampled_from([0, 1, *edges, 2 * CHUNK + 5]) | st.integers(0, 2 * LARGE),
    options=options,
    random_bytes=st.booleans(),
)
def test_bytes_come_back(size: int, options: dict[str, Any], random_bytes: bool) -> None:
    data = np.random.default_rng(size).bytes(size) if random_bytes else bytes(size)
    half = data[: size // 2] + bytes(size - size // 2)
    with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder, **options) as manager:
        for step, value in ((1, data), (2, half), (3, memoryview(data))):
            manager.save(value, step).wait()
        assert [manager.load_bytes(step) for step in (1, 2, 3)] == [data, half, data]


def calls_per_tensor(act: Callable[[int], object]) -> float:
    """How many more functions are called, of Python or C, with every tensor that a state has."""
    counted = []
    for tensors in (200, 1200):
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            act(tensors)
        finally:
            sys.setprofile(None)
        counted.append(calls)
    return (counted[1] - counted[0]) / 1000


def test_small_tensors_cost_a_few_calls_each(tmp_path: Path) -> None:
    """What a state of hundreds of thousands takes is what Python does with each of them."""
    torch = pytest.importorskip("torch")
    states = {n: {f"layer{i}": torch.full((4,), float(i)) for i in range(n)} for n in (200, 1200)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(states[200], 1).wait()
        manager.load_state()
        saving = calls_per_tensor(lambda n: manager.save(states[n], n))
        manager.wait()
        loading = calls_per_tensor(lambda n: manager.load_state(n))
        loaded = manager.load_state(1200)
    assert all(torch.equal(loaded[key], value) for key, value in states[1200].items())
    print(f"{saving} calls to save a tensor, {loading} to load one")
    assert saving < 60
    assert loading < 80
