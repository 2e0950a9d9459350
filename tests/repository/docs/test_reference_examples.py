"""Every python example of the reference documents that needs a coordinator runs as printed.

Only placeholders are filled in: the address, the numbers of steps, the model, the folder.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dtruntime
from dtruntime.client import Observer
from dtruntime.testing import LocalCoordinator, WorkerProcess
from dtruntime.types import Membership

REFERENCE = next(
    (
        folder
        for parent in Path(__file__).resolve().parents
        for folder in (parent / "shared" / "reference", parent / "reference")
        if folder.is_dir()
    ),
    None,
)
"""The documents lie beside the project, not in it."""

pytestmark = pytest.mark.skipif(REFERENCE is None, reason="the reference documents are not here")

IMPORTS = """
import ast, asyncio, dtruntime, io, os, socket
"""


def text_of(document: str) -> str:
    assert REFERENCE is not None
    return (REFERENCE / document).read_text(encoding="utf-8")


def blocks_of(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(document), re.DOTALL)


def block_with(document: str, *parts: str) -> str:
    found = [block for block in blocks_of(document) if all(part in block for part in parts)]
    assert len(found) == 1, f"{document} has {len(found)} blocks with {parts}"
    return found[0]


def run(
    program: str, coordinator: LocalCoordinator, job: str, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORTS + program],
        env={**os.environ, "COORDINATOR_URL": coordinator.url, "STRATA_JOB": job, **env},
        capture_output=True,
        text=True,
        timeout=100,
    )


def stored(program: str, coordinator: LocalCoordinator, job: str, **env: str) -> dict[int, str]:
    """What another process reads with the manager that an expression makes."""
    reader = f"""
from dtruntime import CheckpointManager
with {program} as manager:
    saved = manager.checkpoints()
    print({{c.step: manager.get_checkpoint(c.checkpoint_id).decode() for c in saved}})
"""
    result = run(reader, coordinator, job, **env)
    assert result.returncode == 0, result.stderr
    return dict(ast.literal_eval(result.stdout))


def latest_step(coordinator: LocalCoordinator, job: str) -> int | None:
    """The last checkpoint that the coordinator knows of; all workers have left."""
    with Observer(coordinator.url) as observer:
        status = observer.status(job)
    assert {worker.membership for worker in status.workers} == {Membership.LEFT}
    return None if status.latest_checkpoint is None else status.latest_checkpoint.step


def at(program: str, coordinator: LocalCoordinator) -> str:
    """The program with the addresses of the documents replaced by the real one."""
    return re.sub(
        r"http://(localhost|coordinator|coordinator-service):50051", coordinator.url, program
    )


def test_dataset_examples_of_the_api_reference(coordinator: LocalCoordinator, job: str) -> None:
    program = f"""
from dtruntime import DatasetRegistry
registry = DatasetRegistry({coordinator.url!r})
{block_with("api-reference.md", "registry.register(", "seed=42")}
{block_with("api-reference.md", 'files = registry.get_shard("imagenet", worker_rank=0, epoch=0)')}
assert len(files) == 129, files
assert set(files) == {{f"/data/imagenet/shard_{{i}}.parquet" for i in range(129)}}
"""
    result = run(program, coordinator, job)
    assert result.returncode == 0, result.stderr


def test_orchestrator_examples_of_the_api_reference(
    coordinator: LocalCoordinator, job: str
) -> None:
    def indented(block: str) -> str:
        return "".join(f"    {line}\n" for line in block.splitlines())

    program = f"""
from dtruntime import TrainingOrchestrator
model, dataloader, trained = None, [1, 2, 3], []
def train_step(model, batch): trained.append(batch)
async def main():
    orchestrator = TrainingOrchestrator(
        worker_id="trainer", coordinator_url={coordinator.url!r}, world_size=1, rank=0
    )
{indented(block_with("api-reference.md", "assigned_id = await orchestrator.register_worker("))}
    assert assigned_id == "trainer"
{indented(block_with("api-reference.md", 'wait_barrier("start_epoch_5")'))}
    assert trained == [1, 2, 3]
    await orchestrator.heartbeat()
asyncio.run(main())
"""
    result = run(program, coordinator, job)
    assert result.returncode == 0, result.stderr


def test_full_training_example_of_the_api_reference(
    coordinator: LocalCoordinator, job: str, s3_server: dict[str, str]
) -> None:
    example = at(block_with("api-reference.md", "async def main():", "YourModel()"), coordinator)
    example = example.replace("import torch\nimport torch.distributed as dist\n", "")
    # Nobody can count the samples of a folder that does not exist.
    example = example.replace('"parquet")', '"parquet", total_samples=1000)')
    placeholders = """
class YourModel:
    def parameters(self): return []
    def state_dict(self): return {}
    load_state_dict = print
class torch:
    class optim:
        class Adam:
            def __init__(self, parameters): pass
            def state_dict(self): return {}
            load_state_dict = print
    @staticmethod
    def save(state, buffer): buffer.write(repr(state).encode())
    @staticmethod
    def load(buffer): return ast.literal_eval(buffer.read().decode())
