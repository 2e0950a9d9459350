"""One run: servers up, operations measured in turn, replies verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from . import durability, load, memory, messages
from .client import connect
from .environment import describe
from .load import Request
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
from .results import LIGHT_SUFFIX, Measured, Results
from .samples import Sample
from .servers import Kind, start
from .tools import Tools
from .verify import Verdict, Verifier

ECHOES = (Kind.ECHO_NATIVE, Kind.ECHO_AIO)
STRATA = (Kind.STRATA_NATIVE, Kind.STRATA_AIO)
NATIVES = (Kind.ECHO_NATIVE, Kind.STRATA_NATIVE)
OPERATIONS = ("heartbeat", "shard", "registration", "barrier", "large-barrier", "memory")
SMALL_BARRIER, LARGE_BARRIER = 100, 1_000
VIRTUAL_USERS = 20
VERIFIED_LARGE_ROUNDS = 2
ATTEMPTS = 2
DISTURBED = 0.15

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
        requests = {kind: job.heartbeat_load() for kind, job in self._jobs.items()}
        job = self._jobs[Kind.STRATA_NATIVE]
        self.announce("verifying heartbeat")
        verdict = self._verifier.heartbeats(
            job.heartbeat(), job.pulse, VIRTUAL_USERS, self._verified_each
        )
        return self._repeated("heartbeat", requests, verdict)

    def _shards(self) -> list[Measured]:
        requests = {kind: job.shard_load() for kind, job in self._jobs.items()}
        job = self._jobs[Kind.STRATA_NATIVE]
        self.announce("verifying get shard")
        verdict = self._verifier.shards(
            job.shard_request(), job.shards, VIRTUAL_USERS, self._verified_each
        )
        return self._repeated("get shard", requests, verdict)

    def _repeated(
        self, name: str, requests: Mapping[Kind, Request], verdict: Verdict
    ) -> list[Measured]:
        """A call under saturating load, for its rate, and under light load, for its latency."""
        everyone = {**{kind: echo_heartbeat() for kind in ECHOES}, **requests}
        natives = {kind: everyone[kind] for kind in NATIVES}
        saturating = RepeatedCall(self.bench, name, everyone, load.SATURATING)
        light = RepeatedCall(self.bench, name + LIGHT_SUFFIX, natives, load.LIGHT)
        return [
            self._measured(saturating, load.SATURATING.in_flight, verdict),
            self._measured(light, load.LIGHT.in_flight, verdict),
        ]

    def _registrations(self) -> list[Measured]:
        self.announce("verifying registration")
        with connect(self.bench.servers[Kind.STRATA_NATIVE].address) as client:
            verdict = self._verifier.registrations(
                client, "verified", VIRTUAL_USERS, self._verified_each
            )
        operation = Registrations(self.bench)
        return [self._measured(operation, load.SATURATING.in_flight, verdict)]

    def _barriers(self) -> list[Measured]:
        operation = Barrier(self.bench, SMALL_BARRIER, (Kind.ECHO_NATIVE, *STRATA))
        rounds = max(1, self.bench.profile.verified_calls // SMALL_BARRIER)
        return [self._barrier(operation, self.bench.profile.barrier_runs, rounds)]

    def _large_barriers(self) -> list[Measured]:
        profile = self.bench.profile
        operation = Barrier(
            self.bench, LARGE_BARRIER, profile.large_barrier_kinds, profile.large_barrier_rounds
        )
        return [self._barrier(operation, profile.large_barrier_runs, VERIFIED_LARGE_ROUNDS)]

    def _barrier(self, operation: Barrier, rounds: int, verified_rounds: int) -> Measured:
        verdict = self._verify_barrier(operation.size, verified_rounds)
        return self._measured(operation, operation.size, verdict, rounds)

    def _verify_barrier(self, size: int, rounds: int) -> Verdict:
        self.announce(f"verifying barrier({size:,})")
        job = f"verified-{size}"
        with connect(self.bench.servers[Kind.STRATA_NATIVE].address) as client:
            workers, generation = client.form_job(job, size, fixed=True)
        arrivals = [messages.arrival(job, "verified", w, generation) for w in workers]
        return self._verifier.barriers(arrivals, rounds)

    def _measured(
        self, operation: Operation, in_flight: int, verdict: Verdict, rounds: int | None = None
    ) -> Measured:
        """Sample the servers one after another, round after round."""
        rounds = rounds or self.bench.profile.rounds
        samples: dict[Kind, list[Sample]] = {kind: [] for kind in operation.kinds}
        for number in range(1, rounds + 1):
            for kind in operation.kinds:
                self.announce(f"{operation.name}, round {number} of {rounds}: {kind.value}")
                samples[kind].append(_least_disturbed(operation, kind))
        return Measured(operation.name, operation.unit, in_flight, samples, verdict)

    @property
    def _verified_each(self) -> int:
        return self.bench.profile.verified_calls // VIRTUAL_USERS

    @property
    def _verifier(self) -> Verifier:
        server = self.bench.servers[Kind.STRATA_NATIVE]
        return Verifier(self.bench.tools, server, self.bench.scratch)


def _least_disturbed(operation: Operation, kind: Kind) -> Sample:
    """Measure once more when other processes used the cores meanwhile."""
    samples: list[Sample] = []
    while len(samples) < ATTEMPTS:
        samples.append(operation.sample(kind))
        if samples[-1].foreign_share < DISTURBED:
            break
    return min(samples, key=lambda sample: sample.foreign_share)
