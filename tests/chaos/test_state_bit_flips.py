"""Thousands of flipped bits in a coordinator's state, with fresh seeds."""

import random
from pathlib import Path

import pytest

from tests.unit.coordinator.store.test_state_integrity import flip_bits, write

FLIPS = 5_000


@pytest.mark.chaos
async def test_no_flipped_bit_changes_a_record_without_a_word(tmp_path: Path) -> None:
    await write(tmp_path / "state", range(1, 200))
    outcomes = await flip_bits(
        tmp_path / "state", "state.db", FLIPS, random.SystemRandom().randrange(10**9)
    )
    assert sum(outcomes.values()) == FLIPS
