"""The reader of a simulated process: claims, consumes and commits samples, like the real loader."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from dtruntime.coordinator.state import Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.records import SegmentRecord
from dtruntime.sharding.coverage_digest import Digest
from tests.support.promises.promise_model import demand
from tests.support.simulation.lanes_model import lanes_of

if TYPE_CHECKING:
    from tests.support.simulation.simulated_worker import Process

DATASET = "corpus"
HOLD_SECONDS = 3.0

Task = Generator[Any, Any, Any]


class Unreachable(Exception):
    """The coordinator was away for too long."""


class Reader:
    """One incarnation in one epoch: what it was granted, and how far it has read."""

    def __init__(self, process: Process, me: c.Registered, epoch: int, samples: int) -> None:
        self._process = process
        self._rng = process.sim.rng
        self._readings = process.sim.promises.readings
        self._me = me
        self._epoch = epoch
        self._samples = samples
        self._step = self._rng.randint(1, max(1, samples // 6))
        self._offers = bool((me.incarnation + epoch) % 3)
        """Whether it leaves the last commit to the end of the epoch, as the real loader does."""
        self._forget()

    def _forget(self) -> None:
        """Begin anew within the same incarnation, as a loader does that is made twice."""
        self._segments: tuple[SegmentRecord, ...] = ()
        self._claimed = 0
        self._place = self._committed = (0, 0)
        self._digest = Digest(self._samples)
        self._uncommitted: list[int] = []

    def read(self) -> Task:
        """Read until the epoch is complete."""
        while True:
            if self._segments and self._rng.random() < 0.01:
                self._forget()
            if not self._segments:
                outcome = yield from self._claim(0)
            elif self._has_something() and self._rng.random() < 0.8:
                yield self._rng.choice([0.0, 0.1, 0.5, 2.0])
                self._consume(self._rng.randint(1, 2 * self._step))
                if self._rng.random() < 0.4:
                    yield from self._commit()
                continue
            elif self._claimed < self._length:
                outcome = yield from self._claim(min(self._claimed + self._step, self._length))
            else:
                self._consume(self._samples)
                if not self._offers:
                    yield from self._commit()
                hold = self._rng.choice([0.0, HOLD_SECONDS])
                outcome = yield from self._claim(self._length, hold)
                if isinstance(outcome, c.Waiting):
                    yield self._rng.uniform(0.1, 0.5)
            if isinstance(outcome, c.Complete):
                if self._offers and self._uncommitted:
                    who = self._me.job, self._epoch, self._me.incarnation
                    self._readings.committed(*who, self._uncommitted)
                    self._uncommitted = []
                demand(not self._uncommitted, "complete without a commit", self._me)
                self._readings.told_complete(self._me.job, self._epoch, self._samples)
                return

    # Calls

    def _claim(self, upto: int, hold: float = 0.0) -> Task:
        command = c.Claim(
            self._me.job,
            self._me.worker_id,
            self._me.incarnation,
            DATASET,
            self._epoch,
            plan="p",
            segment=len(self._segments),
            known=self._rng.choice([0, max(0, len(self._segments) - 1)]),
            upto=upto,
            length=self._length if self._segments else 0,
            **self._offer(upto),
        )
        outcome = yield from self._process._call(command, hold)
        if isinstance(outcome, c.Granted):
            self._claimed = max(self._claimed, upto)
        elif isinstance(outcome, c.Moved):
            self._adopt(outcome, (*self._segments[: command.known], *outcome.segments))
        return outcome

    def _offer(self, upto: int) -> dict[str, Any]:
        """What it would commit, at the end of its lane."""
        at_end = self._segments and upto == self._length and not self._has_something()
        if not (self._offers and at_end and self._uncommitted):
            return {}
        who = self._me.job, self._epoch, self._me.incarnation
        self._readings.offering(*who, self._uncommitted)
        segment, position = self._place
        return {
            "commit_segment": segment,
            "commit_position": position,
            "commit_digest": self._digest.to_bytes(),
        }

    def _commit(self) -> Task:
        if not self._uncommitted:
            return
        segment, position = self._place
        command = c.Commit(
            self._me.job,
            self._me.worker_id,
            self._me.incarnation,
            DATASET,
            self._epoch,
            segment,
            position,
            self._digest.to_bytes(),
        )
        samples, self._uncommitted = self._uncommitted, []
        who = self._me.job, self._epoch, self._me.incarnation
        self._readings.committing(*who, samples)
        yield from self._process._call(command)
        self._readings.committed(*who, samples)

    # Places

    @property
    def _length(self) -> int:
        return len(lanes_of(self._samples, self._segments)[-1][self._me.rank])

    def _adopt(self, moved: c.Moved, segments: tuple[SegmentRecord, ...]) -> None:
        """Go on where the coordinator says: what was granted before must still stand."""
        known, current = len(self._segments), len(segments)
        reader, last = moved.reader, segments[-1]
        numbers = [segment.number for segment in segments]
        demand(numbers == list(range(1, current + 1)), "segments are left out", moved)
        dealt = moved.slot < last.slot_count and moved.slot not in last.dead
        demand(moved.slot == self._me.rank and dealt, "not dealt to", self._me, moved)
        demand(known < current, "moved back", moved)
        if known:
            kept = segments[known - 1].taken[moved.slot] >= self._claimed
            demand(kept, "a granted claim was taken away", self._me, moved)
        elif reader is not None:
            self._place = reader.committed_segment, reader.committed_position
            self._digest = Digest(self._samples, reader.digest)
        else:
            self._place = current, 0
        self._segments = segments
        self._claimed = reader.claim if reader and reader.segment == current else 0

    def _limit(self, segment: int) -> int:
        if segment == len(self._segments):
            return self._claimed
        return self._segments[segment - 1].taken[self._me.rank]

    def _has_something(self) -> bool:
        segment, position = self._place
        while segment < len(self._segments) and position == self._limit(segment):
            segment, position = segment + 1, 0
        self._place = segment, position
        return position < self._limit(segment)

    def _consume(self, count: int) -> None:
        lanes = lanes_of(self._samples, self._segments)
        for _ in range(count):
            if not self._has_something():
                return
            segment, position = self._place
            sample = lanes[segment - 1][self._me.rank][position]
            self._readings.consumes(self._me.job, self._epoch, self._me.incarnation, sample)
            self._digest.add(np.array([sample]))
            self._uncommitted.append(sample)
            self._place = segment, position + 1


def reading(process: Process, me: c.Registered) -> Task:
    """Read epoch after epoch, as long as the process is this member."""
    launcher = process.launcher
    while process.identity is me:
        try:
            yield from process._call(c.RegisterDataset(me.job, DATASET, launcher.samples, 10))
            epoch = launcher.epoch
            yield from Reader(process, me, epoch, launcher.samples).read()
            launcher.epoch = max(launcher.epoch, epoch + 1)
            if launcher.weighs and process.sim.rng.random() < 0.3:
                yield from _rebalance(process, me, launcher.epoch)
        except Unreachable:
            yield 0.5
        except Refused as refusal:
            gone = refusal.reason in ("superseded", "unknown_worker")
            demand(gone, "a reader was refused", me, refusal.reason, str(refusal))
            return


def _rebalance(process: Process, me: c.Registered, epoch: int) -> Task:
    yield process.sim.rng.uniform(0.5, 3.0)
    weights = (
        {me.rank: process.sim.rng.choice([0, 10, 50, 100])}
        if process.sim.rng.random() < 0.5
        else {}
    )
    try:
        yield from process._call(c.Rebalance(me.job, DATASET, epoch, weights))
    except Refused as refusal:
        fine = ("unknown_epoch", "epoch_complete", "unknown_rank", "not_ready", "unknown_dataset")
        demand(refusal.reason in fine, "a wish was refused", refusal.reason, str(refusal))
