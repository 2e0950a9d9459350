"""Every test starts from a clean environment: nothing of the launcher's leaks in."""

import os
import re
from collections.abc import Generator
from importlib.util import find_spec

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("dtruntime.testing.conformance")

# An example that takes long on a busy machine is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

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


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file whose library is not installed: `make test-pythons` does without these."""
    report = yield
    missing = re.search(r"No module named '(jax|pytorch_lightning|torch)\b", str(report.longrepr))
    if report.failed and missing and find_spec(missing[1]) is None:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing[1]}")
    return report
