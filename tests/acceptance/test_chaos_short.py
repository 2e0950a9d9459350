"""The torture of `make chaos`, in short: two runs that everything happens to once."""

import dataclasses
from pathlib import Path

import pytest

from tests.chaos.torture.plan import Place, plan_round
from tests.chaos.torture.rounds import TIMEOUT, Round
from tests.support.servers.s3_server import s3_server

__all__ = ["s3_server"]

SEED = 20_261_132
PAUSE = 0.03
"""Seconds that a step takes at least: the run is not over before everything has happened to it."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "place", "kinds"),
    [
        (0, "folder", ("kill one", "cut", "ghost", "kill coordinator")),
        pytest.param(
            1,
            "s3",
            ("break s3", "preempt", "silence", "request checkpoint", "kill some"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_tortured_run_ends_as_if_nothing_had_happened(
    s3_server: dict[str, str], tmp_path: Path, number: int, place: Place, kinds: tuple[str, ...]
) -> None:
    plan = dataclasses.replace(plan_round(SEED, number, [place], TIMEOUT, kinds), pause=PAUSE)
    result = Round(plan, tmp_path / "round", s3_server).run()
    assert not result.failure, result.failure
    assert {kind for kind in kinds if result.faults[kind]} == set(kinds)