def create_dataloader(files): return iter(range(10**6))
def train_step(model, batch, optimizer): return 0.5
total_steps, steps_per_epoch, checkpoint_interval = 20, 5, 10
"""
    program = IMPORTS + placeholders + example
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job, "WORLD_SIZE": "2"}
    env |= s3_server | {"CHECKPOINT_BUCKET": "reference-api"}
    for begins_with in (0, 10):
        with (
            WorkerProcess(program, env={**env, "RANK": "0"}) as first,
            WorkerProcess(program, env={**env, "RANK": "1"}) as second,
        ):
            for worker in (first, second):
                assert worker.expect("Step", timeout=60).startswith(f"Step {begins_with},")
                assert worker.expect("Training complete", timeout=60)
                assert worker.wait() == 0, worker.log
        manager = 'CheckpointManager("/checkpoints", backend="s3")'
        states = stored(manager, coordinator, job, **env)
        assert {step: ast.literal_eval(text)["step"] for step, text in states.items()} == {
            0: 0,
            10: 10,
        }
        assert latest_step(coordinator, job) == 10


def test_quick_start_example_of_the_runtime_readme(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    example = at(block_with("readme-runtime.md", "training_data"), coordinator)
    example = example.replace("/tmp/checkpoints", str(tmp_path))
    result = run(example, coordinator, job)
    assert result.returncode == 0, result.stderr
    assert "Assigned 10 shards" in result.stdout
    assert result.stdout.rstrip().endswith("Training complete!")
    with dtruntime.CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [500, 600, 700, 800, 900]
        assert manager.load_bytes(900) == b"step_900"
    assert latest_step(coordinator, job) == 900


def test_usage_example_of_the_strata_readme(
    coordinator: LocalCoordinator, job: str, s3_server: dict[str, str]
) -> None:
    example = at(block_with("readme-strata.md", "WORLD_SIZE = 8"), coordinator)
    assert "range(10_000)" in example
    example = example.replace("range(10_000)", "range(20)").replace(
        "WORLD_SIZE = 8", "WORLD_SIZE = 1"
    )
    placeholders = """
model, steps_per_epoch = None, 5
def serialize_model(model): return b"weights"
"""
    env = s3_server | {"CHECKPOINT_BUCKET": "reference-strata"}
    result = run(placeholders + example, coordinator, job, **env)
    assert result.returncode == 0, result.stderr
    manager = 'CheckpointManager("/checkpoints", backend="s3")'
    assert stored(manager, coordinator, job, **env) == {0: "weights"}
    assert latest_step(coordinator, job) == 0


def test_pytorch_example_of_the_sdk_reference(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    text = text_of("sdk-reference.txt")
    constructor = re.search(r"config = WorkerConfig\(.*?^\)\n", text, re.DOTALL | re.MULTILINE)
    assert constructor is not None
    program = f"""
from dtruntime import CheckpointManager, DatasetRegistry, TrainingOrchestrator, WorkerConfig
{at(constructor[0], coordinator)}
orchestrator = TrainingOrchestrator(config)
dataset_reg = DatasetRegistry()
ckpt_manager = CheckpointManager({str(tmp_path)!r})
worker_id = orchestrator.register()
dataset_reg.register_dataset("imagenet", total_samples=1_281_167, shard_size=10_000, shuffle=True)
shards = dataset_reg.get_shards("imagenet", epoch=0)
assert len(shards) == 129 and shards[0].end_index > shards[0].start_index
dataloader = range(2001)
for epoch in range(10):
    for step, batch in enumerate(dataloader):
        if step % 1000 == 0:
            orchestrator.barrier(f"ckpt_{{step}}")
            if worker_id == "worker-0":
                buffer = io.BytesIO(f"{{epoch}} {{step}}".encode())
                ckpt_manager.save(buffer.getvalue(), step, epoch)
    orchestrator.barrier(f"epoch_{{epoch}}_complete")
print(orchestrator.get_status().gpu_count)
"""
    for line in ('orchestrator.barrier(f"ckpt_{step}")', "worker_id = orchestrator.register()"):
        assert line in text
    result = run(program, coordinator, job)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "8"
    manager = f"CheckpointManager({str(tmp_path)!r})"
    # Each epoch counts its steps from 0: the last one saved of a step is the one that stays.
    assert stored(manager, coordinator, job) == {step: f"9 {step}" for step in (0, 1000, 2000)}
    assert latest_step(coordinator, job) is not None


def test_configuration_example_of_the_api_reference(tmp_path: Path) -> None:
    found = re.search(r"```toml\n(.*?)```", text_of("api-reference.md"), re.DOTALL)
    assert found is not None
    (tmp_path / "config.toml").write_text(found[1], encoding="utf-8")
    config = dtruntime.Config.from_file(tmp_path / "config.toml")
    assert config.coordinator.address == "0.0.0.0:50051"
    assert config.coordinator.heartbeat_timeout_ms == 30000
    assert (config.storage.backend, config.storage.region) == ("s3", "us-west-2")
    assert (config.checkpoint.keep_last_n, config.checkpoint.compression) == (5, "gzip")
    assert config.dataset.prefetch_shards == 2


def test_names_of_the_sdk_reference_are_there() -> None:
    for name in ("ConnectionError", "StorageError", "SyncError", "ShardError"):
        assert f"dtruntime.{name}" in text_of("sdk-reference.txt")
        assert issubclass(getattr(dtruntime, name), dtruntime.StrataError)
