"""Files of the safetensors format, compared with what its own library reads and writes."""

import json
import struct
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from dtruntime.checkpoint import CheckpointManager
from dtruntime.checkpoint import safetensors as module
from dtruntime.checkpoint.safetensors import export_safetensors, import_safetensors
from dtruntime.checkpoint.safetensors_format import NAMES
from dtruntime.errors import StorageError


@pytest.fixture
def manager(tmp_path: Path):
    with CheckpointManager(tmp_path / "ckpt", keep_count=None) as made:
        yield made


def exported(manager, state, path: Path, **options) -> Path:
    manager.save(state, step=3, epoch=1).wait()
    export_safetensors(manager, 3, path, **options)
    return path


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        return file.metadata()


def random_tensor(name: str, *shape: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.reshape(-1).view(dtype).reshape(shape)


def test_model_is_exported_as_the_library_reads_it(manager, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(70, 30), torch.nn.BatchNorm1d(30))
    state = {"model": model.state_dict(), "lr": 0.5, "names": ["a", None]}
    path = exported(manager, state, tmp_path / "m.safetensors")
    read = load_tensors(path)
    assert set(read) == {f"model.{name}" for name in model.state_dict()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[f"model.{name}"], tensor)
    metadata = metadata_of(path)
    assert (metadata["format"], metadata["step"], metadata["epoch"]) == ("pt", "3", "1")
    values = json.loads(metadata["strata.values"])
    assert (values["lr"], values["names.0"], values["names.1"]) == (0.5, "a", None)


def test_one_part_of_a_state_is_exported_under_its_own_names(manager, tmp_path):
    state = {"model": {"w": np.arange(3.0), "n": 1}, "optimizer": {"w": np.zeros(3)}}
    path = exported(manager, state, tmp_path / "m.safetensors", under="model")
    assert {name: array.tolist() for name, array in load_arrays(path).items()} == {"w": [0, 1, 2]}
    assert json.loads(metadata_of(path)["strata.values"]) == {"n": 1}
    with pytest.raises(KeyError, match="'modle'"):
        export_safetensors(manager, 3, path, under="modle")


def test_progress_is_told_of_every_byte(manager, tmp_path):
    state = {"a": np.zeros(1000), "b": np.zeros((40, 30), order="F"), "c": np.zeros(0)}
    manager.save(state, 3).wait()
    told = []

    def progress(total):
        told.append(-total)
        return told.append

    export_safetensors(manager, 3, tmp_path / "m.safetensors", progress=progress)
    assert told[0] == -(8 * 1000 + 8 * 40 * 30)
    assert sum(told) == 0


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_type_of_elements_goes_both_ways(manager, tmp_path, name):
    tensor = random_tensor(name, 5, 3)
    path = exported(manager, {"x": tensor}, tmp_path / "x.safetensors")
    read = load_tensors(path)["x"]
    assert read.dtype == tensor.dtype
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    theirs = tmp_path / "theirs.safetensors"
    save_tensors({"x": tensor}, theirs, {"format": "pt"})
    import_safetensors(manager, theirs, 4)
    back = manager.load_state(4)["x"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_arrays_that_are_not_in_c_order_are_put_in_order(manager, tmp_path):
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    wave = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {
        "fortran": np.asfortranarray(grid),
        "backwards": grid[::-1, ::-2],
        "big": grid.astype(">f4"),
        "brain": np.asfortranarray(grid.astype(ml_dtypes.bfloat16)),
        "transposed": torch.from_numpy(grid).t(),
        "conjugate": wave.conj(),
        "negative": wave.conj().imag,
        "scalar": np.array(7, np.int16),
        "nothing": np.zeros((0, 3), np.int8),
    }
    read = load_tensors(exported(manager, state, tmp_path / "x.safetensors"))
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            expected = value
        else:
            expected = torch.tensor(np.array(value, np.float32).tolist())
        assert read[name].shape == value.shape, name
        assert read[name].to(expected.dtype).tolist() == expected.tolist(), name
    assert read["brain"].dtype == torch.bfloat16
    assert read["scalar"].dtype == torch.int16


def test_shared_tensors_are_written_for_every_name_and_noted(manager, tmp_path):
    weight = torch.randn(6, 4)
    state = {"a": weight, "b": weight, "row": weight[2], "own": torch.randn(4)}
    path = exported(manager, state, tmp_path / "x.safetensors")
    read = load_tensors(path)
    for name, tensor in state.items():
        assert torch.equal(read[name], tensor)
    assert json.loads(metadata_of(path)["strata.shared"]) == [["a", "b", "row"]]


def test_small_and_large_tensors_pass_through_little_memory(manager, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SLAB", 1000)
    rng = np.random.default_rng(0)
    state = {f"t{i}": rng.standard_normal(size) for i, size in enumerate([1, 300, 50, 0, 125, 999])}
    read = load_arrays(exported(manager, state, tmp_path / "x.safetensors"))
    for name, array in state.items():
        assert np.array_equal(read[name], array), name


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (np.array(["a", "b"]), "str"),
        (np.zeros(2, [("x", "f4")]), "x"),
        (np.zeros(2, ml_dtypes.int4), "int4"),
    ],
)
def test_types_that_the_format_lacks_are_named(manager, tmp_path, value, named):
    with pytest.raises(TypeError, match=rf"'deep\.x' has elements of type .*{named}"):
        exported(manager, {"deep": {"x": value}}, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_names_that_would_meet_are_refused(manager, tmp_path):
    state = {"a.b": np.zeros(1), "a": {"b": np.ones(1)}}
    with pytest.raises(ValueError, match=r"both be called 'a\.b'"):
        exported(manager, state, tmp_path / "x.safetensors")


def test_other_kinds_of_checkpoints_are_refused_and_the_newest_state_is_taken(manager, tmp_path):
    manager.save({"x": np.ones(2)}, step=1).wait()
    manager.save(OrderedDict(x=np.full(2, 2.0)), step=2).wait()
    export_safetensors(manager, None, tmp_path / "x.safetensors")
    assert load_arrays(tmp_path / "x.safetensors")["x"].tolist() == [2, 2]
    manager.save(b"bytes", step=3).wait()
    with pytest.raises(TypeError, match="step 3 is bytes"):
        export_safetensors(manager, 3, tmp_path / "y.safetensors")


def test_damage_is_noticed_and_leaves_no_file(manager, tmp_path):
    manager.save({"x": np.random.default_rng(0).bytes(20_000)}, step=3).wait()
    pack = next((tmp_path / "ckpt" / "packs").iterdir())
    raw = bytearray(pack.read_bytes())
    raw[6000] ^= 1
    pack.write_bytes(raw)
    with pytest.raises(StorageError, match="do not match its digest"):
        export_safetensors(manager, 3, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_file_of_the_library_is_imported_as_a_state(manager, tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(3, np.uint8), "c": np.zeros((0, 2))}
    path = tmp_path / "x.safetensors"
    save_arrays(arrays, path, {"who": "me", "long": "x" * 5000})
    saved = import_safetensors(manager, path, 8, epoch=2)
    state = manager.load_state(8)
    assert {name: array.tolist() for name, array in state.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert all(isinstance(array, np.ndarray) for array in state.values())
    info = manager.checkpoints()[-1]
    assert (info.checkpoint_id, info.epoch) == (saved.checkpoint_id, 2)
    assert info.metadata == {"who": "me"}
    import_safetensors(manager, path, 9, framework="torch")
    assert torch.equal(manager.load_state(9)["a"], torch.from_numpy(arrays["a"]))


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def raw_file(header: object, data: bytes = bytes(8), length: int | None = None) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body) if length is None else length) + body + data


HOSTILE = {
    "empty": b"",
    "short": b"\1\0\0",
    "huge length": raw_file({}, length=2**63),
    "length past the end": raw_file({"x": entry()}, length=200),
    "not json": raw_file(b"{'x': 1}"),
    "not utf-8": raw_file(b'{"\xff": 1}'),
    "list": raw_file([]),
    "nested": raw_file(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "twice": raw_file(b'{"x":1,"x":2}'),
    "unknown type": raw_file({"x": entry("X9")}),
    "no shape": raw_file({"x": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "more": raw_file({"x": entry(evil=1)}),
    "negative": raw_file({"x": entry(shape=(-2,))}),
    "boolean": raw_file({"x": entry(shape=(True, 2))}),
    "overflow": raw_file({"x": entry(shape=(2**62, 2**62))}),
    "empty of enormous shape": raw_file({"x": entry(shape=(0, 2**62), offsets=(0, 0))}, b""),
    "dimensions": raw_file({"x": entry(shape=[1] * 80 + [2])}),
    "backwards": raw_file({"x": entry(offsets=(8, 0))}),
    "past the end": raw_file({"x": entry(shape=(4,), offsets=(0, 16))}),
    "gap": raw_file({"x": entry(shape=(1,), offsets=(4, 8))}),
    "rest": raw_file({"x": entry(shape=(1,), offsets=(0, 4))}),
    "overlap": raw_file({"x": entry(), "y": entry(shape=(1,), offsets=(4, 8))}),
    "metadata": raw_file({"__metadata__": {"a": 1}, "x": entry()}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_unsound_files_are_refused_and_save_nothing(manager, tmp_path, name):
    path = tmp_path / "evil.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(StorageError, match=r"evil\.safetensors is not a sound safetensors file"):
        import_safetensors(manager, path, 1)
    assert manager.steps() == []


STRICTER = {"boolean", "more", "dimensions", "twice", "empty of enormous shape"}
"""Where we are stricter than the library."""


@pytest.mark.parametrize("name", sorted(set(HOSTILE) - STRICTER))
def test_what_we_refuse_the_library_refuses_too(tmp_path, name):
    path = tmp_path / "evil.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises((SafetensorError, OSError)):
        safe_open(path, "np")


def test_missing_file_and_wrong_framework_are_named(manager, tmp_path):
    with pytest.raises(StorageError, match=r"none\.safetensors cannot be read"):
        import_safetensors(manager, tmp_path / "none.safetensors", 1)
    with pytest.raises(ValueError, match="tensorflow"):
        import_safetensors(manager, tmp_path / "x", 1, framework="tensorflow")
