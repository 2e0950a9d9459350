"""Whole files dealt to slots, balanced by their rows."""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .slot_membership import Membership

_FILE_TABLES_REMEMBERED = 4


class FileTable:
    """Deals files to slots: every file to exactly one, about as many rows to each.

    A pure function of the files' rows and the membership. For any membership,

    - the rows of two live slots differ by at most those of the largest file;
    - no live slot is without a file while there are as many files as live slots;
    - a slot that dies loses its files and moves no other file, and a replacement in that hole
      brings back the owners from before.

    Another ``slot_count`` deals all files anew. It may be shared between threads.
    """

    def __init__(self, rows: ArrayLike) -> None:
        self._rows = np.asarray(rows, dtype=np.int64)
        # Largest first, equal ones by number: what is dealt last has to even out the least.
        self._order = np.argsort(-self._rows, kind="stable")
        self._recent: OrderedDict[Membership, NDArray[np.int32]] = OrderedDict()
        self._lock = threading.Lock()

    def owners(self, slot_count: int, dead: Collection[int] = ()) -> NDArray[np.int32]:
        """Return the slot of every file, as a read-only array.

        Raises ``ShardError`` when every slot is dead.
        """
        # Checks it too. Dead slots at the end are kept, so that their deaths move little.
        Membership(slot_count, dead).normalised()
        with self._lock:
            return self._recall(Membership(slot_count, frozenset(dead)))

    def files_of(self, slot: int, slot_count: int, dead: Collection[int] = ()) -> NDArray[np.int64]:
        """Return the files of ``slot`` in rising order: none when it is dead."""
        return np.flatnonzero(self.owners(slot_count, dead) == slot)

    def _recall(self, key: Membership) -> NDArray[np.int32]:
        known = self._recent.get(key)
        if known is None:
            known = self._recent[key] = self._compute(key)
            known.flags.writeable = False
            if len(self._recent) > _FILE_TABLES_REMEMBERED:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return known

    def _compute(self, key: Membership) -> NDArray[np.int32]:
        slots = range(key.slot_count)
        if not key.dead:
            owners = np.empty(len(self._rows), dtype=np.int32)
            self._deal(owners, self._order, [(0, 0, slot) for slot in slots])
            return owners
        owners = self._recall(Membership(key.slot_count, frozenset())).copy()
        files = np.bincount(owners, minlength=key.slot_count).tolist()
        rows = np.zeros(key.slot_count, dtype=np.int64)
        np.add.at(rows, owners, self._rows)
        lost = np.isin(owners, list(key.dead))
        live = [(int(rows[slot]), files[slot], slot) for slot in slots if slot not in key.dead]
        self._deal(owners, self._order[lost[self._order]], live)
        return owners

    def _deal(
        self,
        owners: NDArray[np.int32],
        files: NDArray[np.int64],
        loads: Iterable[tuple[int, int, int]],
    ) -> None:
        """Give each file to the slot with the fewest rows; among those, the fewest files."""
        heap = list(loads)
        heapq.heapify(heap)
        for file, rows in zip(files.tolist(), self._rows[files].tolist(), strict=True):
            load, held, slot = heap[0]
            owners[file] = slot
            heapq.heapreplace(heap, (load + rows, held + 1, slot))
