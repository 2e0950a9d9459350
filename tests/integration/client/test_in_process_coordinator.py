"""A coordinator inside the user's own process."""

from pathlib import Path

import pytest

from dtruntime import Config, Runtime, TrainingOrchestrator
from dtruntime.errors import ConnectionError, StorageError, StrataError
from tests.support.raw_client import RawClient


def config_of(folder: Path, address: str = "127.0.0.1:0") -> Config:
    places = {"address": address, "http_address": "", "data_dir": str(folder)}
    return Config().override("coordinator", "test", **places)


def test_runtime_serves_workers_of_the_same_process(tmp_path: Path) -> None:
    with (
        Runtime(config_of(tmp_path)) as runtime,
        TrainingOrchestrator(coordinator_url=runtime.url) as orchestrator,
    ):
        assert orchestrator.register() == "worker-0"
        orchestrator.barrier("step")
        orchestrator.commit_checkpoint("c-1", 1)


def test_runtime_keeps_its_state_in_the_data_directory(tmp_path: Path) -> None:
    with (
        Runtime(config_of(tmp_path)) as runtime,
        TrainingOrchestrator(coordinator_url=runtime.url) as orchestrator,
    ):
        orchestrator.register()
        orchestrator.commit_checkpoint("c-1", 1)
    with Runtime(config_of(tmp_path)) as runtime, RawClient(runtime.url) as client:
        assert client.call("GetLatestCheckpoint").checkpoint.checkpoint_id == "c-1"
        assert client.call("GetServerInfo").term == 2


def test_runtime_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        f'[coordinator]\naddress = "127.0.0.1:0"\nhttp_address = ""\ndata_dir = "{tmp_path}/data"\n'
    )
    runtime = Runtime(path).start()
    assert runtime.start() is runtime, "starting twice is starting once"
    with RawClient(runtime.url) as client:
        assert client.register().rank == 0
    runtime.stop()
    runtime.stop()


async def test_runtime_can_be_started_from_a_running_loop(tmp_path: Path) -> None:
    runtime = await Runtime(config_of(tmp_path)).start_async()
    async with TrainingOrchestrator(coordinator_url=runtime.url) as orchestrator:
        assert await orchestrator.register_worker() == "worker-0"
    await runtime.stop_async()
    with pytest.raises(StrataError, match="await start_async"):
        runtime.start()


def test_url_needs_a_running_runtime(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match=r"call start\(\) first"):
        _ = Runtime(config_of(tmp_path)).url


def test_runtime_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    with Runtime(config_of(tmp_path / "a")) as first:
        address = first.url.removeprefix("http://")
        for _ in range(2):
            with pytest.raises(ConnectionError, match=f"cannot listen on {address}"):
                Runtime(config_of(tmp_path / "b", address)).start()
        with pytest.raises(StorageError, match="in use"):
            Runtime(config_of(tmp_path / "a")).start()
    with Runtime(config_of(tmp_path / "b")) as second:
        assert second.url
