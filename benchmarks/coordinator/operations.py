"""The operations that are measured, each ready to be sampled on any of its servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtruntime.rpc.gen import coordinator_pb2 as pb

from . import messages
from .client import connect
from .echo import GENERATION
from .load import LIGHT, SATURATING, Generator, Request, Sample, Shape
from .messages import Worker
from .servers import Kind, Server, Tools

WARM_UP_CALLS = 800
WARM_UP_BARRIERS = 10
JOB_SIZE = 8
DATASET = "corpus"
SHARDS = 1024
SHARD_SIZE = 10_000
LIGHT_SUFFIX = ", light"
"""Marks an operation measured with few calls in flight: for its latency, not its rate."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Rounds and sizes of one run of the benchmark."""

    rounds: int
    """How often each server is measured in turn; the report has the medians."""
    seconds: float
    """How long one measurement of a repeated call aims to take."""
    registrations: int
    """New workers per measurement."""
    barrier_runs: int
    """How often each server is measured with the small barrier."""
    barrier_seconds: float
    """How long one measurement of a barrier aims to take, once its processes run."""
    large_barrier_kinds: tuple[Kind, ...]
    """Who is measured with the large barrier: its processes start slowly."""
    large_barrier_rounds: int
    """Rounds of the large barrier in its one measurement."""
    verified_calls: int
    """Replies that k6 checks per operation."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The servers that run, and what loads them."""

    tools: Tools
    scratch: Path
    profile: Profile
    servers: Mapping[Kind, Server]

    def load(self, kind: Kind) -> Generator:
        """h2load against a server."""
        return Generator(self.tools, self.servers[kind], self.scratch)


class Operation(ABC):
    """Something the servers do, measured one server at a time."""

    name: str
    unit = "calls/s"
    in_flight = SATURATING.in_flight
    kinds: Sequence[Kind] = tuple(Kind)
    """The servers it can be measured on, in the order of a round."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.rates: dict[Kind, float] = {}
        """What each server did last."""
        self.measurements = 0

    @abstractmethod
    def sample(self, kind: Kind) -> Sample:
        """Measure once."""


class RepeatedCall(Operation):
    """One request over and over; every call is an operation."""

    def __init__(
        self, bench: Bench, name: str, requests: Mapping[Kind, Request], shape: Shape = SATURATING
    ) -> None:
        super().__init__(bench)
        self.name, self._requests, self._shape = name, requests, shape
        self.in_flight, self.kinds = shape.in_flight, list(requests)
        if shape is LIGHT:
            self.name += LIGHT_SUFFIX

    def sample(self, kind: Kind) -> Sample:
        """Send as many as the server can answer in the profile's time."""
        load, request = self.bench.load(kind), self._requests[kind]
        if kind not in self.rates:
            self.rates[kind] = load.repeat(request, self._shape, WARM_UP_CALLS).rate
        count = int(self.rates[kind] * self.bench.profile.seconds)
        sample = load.repeat(request, self._shape, count)
        self.rates[kind] = sample.rate
        return sample


class Registrations(Operation):
    """New workers, each stored before its reply leaves; a job of its own per measurement."""

    name = "registration"

    def sample(self, kind: Kind) -> Sample:
        """Register the profile's number of workers; an echo server gets as many bare calls."""
        count = self.bench.profile.registrations
        if kind.is_echo:
            return self.bench.load(kind).repeat(echo_heartbeat(), SATURATING, count)
        self.measurements += 1
        return register_workers(self.bench.load(kind), f"registration-{self.measurements}", count)


def register_workers(load: Generator, job: str, count: int) -> Sample:
    """Register `count` workers with h2load; those that are no members then have failed."""
    request = Request(
        "RegisterWorker",
        messages.frame(messages.registration(job)),
        messages.framed_bytes([pb.WorkerRegistration(worker_id="worker-0", incarnation=1)]),
    )
    sample = load.repeat(request, SATURATING, count)
    with connect(load.server.address) as client:
        members = client.live_workers(job)
    return replace(sample, failed=max(sample.failed, abs(count - members)))


