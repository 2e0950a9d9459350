"""One of two processes that run JAX together: ``python -m ... FOLDER PROCESS ADDRESS``."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtruntime import CheckpointManager, TrainingOrchestrator
from dtruntime.checkpoint.jax import load_sharded, save_sharded


def main() -> None:
    folder, process, address = sys.argv[1:]
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    assert len(jax.devices()) == 8
    weights = np.arange(24 * 16, dtype=np.float32).reshape(24, 16)
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec("a"))
    grid = np.array(jax.devices()).reshape(2, 4).T
    tiles = NamedSharding(Mesh(grid, ("a", "b")), PartitionSpec("a", "b"))
    array = jax.make_array_from_callback(weights.shape, rows, lambda index: weights[index])
    with TrainingOrchestrator(world_size=2, rank=int(process)) as orchestrator:
        orchestrator.register()
        with CheckpointManager(folder, sharded=True) as manager:
            save_sharded(manager, {"w": array, "step": 1}, 1).wait()
            orchestrator.barrier("saved")
            loaded = load_sharded(manager, {"w": tiles, "step": 0})
            assert loaded["step"] == 1
            assert loaded["w"].sharding == tiles
            for shard in loaded["w"].addressable_shards:
                assert np.array_equal(np.asarray(shard.data), weights[shard.index])
            orchestrator.barrier("loaded")
        with CheckpointManager(folder) as alone, pytest.raises(ValueError, match="sharded=True"):
            save_sharded(alone, {"w": array}, 2)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
