"""Distributed checkpoints and exports use both tiers."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from dtruntime.checkpoint.dcp import StrataReader, StrataWriter
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.safetensors import export_safetensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def loaded(manager: CheckpointManager) -> torch.Tensor:
    target = {"x": torch.zeros(300_000)}
    dcp.load(target, storage_reader=StrataReader(manager))
    return target["x"]


def test_distributed_checkpoints_are_uploaded_and_read_wherever_they_are(tmp_path: Path) -> None:
    main, local = tmp_path / "main", tmp_path / "local"
    with CheckpointManager(main, local_tier=local, local_keep=1) as manager:
        for step in (1, 2, 3):
            state = {"x": torch.full((300_000,), float(step))}
            dcp.save(state, storage_writer=StrataWriter(manager, step))
        assert loaded(manager)[0] == 3
        manager.wait(30)
        with CheckpointManager(main) as reader:
            assert reader.steps() == [1, 2, 3]
            assert loaded(reader)[0] == 3
    shutil.rmtree(local)
    with CheckpointManager(main, local_tier=local) as manager:
        assert loaded(manager)[0] == 3


def test_parts_that_are_on_another_machine_are_noticed_at_the_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "main", local_tier=tmp_path / "local") as manager:
        writer = StrataWriter(manager, 1)
        stored = writer._store_description

        def elsewhere(part):
            named = stored(part)
            manager.engine.store.backend.delete(named.file)
            return named

        writer._store_description = elsewhere  # type: ignore[method-assign]
        with pytest.raises(dcp.api.CheckpointException, match="all ranks share its folder"):
            dcp.save({"x": torch.ones(10)}, storage_writer=writer)
        assert manager.steps() == []


def test_state_is_exported_from_either_tier(tmp_path: Path) -> None:
    main, local = tmp_path / "main", tmp_path / "local"
    with CheckpointManager(main, local_tier=local) as manager:
        manager.save({"w": torch.arange(10.0)}, step=1)
        export_safetensors(manager, None, tmp_path / "a.safetensors")
    shutil.rmtree(local)
    with CheckpointManager(main, local_tier=local) as manager:
        export_safetensors(manager, 1, tmp_path / "b.safetensors")
    for name in ("a", "b"):
        assert torch.equal(load_file(tmp_path / f"{name}.safetensors")["w"], torch.arange(10.0))
