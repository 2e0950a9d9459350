"""Every test starts from a clean environment: nothing of the launcher's leaks in."""

import os

import pytest

pytest.register_assert_rewrite("dtruntime.testing.conformance")

LAUNCHER_VARIABLES = (
    "COORDINATOR_URL",
    "WORKER_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "STORAGE_BACKEND",
    "CHECKPOINT_BUCKET",
    "AWS_REGION",
    "RUST_LOG",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
    "COLUMNS",
    "LINES",
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LAUNCHER_VARIABLES, *(n for n in os.environ if n.startswith("STRATA_"))]:
        monkeypatch.delenv(name, raising=False)
