"""Slabs that a state is copied into, and come back whatever becomes of the copy."""

from __future__ import annotations

import numpy as np

from dtruntime.checkpoint.file_format.chunks import FIRST_GROUP, lay_out
from dtruntime.checkpoint.save.staging import SLAB, StagingPool, staged
from dtruntime.checkpoint.state_dict import flatten

SIZE = 2 * FIRST_GROUP
"""So large that a slab has two groups."""


def test_groups_have_what_was_copied_and_their_slab_comes_back() -> None:
    state = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    buffers = flatten({"a": state}).buffers
    pool = StagingPool(SLAB)
    for _ in range(2):  # there is one slab only
        groups = list(staged(lay_out([SIZE]), buffers, pool, pool.turn()))
        assert [len(group.view) for group in groups] == [FIRST_GROUP, SIZE - FIRST_GROUP]
        assert b"".join(group.view for group in groups) == state.tobytes()
        for group in groups:
            group.done()


def test_slab_comes_back_when_not_all_of_its_groups_are_taken() -> None:
    buffers = flatten({"a": np.zeros(SIZE, np.uint8)}).buffers
    pool = StagingPool(SLAB)
    for _ in range(2):
        groups = staged(lay_out([SIZE]), buffers, pool, pool.turn())
        next(groups).done()
        groups.close()
