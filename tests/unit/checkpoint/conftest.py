"""What tests of one file after the other save with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime.checkpoint import CheckpointManager
from dtruntime.checkpoint.upload import uploader
from dtruntime.retry import Backoff
from dtruntime.storage import open_backend
from tests.support.checkpoint_tiers import Gate, Run


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "ckpt", keep_count=3) as made:
        yield made


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Its uploads are soon tried again."""
    monkeypatch.setattr(uploader, "BACKOFF", Backoff(first=0.005, longest=0.01))
    return Run(tmp_path)


@pytest.fixture
def gate(run: Run) -> Iterator[Gate]:
    made = Gate(open_backend(run.main))
    run.wrap_main(lambda _: made)
    yield made
    made.open.set()
