"""Workers come, go and fall behind in the middle of an epoch: every sample is committed once."""

import random
import threading
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dtruntime.coordinator.state import Release
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.machine import Machine
from dtruntime.data.live_loader import ClaimOutcome, LiveLoader
from dtruntime.data.order import Segment, TakenBack
from dtruntime.data.source import NumberSource
from dtruntime.sharding import coverage_digest

JOB, DATASET = "job", "numbers"
OFFER = ("commit_segment", "commit_position", "commit_digest")


class Killed(Exception):
    pass


class Office:
    """The coordinator's real state machine, shared by worker threads."""

    def __init__(self, samples: int, shard_size: int) -> None:
        self.machine = Machine(heartbeat_timeout=1e9)
        self.changed = threading.Condition()
        self.now = 0.0
        self.calls = 0
        self.answers: dict[int, object] = {}
        """Of held calls, by number."""
        self.call(c.RegisterDataset(JOB, DATASET, samples, shard_size))

    def call(self, command):
        with self.changed:
            self.now += 0.001
            reply, effects = self.machine.apply(command, self.now)
            self.answers |= {e.call: e.reply for e in effects if isinstance(e, Release)}
            self.changed.notify_all()
            return reply

    def hold(self, command):
        """The number of a call that may be held, and its answer so far."""
        with self.changed:
            self.calls += 1
            return self.calls, self.call(replace(command, call=self.calls, timeout=1e9))

    def register(self, worker: str):
        return self.call(c.Register(JOB, worker))

    def lose(self, worker: str, incarnation: int) -> None:
        self.call(c.Deregister(JOB, worker, incarnation, "killed"))


class Desk:
    """One worker's ledger."""

    def __init__(self, office: Office, worker: str) -> None:
        self.office = office
        self.worker = worker
        self.incarnation = office.register(worker).incarnation
        self.dead = False
        self.committed = 0
        self.dies_waiting = False
        """Whether it is killed as soon as it has to wait at the end of its lane."""
        self.waits = threading.Event()

    def claim(self, epoch, plan, segment, upto, length, wait, offer=None):
        place = {} if offer is None else dict(zip(OFFER, offer, strict=True))
        command = c.Claim(
            JOB,
            self.worker,
            self.incarnation,
            DATASET,
            epoch,
            plan,
            segment,
            upto,
            length,
            **place,
        )
        if not wait:
            return answer(self._call(command))
        return answer(self._held(command))

    def _held(self, command):
        """Wait for the answer, as a call does that the coordinator holds."""
        self._check_alive()
        call, reply = self.office.hold(command)
        while reply is c.HELD:
            self.waits.set()
            if self.dies_waiting:
                self.die()
            with self.office.changed:
                if self.dead:
                    raise Killed
                reply = self.office.answers.pop(call, reply)
                if reply is c.HELD:
                    self.office.changed.wait(0.01)
        if isinstance(reply, c.Refused):
            raise Killed from reply
        return reply

    def die(self) -> None:
        self.dead = True
        self.office.lose(self.worker, self.incarnation)

    def commit(self, epoch, segment, position, digest):
        self._call(
            c.Commit(JOB, self.worker, self.incarnation, DATASET, epoch, segment, position, digest)
        )
        self.committed = coverage_digest.Digest(2000, digest).count

    def _check_alive(self) -> None:
        if self.dead:
            raise Killed

    def _call(self, command):
        self._check_alive()
        try:
            return self.office.call(command)
        except c.Refused as refusal:
            if self.dead:
                raise Killed from refusal
            raise


def answer(reply) -> ClaimOutcome:
    if not isinstance(reply, c.Moved):
        outcome: Any = type(reply).__name__.lower()
        return ClaimOutcome(outcome, reply.slot)
    segments = tuple(
        Segment(
            s.slot_count,
            tuple(s.dead),
            tuple(s.taken),
            tuple(s.weights),
            tuple(TakenBack(b.segment, b.slot, b.start, b.stop) for b in s.taken_back),
        )
        for s in reply.segments
    )
    reader = reply.reader
    if reader is None:
        return ClaimOutcome("moved", reply.slot, segments)
    return ClaimOutcome(
        "moved",
        reply.slot,
        segments,
        reader.claim if reader.segment == len(segments) else 0,
        reader.committed_segment,
        reader.committed_position,
        reader.digest,
    )


