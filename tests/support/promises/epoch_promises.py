"""What is promised of the consumption of epochs: every sample exactly once, whatever happens.

`EpochPromises` looks at what is stored, with the lanes of `lanes_model`. `Readings` listens to
the programs: what they consume, what they commit, what they are told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from dtruntime.coordinator.state import Machine
from dtruntime.coordinator.state.effects import Delete, Put
from dtruntime.coordinator.state.records import EpochRecord, ReaderRecord, SegmentRecord
from dtruntime.sharding.coverage_digest import whole
from tests.support.machine_invariants import Rows, durable_rows
from tests.support.promises.promise_model import JobModel, demand
from tests.support.simulation.lanes_model import lanes_of

Epoch = tuple[str, int]
KINDS = ("epoch", "segment", "reader")


class EpochPromises:
    """Checks on the ledgers, from their records alone."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def after(self, machine: Machine, effects: Iterable[Any]) -> None:
        """A command was applied."""
        changed = {
            (e.job, int(e.key.split(":")[0]))
            for e in effects
            if isinstance(e, Put | Delete) and e.kind in KINDS
        }
        if changed:
            self.check(durable_rows(machine), changed)
        for effect in effects:
            record = effect.record if isinstance(effect, Put) else None
            if isinstance(record, EpochRecord) and record.complete:
                self._readings.complete(effect.job, record.epoch, record.samples)

    def check(self, rows: Rows, only: set[Epoch] | None = None) -> None:
        """Look at the ledgers that these rows hold."""
        segments: dict[Epoch, list[SegmentRecord]] = defaultdict(list)
        readers: dict[Epoch, list[ReaderRecord]] = defaultdict(list)
        for (_, job, _), record in rows.items():
            if isinstance(record, SegmentRecord):
                segments[job, record.epoch].append(record)
            elif isinstance(record, ReaderRecord):
                readers[job, record.epoch].append(record)
        for (_, job, _), record in rows.items():
            if isinstance(record, EpochRecord) and (only is None or (job, record.epoch) in only):
                key = job, record.epoch
                in_order = sorted(segments[key], key=lambda s: s.number)
                self._check_ledger(record, in_order, readers[key])

    def _check_ledger(
        self, record: EpochRecord, segments: list[SegmentRecord], readers: list[ReaderRecord]
    ) -> None:
        if record.complete:
            demand(record.count == record.samples, "complete, but not all", record)
            same = record.digest == whole(record.samples).to_bytes()
            demand(same, "complete, but not each sample once", record)
            return
        held: Counter[int] = Counter()
        lanes = lanes_of(record.samples, segments)
        for segment, lane in zip(segments, lanes, strict=True):
            for slot, count in enumerate(segment.taken):
                demand(count <= len(lane.get(slot, ())), "more taken than there is", segment)
                held.update(lane.get(slot, [])[:count])
            for back in segment.taken_back:
                held.subtract(lanes[back.segment - 1][back.slot][back.start : back.stop])
        for reader in readers:
            mine = lanes[reader.segment - 1][reader.slot]
            demand(reader.length == len(mine), "a lane of another length", reader, mine)
            if reader.segment == len(segments):
                held.update(mine[: reader.claim])
        twice = [sample for sample, count in held.items() if count not in (0, 1)]
        demand(not twice, "samples are taken twice", twice, record, segments, readers)


class Readings:
    """What the programs that read do and are told."""

    def __init__(self, jobs: dict[str, JobModel]) -> None:
        self._jobs = jobs
        self._consumers: dict[Epoch, dict[int, int]] = defaultdict(dict)
        self._committing: dict[Epoch, set[int]] = defaultdict(set)
        self._offering: dict[Epoch, dict[int, set[int]]] = defaultdict(dict)
        self._committed: dict[Epoch, dict[int, int]] = defaultdict(dict)
        self.completed: Counter[str] = Counter()
        """How many epochs of each job programs were told to be complete."""

    def consumes(self, job: str, epoch: int, incarnation: int, sample: int) -> None:
        """A program consumes a sample: nobody else who may commit it has it."""
        consumers = self._consumers[job, epoch]
        other = consumers.get(sample, incarnation)
        alone = other == incarnation or other not in self._jobs[job].live
        demand(alone or incarnation not in self._jobs[job].live, "consumed twice", sample, other)
        consumers[sample] = incarnation

    def committing(self, job: str, epoch: int, incarnation: int, samples: list[int]) -> None:
        """A program sends a commit."""
        self._committing[job, epoch].update(samples)

    def offering(self, job: str, epoch: int, incarnation: int, samples: list[int]) -> None:
        """A program waits for the end of the epoch, which is to count for it as a commit."""
        self._offering[job, epoch].setdefault(incarnation, set()).update(samples)

    def complete(self, job: str, epoch: int, samples: int) -> None:
        """An epoch becomes complete: whoever has not committed is there and has offered to."""
        counted = self._committing[job, epoch]
        for incarnation, offered in self._offering[job, epoch].items():
            if incarnation in self._jobs[job].live:
                counted |= offered
        lacking = set(range(samples)) - counted
        demand(not lacking, "complete, but nobody who is there read", job, epoch, lacking)

    def committed(self, job: str, epoch: int, incarnation: int, samples: list[int]) -> None:
        """A program is told that its commit counts."""
        committed = self._committed[job, epoch]
        for sample in samples:
            first = committed.setdefault(sample, incarnation)
            demand(first == incarnation, "committed twice", sample, first, incarnation)

    def told_complete(self, job: str, epoch: int, samples: int) -> None:
        """A program is told that an epoch is complete."""
        lacking = set(range(samples)) - self._committing[job, epoch]
        demand(not lacking, "complete, but nobody committed", job, epoch, lacking)
        self.completed[job] += 1
