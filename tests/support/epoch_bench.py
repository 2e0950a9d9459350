"""Short words for what happens in an epoch, on the test bench."""

from __future__ import annotations

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.epochs.ledger import Ledger
from tests.support.machine_bench import DATASET, JOB, SAMPLES, Bench


def bench_with_dataset() -> Bench:
    bench = Bench()
    bench.apply(c.RegisterDataset(JOB, DATASET, SAMPLES, 10))
    return bench


def ledger_of(bench: Bench, epoch: int = 0) -> Ledger:
    ledger: Ledger = bench.job.epochs.ledgers[DATASET][epoch]
    return ledger


def begin(bench: Bench, size: int, upto: int = 0, length: int = 50) -> list[c.Registered]:
    """A fixed world whose members all read in the first segment."""
    members = bench.world(size)
    assert isinstance(bench.claim(members[0], 0).reply, c.Moved)
    for m in members if upto else []:
        assert isinstance(bench.claim(m, 1, upto, length).reply, c.Granted)
    return members


def finish(bench: Bench, m: c.Registered, segment: int, length: int, before: int = 0) -> None:
    """Claim and commit a whole lane; ``before`` samples were committed in earlier segments."""
    bench.claim(m, segment, length, length)
    bench.commit(m, segment, length, before + length)