class Worker(threading.Thread):
    """Reads one epoch; dies, restarts its loader or leaves as its dice say."""

    def __init__(self, office: Office, name: str, seed: int, batches: int | None) -> None:
        super().__init__(name=name, daemon=True)
        self.desk = Desk(office, name)
        self.dice = random.Random(seed)
        self.batches = batches
        """After so many it dies; ``None``: it lives."""
        self.delivered: list[int] = []
        self.committed: list[int] = []
        """What counts for the program: it called `commit`, or its loop came to its end."""
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.read()
        except Killed:
            pass
        except BaseException as exc:
            self.failure = exc

    def read(self) -> None:
        while self.read_some():
            self.delivered = self.committed.copy()
        if not self.desk.dead:
            self.committed = self.delivered

    def read_some(self) -> bool:
        """Whether the loader is to be made again, in the same process."""
        batch_size = self.dice.randint(1, 30)
        source = NumberSource(2000, 10)
        loader = LiveLoader(source, batch_size, ledger=self.desk, window=2, epoch=0)
        for seen, batch in enumerate(loader, 1):
            self.delivered += batch["sample"].tolist()
            if self.batches is not None and seen > self.batches:
                self.desk.die()
                return False
            if self.dice.random() < 0.3:
                loader.commit()
                self.committed = self.delivered.copy()
            if self.batches is None and self.dice.random() < 0.02:
                return True
        return False


@pytest.mark.parametrize("seed", range(25))
def test_every_sample_is_committed_once_whoever_dies_or_joins(seed):
    dice = random.Random(seed)
    office = Office(2000, 10)
    workers = []
    names = [f"w{i}" for i in range(6)]
    for round_ in range(3):
        for name in names[: dice.randint(2, 6)]:
            taken = [w for w in workers if w.name == name and w.is_alive()]
            if taken:
                continue
            last = round_ == 2 and name == names[0]
            dies = None if last or dice.random() < 0.4 else dice.randint(0, 40)
            workers.append(Worker(office, name, dice.randrange(10**6), dies))
            workers[-1].desk.dies_waiting = dies is not None and dice.random() < 0.5
            workers[-1].start()
            if dice.random() < 0.5:
                workers[-1].join(dice.random() * 0.02)
    if not any(worker.batches is None for worker in workers):
        workers.append(Worker(office, "late", 1, None))
        workers[-1].start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), f"seed {seed}: {worker.name} hangs"
        assert worker.failure is None, f"seed {seed}: {worker.failure!r}"
    survivors_left = any(w.batches is None for w in workers)
    assert survivors_left
    committed = np.sort([i for worker in workers for i in worker.committed])
    assert np.array_equal(committed, np.arange(2000)), f"seed {seed}"
    ledger = office.machine.jobs[JOB].epochs.ledgers[DATASET][0]
    digest = coverage_digest.Digest(2000, ledger.record.digest)
    assert digest == coverage_digest.whole(2000)


@pytest.mark.parametrize("commits", [0, 1])
def test_what_was_not_committed_is_read_again_when_a_worker_dies_at_the_end_of_its_lane(commits):
    """Waiting for others inside ``next`` is no commit: the program has not said that it is done."""
    office = Office(1000, 10)
    source = NumberSource(1000, 10)
    first, second = Desk(office, "first"), Desk(office, "second")
    first.dies_waiting = True
    got: list[int] = []
    counts: list[int] = []

    def read() -> None:
        loader = LiveLoader(source, 10, ledger=first, window=2)
        for number, batch in enumerate(loader):
            got.extend(batch["sample"].tolist())
            if number < commits:
                loader.commit()
                counts.extend(batch["sample"].tolist())

    def be_killed() -> None:
        with pytest.raises(Killed):
            read()

    slow = iter(LiveLoader(source, 10, ledger=second, window=2))
    rest = next(slow)["sample"].tolist()
    reading = threading.Thread(target=be_killed)
    reading.start()
    reading.join(60)
    assert first.waits.is_set()
    assert len(got) > 400
    for batch in slow:
        rest += batch["sample"].tolist()
    assert sorted(counts + rest) == list(range(1000))
    ledger = office.machine.jobs[JOB].epochs.ledgers[DATASET][0]
    assert coverage_digest.Digest(1000, ledger.record.digest) == coverage_digest.whole(1000)


