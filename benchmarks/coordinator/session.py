"""One run: servers up, operations measured in turn, replies verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from . import durability, load, memory, messages
from .client import connect
from .environment import describe
from .load import Shape
from .operations import (
    Barrier,
    Bench,
    Operation,
    Registrations,
    RepeatedCall,
    SmallJob,
    echo_heartbeat,
)
from .profiles import Profile
from .results import Measured, Results
from .samples import Sample, Summary, summarize
from .servers import Kind, start
from .tools import Tools
from .verify import Verdict, Verifier

ECHOES = (Kind.ECHO_NATIVE, Kind.ECHO_AIO)
STRATA = (Kind.STRATA_NATIVE, Kind.STRATA_AIO)
OPERATIONS = ("heartbeat", "shard", "registration", "barrier", "large-barrier", "memory")
SMALL_BARRIER, LARGE_BARRIER = 100, 1_000
VIRTUAL_USERS = 20
VERIFIED_LARGE_ROUNDS = 2

Announce = Callable[[str], None]


def run(
    tools: Tools, profile: Profile, chosen: Sequence[str], scratch: Path, announce: Announce
) -> Results:
    """Measure the chosen operations; `announce` is told what is under way."""
    environment = describe(tools, scratch)
    with ExitStack() as stack:
        announce("starting servers")
        servers = {kind: stack.enter_context(start(kind, tools, scratch)) for kind in Kind}
        session = Session(Bench(tools, scratch, profile, servers), chosen, announce)
        measured = session.run()
    survivors = weight = None
    if "registration" in chosen:
        announce("durability")
        survivors = durability.check(tools, profile, scratch)
    if "memory" in chosen:
        announce(f"memory of {memory.WORKERS:,} workers")
        weight = memory.measure(tools, scratch)
    return Results(measured, weight, survivors, environment)


@dataclass
class Session:
    """Measures operations on servers that run."""

    bench: Bench
    chosen: Sequence[str]
    announce: Announce
    _jobs: Mapping[Kind, SmallJob] = field(default_factory=dict)
    _echoes: dict[Shape, dict[Kind, float]] = field(default_factory=dict)

    def run(self) -> list[Measured]:
        """Measure every chosen operation."""
        self._jobs = {kind: SmallJob.form(self.bench.servers[kind]) for kind in STRATA}
        steps = {
            "heartbeat": self._heartbeats,
            "shard": self._shards,
            "registration": self._registrations,
            "barrier": self._barriers,
            "large-barrier": self._large_barriers,
        }
        return [m for name, step in steps.items() if name in self.chosen for m in step()]

    def _heartbeats(self) -> list[Measured]:
        requests = {kind: echo_heartbeat() for kind in ECHOES}
        requests |= {kind: job.heartbeat_load() for kind, job in self._jobs.items()}
        job = self._jobs[Kind.STRATA_NATIVE]
        each = self.bench.profile.verified_calls // VIRTUAL_USERS
        verdict = self._verifier.heartbeats(job.heartbeat(), job.pulse, VIRTUAL_USERS, each)
        measured = []
        for shape in (load.SATURATING, load.LIGHT):
            operation = RepeatedCall(self.bench, "heartbeat", requests, shape)
            summaries = self._measure(operation)
            self._echoes[shape] = {kind: summaries[kind].rate for kind in ECHOES}
            measured.append(self._call(operation, summaries, shape, verdict))
        return measured

    def _shards(self) -> list[Measured]:
        requests = {kind: job.shard_load() for kind, job in self._jobs.items()}
        job = self._jobs[Kind.STRATA_NATIVE]
        each = self.bench.profile.verified_calls // VIRTUAL_USERS
        verdict = self._verifier.shards(job.shard_request(), job.shards, VIRTUAL_USERS, each)
        measured = []
        for shape in (load.SATURATING, load.LIGHT):
            operation = RepeatedCall(self.bench, "get shard", requests, shape)
            measured.append(self._call(operation, self._measure(operation), shape, verdict))
        return measured

    def _registrations(self) -> list[Measured]:
        operation = Registrations(self.bench)
        each = self.bench.profile.verified_calls // VIRTUAL_USERS
        with connect(self.bench.servers[Kind.STRATA_NATIVE].address) as client:
            verdict = self._verifier.registrations(client, "verified", VIRTUAL_USERS, each)
        return [self._call(operation, self._measure(operation), load.SATURATING, verdict)]

    def _barriers(self) -> list[Measured]:
        operation = Barrier(self.bench, SMALL_BARRIER, (*ECHOES, *STRATA))
        rounds = max(1, self.bench.profile.verified_calls // SMALL_BARRIER)
        return [self._barrier(operation, self.bench.profile.rounds, rounds)]

    def _large_barriers(self) -> list[Measured]:
        profile = self.bench.profile
        operation = Barrier(self.bench, LARGE_BARRIER, STRATA, profile.large_barrier_rounds)
        return [self._barrier(operation, profile.large_barrier_runs, VERIFIED_LARGE_ROUNDS)]

    def _call(
        self,
        operation: Operation,
        summaries: Mapping[Kind, Summary],
        shape: Shape,
        verdict: Verdict,
    ) -> Measured:
        in_flight = shape.connections * shape.streams
        name = f"{operation.name}, light" if shape == load.LIGHT else operation.name
        echoes = self._echoes.get(shape, {})
        return Measured(name, operation.unit, in_flight, summaries, echoes, verdict)

    def _barrier(self, operation: Barrier, rounds: int, verified_rounds: int) -> Measured:
        verdict = self._verify_barrier(operation.size, verified_rounds)
        summaries = self._measure(operation, rounds)
        echoes = {kind: summaries[kind].rate for kind in ECHOES if kind in summaries}
        return Measured(operation.name, operation.unit, operation.size, summaries, echoes, verdict)

    def _verify_barrier(self, size: int, rounds: int) -> Verdict:
        self.announce(f"verifying barrier({size:,})")
        job = f"verified-{size}"
        with connect(self.bench.servers[Kind.STRATA_NATIVE].address) as client:
            workers, generation = client.form_job(job, size, fixed=True)
        arrivals = [messages.arrival(job, "verified", w, generation) for w in workers]
        return self._verifier.barriers(arrivals, rounds)

    def _measure(self, operation: Operation, rounds: int | None = None) -> dict[Kind, Summary]:
        """Sample the servers one after another, round after round."""
        rounds = rounds or self.bench.profile.rounds
        samples: dict[Kind, list[Sample]] = {kind: [] for kind in operation.kinds}
        for number in range(1, rounds + 1):
            for kind in operation.kinds:
                self.announce(f"{operation.name}, round {number} of {rounds}: {kind.value}")
                samples[kind].append(operation.sample(kind))
        return {kind: summarize(found) for kind, found in samples.items()}

    @property
    def _verifier(self) -> Verifier:
        server = self.bench.servers[Kind.STRATA_NATIVE]
        return Verifier(self.bench.tools, server, self.bench.scratch)
