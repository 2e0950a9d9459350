"""Whole files dealt to slots: every one once, balanced by rows, few moves when a slot dies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.errors import ShardError
from dtruntime.sharding import FileTable

ROWS = st.lists(st.integers(0, 10**6) | st.sampled_from([0, 1, 1000]), max_size=60)


@st.composite
def memberships(draw: st.DrawFn) -> tuple[int, frozenset[int]]:
    slot_count = draw(st.integers(1, 24))
    dead = draw(st.sets(st.integers(0, slot_count - 1), max_size=slot_count - 1))
    return slot_count, frozenset(dead)


@given(ROWS, memberships())
def test_every_file_has_one_live_slot_and_rows_are_balanced(
    rows: list[int], membership: tuple[int, frozenset[int]]
) -> None:
    slot_count, dead = membership
    table = FileTable(rows)
    live = [slot for slot in range(slot_count) if slot not in dead]
    parts = {slot: table.files_of(slot, slot_count, dead).tolist() for slot in range(slot_count)}
    assert sorted(file for part in parts.values() for file in part) == list(range(len(rows)))
    assert not any(parts[slot] for slot in dead)
    loads = [sum(rows[file] for file in parts[slot]) for slot in live]
    assert max(loads) - min(loads) <= max(rows, default=0)
    filled = sum(1 for count in rows if count)
    assert sum(1 for load in loads if not load) == max(0, len(live) - filled)


@given(ROWS, memberships())
def test_answer_depends_on_rows_and_membership_alone(
    rows: list[int], membership: tuple[int, frozenset[int]]
) -> None:
    table = FileTable(rows)
    for slot_count in (3, 1, 7):
        table.owners(slot_count)
    assert table.owners(*membership).tolist() == FileTable(rows).owners(*membership).tolist()


@given(ROWS, memberships(), st.data())
def test_death_moves_the_files_of_the_dead_alone_and_a_replacement_brings_them_back(
    rows: list[int], membership: tuple[int, frozenset[int]], data: st.DataObject
) -> None:
    slot_count, _ = membership
    lost = data.draw(st.integers(0, slot_count - 1))
    table = FileTable(rows)
    before = table.owners(slot_count)
    if slot_count > 1:
        after = table.owners(slot_count, {lost})
        assert set(np.flatnonzero(before != after)) == set(np.flatnonzero(before == lost))
    assert table.owners(slot_count).tolist() == before.tolist()


@pytest.mark.parametrize(("files", "ranks"), [(4, 4), (64, 8), (1000, 7), (3, 5)])
def test_equal_files_are_shared_evenly(files: int, ranks: int) -> None:
    counts = np.bincount(FileTable([500] * files).owners(ranks), minlength=ranks)
    assert counts.max() - counts.min() <= 1


def test_nobody_left_is_an_error() -> None:
    with pytest.raises(ShardError, match="let a worker join first"):
        FileTable([1, 2]).owners(2, {0, 1})
