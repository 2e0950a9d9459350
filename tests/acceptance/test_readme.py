"""The ten lines of README, as they are printed, on one worker and on several that are killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtruntime import load_tracked
from dtruntime.testing import LocalCoordinator
from tests.support.crews import TrainingCrew, last_saved
from tests.support.paths import PROGRAMS

SAMPLES = 12_000
"""63 steps with three workers, of which 50 are saved on the way."""
PROGRAM = PROGRAMS / "readme_worker.py"
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCoordinator]:
    folder = tmp_path_factory.mktemp("coordinator")
    quick: dict[str, Any] = {"heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 3000}
    with LocalCoordinator(folder, **quick) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "train"
    folder.mkdir()
    for number in range(4):
        rng = np.random.default_rng(number)
        pixels = rng.random((SAMPLES // 4, 16), dtype=np.float32)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), 16)
        labels = pixels.argmax(1) % 10
        pq.write_table(pa.table({"pixels": vectors, "label": labels}), folder / f"{number}.parquet")
    return folder.parent


class Readers(TrainingCrew):
    """Processes of README's program in a folder of their own."""

    def __init__(self, folder: Path, data: Path, url: str, workers: int, *changes: Any) -> None:
        super().__init__(folder, url, workers, str(PROGRAM), *changes)
        self.cwd = folder
        (folder / "data").symlink_to(data)
        if not url:
            del self.environment["COORDINATOR_URL"], self.environment["WORLD_SIZE"]

    def weights(self) -> Weights:
        """What every process has at the end, and the last checkpoint: all the same."""
        saved = load_tracked(self.folder / "checkpoints", "model")["model"]
        found = {name: value.numpy() for name, value in saved.items()}
        files = sorted(self.folder.glob("weights-*.npz"))
        assert len(files) == self.size
        for file in files:
            here = dict(np.load(file))
            assert here.keys() == found.keys()
            for name, value in found.items():
                assert np.array_equal(here[name], value), f"{name} of {file.name}"
        return found


@pytest.fixture(scope="module")
def calm(coordinator, data, tmp_path_factory) -> Weights:
    """Three workers that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    with Readers(folder, data, coordinator.url, 3) as crew:
        crew.start()
        crew.wait()
        return crew.weights()


@pytest.mark.long
def test_three_workers_train_one_model_and_one_worker_trains_the_same(calm, data, tmp_path):
    """Alone, with the global batches of three workers; there is no coordinator."""
    changes = (
        "batch_size=128=>batch_size=384",
        '"output": "torch"=>"output": "torch", "streams": 3',
    )
    with Readers(tmp_path, data, "", 1, *changes) as alone:
        alone.start()
        alone.wait()
        found = alone.weights()
    for name, value in calm.items():
        np.testing.assert_allclose(value, found[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_killed_worker_changes_no_bit(coordinator, data, calm, tmp_path):
    with Readers(tmp_path, data, coordinator.url, 3) as crew:
        (tmp_path / "hold").write_text("55")
        victim = crew.start()[1]
        crew.until("step 55", lambda: len(list(tmp_path.glob("held-*"))) == 3)
        crew.until("its save", lambda: last_saved(tmp_path / "checkpoints") == 50)
        victim.kill()
        (tmp_path / "hold").unlink()
        crew.start(1)
        crew.wait()
        found = crew.weights()
        resumed = [trainer.log for trainer in crew.trainers if trainer is not victim]
    assert all("run.training step=50 " in log for log in resumed), crew.logs()
    for name, value in calm.items():
        assert np.array_equal(value, found[name]), name