class Barrier(Operation):
    """Rounds of a barrier, with a process per worker; on an echo server, as many bare calls."""

    unit = "barriers/s"

    def __init__(self, bench: Bench, size: int, kinds: Sequence[Kind], rounds: int = 0) -> None:
        """``rounds`` per measurement; 0: as many as complete in the profile's time."""
        super().__init__(bench)
        self.name, self.kinds, self.in_flight = f"barrier({size:,})", kinds, size
        self._size, self._rounds, self._job = size, rounds, f"barrier-{size}"
        self._members: dict[Kind, tuple[list[Worker], int]] = {}

    def sample(self, kind: Kind) -> Sample:
        """Measure the rounds of one barrier."""
        seconds = self.bench.profile.barrier_seconds
        if kind.is_echo:
            sample = self.bench.load(kind).freely(echo_heartbeat(), self._size, seconds)
            return replace(sample, rate=sample.rate / self._size)
        if self._rounds:
            return self._barriers(kind, self._rounds)
        if kind not in self.rates:
            self.rates[kind] = self._barriers(kind, WARM_UP_BARRIERS).rate
        sample = self._barriers(kind, max(WARM_UP_BARRIERS, int(self.rates[kind] * seconds)))
        self.rates[kind] = sample.rate
        return sample

    def _barriers(self, kind: Kind, rounds: int) -> Sample:
        self.measurements += 1
        if kind not in self._members:
            with connect(self.bench.servers[kind].address) as client:
                self._members[kind] = client.form_job(self._job, self._size, fixed=True)
        workers, generation = self._members[kind]
        name = f"step-{self.measurements}"
        arrivals = [messages.arrival(self._job, name, worker, generation) for worker in workers]
        reply_bytes = messages.completed_rounds_bytes(rounds, generation, self._size)
        bodies = [messages.frame(arrival) for arrival in arrivals]
        return self.bench.load(kind).barriers(bodies, rounds, reply_bytes)


def echo_heartbeat() -> Request:
    """A heartbeat as the echo servers answer it."""
    return Request(
        "Heartbeat",
        messages.frame(messages.heartbeat("default", Worker("worker-0", 1))),
        messages.framed_bytes([pb.HeartbeatResponse(generation=GENERATION)]),
    )


@dataclass(frozen=True, slots=True)
class SmallJob:
    """A job with a few workers and a dataset, on one coordinator."""

    heartbeat: pb.HeartbeatRequest
    """Of the first worker."""
    pulse: pb.HeartbeatResponse
    shard_request: pb.ShardRequest
    """For the first worker's first shard."""
    shards: list[pb.ShardAssignment]
    """What the first worker has in epoch 0."""

    @classmethod
    def form(cls, server: Server) -> SmallJob:
        """Register its workers and its dataset."""
        job = "small"
        with connect(server.address) as client:
            workers, _ = client.form_job(job, JOB_SIZE, fixed=True)
            dataset = pb.DatasetInfo(
                dataset_id=DATASET,
                job=job,
                total_samples=SHARDS * SHARD_SIZE,
                shard_size=SHARD_SIZE,
                shuffle=True,
                seed=7,
            )
            client.call("RegisterDataset", dataset)
            first: dict[str, Any] = {
                "dataset_id": DATASET,
                "worker_id": workers[0].worker_id,
                "job": job,
            }
            shards = client.call("ListShards", pb.ShardListRequest(**first)).shards
            pulse = client.beat(job, workers)[-1]
        beat = messages.heartbeat(job, workers[0])
        return cls(beat, pulse, pb.ShardRequest(**first), list(shards))

    def heartbeat_load(self) -> Request:
        """The heartbeat as h2load sends it."""
        body, reply = messages.frame(self.heartbeat), messages.framed_bytes([self.pulse])
        return Request("Heartbeat", body, reply)

    def shard_load(self) -> Request:
        """The shard request as h2load sends it."""
        body, reply = messages.frame(self.shard_request), messages.framed_bytes(self.shards[:1])
        return Request("GetDataShard", body, reply)
