"""Hundreds of processes that save are killed; `STRATA_KILL_SEED` repeats a run's choices."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtruntime.testing import LocalCoordinator
from tests.support.kill_rounds import (
    MODES,
    Savers,
    torture_bucket,
    torture_folder,
    torture_ranks,
)
from tests.support.servers.s3_server import s3_server

__all__ = ["s3_server"]

SEED = int(os.environ.get("STRATA_KILL_SEED") or random.SystemRandom().randrange(10**9))
FOLDER_KILLS = 25
BUCKET_KILLS = 12
RANK_KILLS = 16

pytestmark = pytest.mark.chaos
Record = Callable[[str, object], None]


@pytest.fixture
def savers(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Savers]:
    """Processes that know the way to the object store."""
    print(f"again with the same kills: STRATA_KILL_SEED={SEED}")
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    with Savers(s3_server) as started:
        yield started


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LocalCoordinator]:
    with LocalCoordinator(
        tmp_path / "coordinator", heartbeat_interval_ms=200, heartbeat_timeout_ms=2000
    ) as started:
        yield started


@pytest.mark.parametrize("mode", MODES)
def test_folder_survives_killed_writers(
    savers: Savers, tmp_path: Path, mode: str, record_property: Record
) -> None:
    kills = torture_folder(savers, tmp_path / "ckpt", mode, FOLDER_KILLS, SEED)
    record_property("kills", kills)
    assert kills == FOLDER_KILLS


@pytest.mark.parametrize("mode", MODES)
def test_bucket_survives_killed_writers(savers: Savers, mode: str, record_property: Record) -> None:
    kills = torture_bucket(savers, f"s3://ready/torture/{mode}", mode, BUCKET_KILLS, SEED)
    record_property("kills", kills)
    assert kills == BUCKET_KILLS


@pytest.mark.parametrize("mode", ["bytes", "incremental", "delta"])
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_checkpoints_of_all_ranks_survive_killed_ranks_and_coordinators(
    savers: Savers,
    coordinator: LocalCoordinator,
    tmp_path: Path,
    place: str,
    mode: str,
    record_property: Record,
) -> None:
    url = str(tmp_path / "ckpt") if place == "folder" else f"s3://ready/torture/ranks-{mode}"
    kills = torture_ranks(savers, coordinator, url, mode, RANK_KILLS, SEED)
    record_property("kills", kills)
    assert kills == RANK_KILLS