def test_end_of_the_epoch_counts_what_was_handed_out():
    office = Office(1000, 10)
    source = NumberSource(1000, 10)
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def read(name: str) -> None:
        for batch in LiveLoader(source, 10, ledger=Desk(office, name), window=2):
            seen[name].extend(batch["sample"].tolist())

    threads = [threading.Thread(target=read, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen["a"] + seen["b"]) == list(range(1000))
    ledger = office.machine.jobs[JOB].epochs.ledgers[DATASET][0]
    assert ledger.record.complete


def test_slow_workers_shards_are_given_away():
    """The fast one finishes; what the slow one has not begun is dealt anew, and read by both."""
    office = Office(2000, 10)
    slow, fast = Desk(office, "slow"), Desk(office, "fast")
    source = NumberSource(2000, 10)
    reading = iter(LiveLoader(source, 10, ledger=slow, window=2, prefetch_shards=0))
    got = next(reading)["sample"].tolist()
    seen: list[int] = []

    def read() -> None:
        for batch in LiveLoader(source, 10, ledger=fast, window=2):
            seen.extend(batch["sample"].tolist())

    thread = threading.Thread(target=read)
    thread.start()
    with office.changed:
        assert office.changed.wait_for(lambda: len(seen) > 1200, 60)
    for batch in reading:
        got += batch["sample"].tolist()
    thread.join(60)
    assert sorted(got + seen) == list(range(2000))
    assert len(seen) > 1200


class BadLine:
    """A ledger that cannot be asked now and then."""

    def __init__(self, desk: Desk, failures: set[int]) -> None:
        self.desk = desk
        self.failures = failures
        self.calls = 0

    def claim(self, *question):
        self.calls += 1
        if self.calls in self.failures:
            raise ConnectionError
        return self.desk.claim(*question)

    def commit(self, *place):
        self.desk.commit(*place)


def read_on(loader: LiveLoader, error: type[Exception], tries: int) -> list[int]:
    """What is handed out by a loop that begins again after errors."""
    got: list[int] = []
    for _ in range(tries):
        try:
            for batch in loader:
                got += batch["sample"].tolist()
            return got
        except error:
            continue
    raise AssertionError(f"{tries} tries were not enough")


def test_samples_of_a_batch_that_cannot_be_made_come_with_the_next_try():
    office = Office(200, 10)
    bad = {12, 77, 199}

    def decode(sample):
        if sample["sample"] in bad:
            bad.remove(sample["sample"])
            raise OSError("cannot be decoded")
        return sample

    desk = Desk(office, "w")
    loader = LiveLoader(NumberSource(200, 10), 7, ledger=desk, window=2, decode=decode)
    assert sorted(read_on(loader, OSError, 4)) == list(range(200))
    assert not bad


@pytest.mark.parametrize("batch", [7, 15, 45])
def test_samples_of_a_batch_whose_claim_failed_come_with_the_next_try(batch):
    """Also where the batch had samples of several windows already."""
    office = Office(200, 10)
    line = BadLine(Desk(office, "w"), {2, 3, 6, 9})
    loader = LiveLoader(NumberSource(200, 10), batch, ledger=line, window=2, prefetch_shards=0)
    assert sorted(read_on(loader, ConnectionError, 5)) == list(range(200))
    assert not line.failures - set(range(line.calls))


def test_commit_after_an_error_leaves_out_the_batch_that_was_not_made():
    office = Office(40, 10)
    desk = Desk(office, "w")

    def decode(sample):
        if sample["sample"] == 12:
            raise OSError("cannot be decoded")
        return sample

    loader = LiveLoader(NumberSource(40, 10), 5, ledger=desk, shuffle=False, decode=decode)
    reading = iter(loader)
    got = [i for _ in range(2) for i in next(reading)["sample"].tolist()]
    with pytest.raises(OSError, match="decoded"):
        next(reading)
    loader.commit()
    assert len(got) == desk.committed == loader.consumed == 10
    office.lose("w", desk.incarnation)
    rest = LiveLoader(NumberSource(40, 10), 5, ledger=Desk(office, "other"), shuffle=False)
    assert sorted(got + [i for batch in rest for i in batch["sample"].tolist()]) == list(range(40))


def test_older_iteration_ends_when_another_begins():
    loader = LiveLoader(NumberSource(200, 10), 10, ledger=Desk(Office(200, 10), "w"), window=2)
    older = iter(loader)
    got = next(older)["sample"].tolist()
    newer = iter(loader)
    got += next(newer)["sample"].tolist()
    with pytest.raises(RuntimeError, match="this iteration has ended"):
        next(older)
    for batch in newer:
        got += batch["sample"].tolist()
    assert sorted(got) == list(range(200))
    assert loader.epoch == 1
