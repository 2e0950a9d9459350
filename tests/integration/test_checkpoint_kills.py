"""Processes that save are killed at any moment; what was committed stays, and is right."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime.testing import LocalCoordinator
from tests.integration.kill_rounds import (
    HOWS,
    MODES,
    KilledRanks,
    Savers,
    torture_bucket,
    torture_folder,
    torture_ranks,
)

SEED = int(os.environ.get("STRATA_KILL_SEED") or random.SystemRandom().randrange(10**9))


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    print(f"again with the same kills: STRATA_KILL_SEED={SEED}")
    with Savers() as started:
        yield started


@pytest.mark.parametrize("mode", MODES)
def test_killed_writers_lose_nothing_and_leave_nothing(
    savers: Savers, tmp_path: Path, mode: str
) -> None:
    assert torture_folder(savers, tmp_path / "ckpt", mode, 4, SEED) == 4


@pytest.mark.parametrize("mode", ["bytes", "incremental"])
def test_killed_writers_to_s3_lose_nothing(
    s3_server: dict[str, str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    with Savers(s3_server) as savers:
        assert torture_bucket(savers, f"s3://ready/kills/{mode}", mode, 3, SEED) == 3


@pytest.mark.parametrize("mode", ["full", "incremental"])
def test_killed_ranks_and_coordinators_lose_nothing(
    savers: Savers, own_coordinator: LocalCoordinator, tmp_path: Path, mode: str
) -> None:
    url = str(tmp_path / "ckpt")
    assert torture_ranks(savers, own_coordinator, url, mode, len(HOWS), SEED) == len(HOWS)


def test_commit_without_a_manifest_is_healed_and_never_swept(
    savers: Savers, own_coordinator: LocalCoordinator, tmp_path: Path
) -> None:
    killed = KilledRanks(savers, own_coordinator, str(tmp_path / "ckpt"), "full", SEED)
    killed.kill_once("manifest")
    assert killed.reported == 1
    assert not (tmp_path / "ckpt" / "manifests").exists()
    with killed.ranks() as ranks:
        assert ranks[0].wait_for("found ") == "found [1]"
