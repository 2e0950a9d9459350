"""`python -m benchmarks.coordinator`: servers up, operations measured in turn, replies verified."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import psutil

from dtruntime.bench.report import Announce

from ..harness import Benchmark, BenchmarkError, Outcome, environment
from . import messages, report
from .client import connect
from .load import LIGHT, Generator, Request, Sample, least_disturbed
from .operations import (
    Barrier,
    Bench,
    Operation,
    Profile,
    Registrations,
    RepeatedCall,
    SmallJob,
    echo_heartbeat,
    register_workers,
)
from .report import Measured, Memory
from .servers import Kind, Tools, add_cores, find_tools, start
from .verify import Verdict, Verifier

PACKAGES = ("dtruntime", "grpcio", "protobuf", "pygrpc-native", "uvloop")
ECHOES = (Kind.ECHO_NATIVE, Kind.ECHO_AIO)
STRATA = (Kind.STRATA_NATIVE, Kind.STRATA_AIO)
NATIVES = (Kind.ECHO_NATIVE, Kind.STRATA_NATIVE)
SMALL_BARRIER, LARGE_BARRIER = 100, 1_000
VIRTUAL_USERS = 20
VERIFIED_LARGE_ROUNDS = 2
MEMORY_WORKERS = 10_000
SURVIVORS = 500
FULL = Profile(
    rounds=7,
    seconds=0.8,
    registrations=2000,
    barrier_runs=4,
    barrier_seconds=2.0,
    large_barrier_kinds=STRATA,
    large_barrier_rounds=20,
    verified_calls=4000,
)
QUICK = Profile(
    rounds=2,
    seconds=0.4,
    registrations=1000,
    barrier_runs=2,
    barrier_seconds=1.0,
    large_barrier_kinds=(Kind.STRATA_NATIVE,),
    large_barrier_rounds=10,
    verified_calls=1000,
)


class Session:
    """Measures operations on servers that run."""

    def __init__(self, bench: Bench, announce: Announce) -> None:
        self._bench, self._profile, self._announce = bench, bench.profile, announce
        self._jobs = {kind: SmallJob.form(bench.servers[kind]) for kind in STRATA}
        self._native = bench.servers[Kind.STRATA_NATIVE]
        self._verifier = Verifier(bench.tools, self._native, bench.scratch)
        self._each = bench.profile.verified_calls // VIRTUAL_USERS
        self.operations: dict[str, Callable[[], list[Measured]]] = {
            "heartbeat": self._heartbeats,
            "shard": self._shards,
            "registration": self._registrations,
            "barrier": self._barriers,
            "large-barrier": self._large_barriers,
        }

    def _heartbeats(self) -> list[Measured]:
        self._announce("verifying heartbeat")
        job = self._jobs[Kind.STRATA_NATIVE]
        verdict = self._verifier.heartbeats(job.heartbeat, job.pulse, VIRTUAL_USERS, self._each)
        requests = {kind: job.heartbeat_load() for kind, job in self._jobs.items()}
        return self._repeated("heartbeat", requests, verdict)

    def _shards(self) -> list[Measured]:
        self._announce("verifying get shard")
        job = self._jobs[Kind.STRATA_NATIVE]
        verdict = self._verifier.shards(job.shard_request, job.shards, VIRTUAL_USERS, self._each)
        requests = {kind: job.shard_load() for kind, job in self._jobs.items()}
        return self._repeated("get shard", requests, verdict)

    def _repeated(
        self, name: str, requests: dict[Kind, Request], verdict: Verdict
    ) -> list[Measured]:
        """A call under saturating load, for its rate, and under light load, for its latency."""
        everyone = {**{kind: echo_heartbeat() for kind in ECHOES}, **requests}
        natives = {kind: everyone[kind] for kind in NATIVES}
        saturating = RepeatedCall(self._bench, name, everyone)
        light = RepeatedCall(self._bench, name, natives, LIGHT)
        rounds = self._profile.rounds
        return [self._measure(each, verdict, rounds) for each in (saturating, light)]

    def _registrations(self) -> list[Measured]:
        self._announce("verifying registration")
        with connect(self._native.address) as client:
            verdict = self._verifier.registrations(client, "verified", VIRTUAL_USERS, self._each)
        return [self._measure(Registrations(self._bench), verdict, self._profile.rounds)]

    def _barriers(self) -> list[Measured]:
        operation = Barrier(self._bench, SMALL_BARRIER, (Kind.ECHO_NATIVE, *STRATA))
        rounds = max(1, self._profile.verified_calls // SMALL_BARRIER)
        verdict = self._verify_barrier(SMALL_BARRIER, rounds)
        return [self._measure(operation, verdict, self._profile.barrier_runs)]

    def _large_barriers(self) -> list[Measured]:
        kinds, rounds = self._profile.large_barrier_kinds, self._profile.large_barrier_rounds
        operation = Barrier(self._bench, LARGE_BARRIER, kinds, rounds)
        verdict = self._verify_barrier(LARGE_BARRIER, VERIFIED_LARGE_ROUNDS)
        return [self._measure(operation, verdict, 1)]

    def _verify_barrier(self, size: int, rounds: int) -> Verdict:
        self._announce(f"verifying barrier({size:,})")
        job = f"verified-{size}"
        with connect(self._native.address) as client:
            workers, generation = client.form_job(job, size, fixed=True)
        arrivals = [messages.arrival(job, "verified", w, generation) for w in workers]
        return self._verifier.barriers(arrivals, rounds)

    def _measure(self, operation: Operation, verdict: Verdict, rounds: int) -> Measured:
        """Sample the servers one after another, round after round."""
        samples: dict[Kind, list[Sample]] = {kind: [] for kind in operation.kinds}
        for number in range(1, rounds + 1):
            for kind, of_kind in samples.items():
                where = f"{operation.name}, round {number} of {rounds}"
                self._announce(f"{where}: {kind.value}")
                of_kind.append(least_disturbed(partial(operation.sample, kind)))
        return Measured(operation.name, operation.unit, operation.in_flight, samples, verdict)


OPERATIONS = ("heartbeat", "shard", "registration", "barrier", "large-barrier", "memory")


def measure(options: argparse.Namespace, scratch: Path, announce: Announce) -> Outcome:
    """Measure the chosen operations."""
    tools = find_tools(options.server_cores, options.load_cores)
    try:
        return _measure(options, tools, scratch, announce)
    except psutil.NoSuchProcess as exc:
        raise BenchmarkError(f"a server ended while it was measured ({exc})") from exc
    except grpc.RpcError as exc:
        raise BenchmarkError(f"a call that prepares the load failed: {exc}") from exc


def _measure(
    options: argparse.Namespace, tools: Tools, scratch: Path, announce: Announce
) -> Outcome:
    here = environment(
        PACKAGES,
        tools=tools.versions(),
        server_cores=tools.server_cores,
        load_cores=tools.load_cores,
        data_on_tmpfs=_filesystem(scratch) == "tmpfs",
    )
    profile = QUICK if options.quick else FULL
    measured: list[Measured] = []
    with ExitStack() as stack:
        announce("starting servers")
        servers = {kind: stack.enter_context(start(kind, tools, scratch)) for kind in Kind}
        session = Session(Bench(tools, scratch, profile, servers), announce)
        for name, run in session.operations.items():
            measured += run() if name in options.only else []
    survivors = memory = None
    if "registration" in options.only:
        announce("durability")
        survivors = _check_durability(tools, scratch)
    if "memory" in options.only:
        announce(f"memory of {MEMORY_WORKERS:,} workers")
        memory = _measure_memory(tools, scratch)
    return Outcome(
        tables=report.tables(measured),
        document={
            "environment": here,
            "operations": [one.document() for one in measured],
            "memory": memory,
            "survivors_of_a_kill": survivors,
        },
        targets=list(report.targets(measured, memory)),
        notes=list(report.notes(measured, memory, survivors, here)),
        panels=list(report.panels(measured)),
        failed=any(one.failed for one in measured),
    )


def _check_durability(tools: Tools, scratch: Path) -> Verdict:
    """Register workers, kill the coordinator at once, start another on the same data."""
    kind, folder, job = Kind.STRATA_NATIVE, scratch / "durability", "survivors"
    with start(kind, tools, folder) as server:
        register_workers(Generator(tools, server, scratch), job, SURVIVORS)
        server.process.kill()
    with start(kind, tools, folder) as server, connect(server.address) as client:
        survivors = client.live_workers(job)
    return Verdict(min(survivors, SURVIVORS), abs(SURVIVORS - survivors))


def _measure_memory(tools: Tools, scratch: Path) -> Memory:
    """A coordinator of its own, before and after many workers register and report twice."""
    with start(Kind.STRATA_NATIVE, tools, scratch / "memory") as server:
        idle = server.resident_bytes()
        with connect(server.address) as client:
            workers, _ = client.form_job("memory", MEMORY_WORKERS, fixed=False)
            for _ in range(2):
                client.beat("memory", workers)
            members = client.live_workers("memory")
        return Memory(idle, members, server.resident_bytes())


def _filesystem(folder: Path) -> str:
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""


BENCHMARK = Benchmark(
    name="coordinator",
    description="the coordinator under h2load, its replies verified by k6",
    quick="about a minute",
    measure=measure,
    parts=OPERATIONS,
    options=add_cores,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
