"""The operations that are measured, each ready to be sampled on any of its servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from dtruntime.rpc.gen import coordinator_pb2 as pb

from . import crowd, load, messages
from .client import connect
from .echo import GENERATION
from .load import Request, Shape
from .messages import Worker
from .profiles import Profile
from .samples import Sample
from .servers import Kind, Server
from .tools import Tools

WARM_UP_CALLS = 800
WARM_UP_BARRIERS = 10
JOB_SIZE = 8
DATASET = "corpus"
SHARDS = 1024
SHARD_SIZE = 10_000


@dataclass(frozen=True, slots=True)
class Bench:
    """The servers that run, and what loads them."""

    tools: Tools
    scratch: Path
    profile: Profile
    servers: Mapping[Kind, Server]


class Operation(Protocol):
    """Something the servers do, measured one server at a time."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        ...

    @property
    def unit(self) -> str:
        """What its rate counts."""
        ...

    @property
    def kinds(self) -> Sequence[Kind]:
        """The servers it can be measured on, in the order of a round."""
        ...

    def sample(self, kind: Kind) -> Sample:
        """Measure once."""
        ...


@dataclass
class RepeatedCall:
    """One request over and over; every call is an operation."""

    bench: Bench
    name: str
    requests: Mapping[Kind, Request]
    shape: Shape
    unit: str = "calls/s"
    _rates: dict[Kind, float] = field(default_factory=dict)

    @property
    def kinds(self) -> Sequence[Kind]:
        """The servers that know the call."""
        return list(self.requests)

    def sample(self, kind: Kind) -> Sample:
        """Send as many as the server can answer in the profile's time."""
        if kind not in self._rates:
            self._rates[kind] = self._run(kind, WARM_UP_CALLS).rate
        sample = self._run(kind, int(self._rates[kind] * self.bench.profile.seconds))
        self._rates[kind] = sample.rate
        return sample

    def _run(self, kind: Kind, count: int) -> Sample:
        bench = self.bench
        server, request = bench.servers[kind], self.requests[kind]
        return load.run(bench.tools, server, request, self.shape, count, bench.scratch)


@dataclass
class Registrations:
    """New workers, each stored before its reply leaves; a job of its own per measurement."""

    bench: Bench
    name: str = "registration"
    unit: str = "calls/s"
    kinds: Sequence[Kind] = tuple(Kind)
    _measurements: int = 0

    def sample(self, kind: Kind) -> Sample:
        """Register the profile's number of workers; an echo server gets as many bare calls."""
        bench, count = self.bench, self.bench.profile.registrations
        if kind.is_echo:
            server, shape = bench.servers[kind], load.SATURATING
            return load.run(bench.tools, server, echo_heartbeat(), shape, count, bench.scratch)
        self._measurements += 1
        return register_workers(bench, kind, f"registration-{self._measurements}", count)


def register_workers(bench: Bench, kind: Kind, job: str, count: int) -> Sample:
    """Register `count` workers with h2load; those that are no members then have failed."""
    server = bench.servers[kind]
    request = Request(
        "RegisterWorker",
        messages.frame(messages.registration(job)),
        messages.framed_bytes([pb.WorkerRegistration(worker_id="worker-0", incarnation=1)]),
    )
    sample = load.run(bench.tools, server, request, load.SATURATING, count, bench.scratch)
    with connect(server.address) as client:
        members = client.live_workers(job)
    return replace(sample, failed=max(sample.failed, abs(count - members)))


@dataclass
class Barrier:
    """Rounds of a barrier, with a process per worker; on an echo server, as many bare calls."""

    bench: Bench
    size: int
    kinds: Sequence[Kind]
    rounds: int | None = None
    """Per measurement; absent: as many as complete in the profile's time."""
    unit: str = "barriers/s"
    _jobs: dict[Kind, tuple[list[Worker], int]] = field(default_factory=dict)
    _rates: dict[Kind, float] = field(default_factory=dict)
    _measurements: int = 0

    @property
    def name(self) -> str:
        """With the number of workers."""
        return f"barrier({self.size:,})"

    def sample(self, kind: Kind) -> Sample:
        """Measure the rounds of one barrier."""
        if kind.is_echo:
            return self._bare_calls(kind)
        if self.rounds:
            return self._barriers(kind, self.rounds)
        if kind not in self._rates:
            self._rates[kind] = self._barriers(kind, WARM_UP_BARRIERS).rate
        rounds = int(self._rates[kind] * self.bench.profile.barrier_seconds)
        sample = self._barriers(kind, max(WARM_UP_BARRIERS, rounds))
        self._rates[kind] = sample.rate
        return sample

    def _bare_calls(self, kind: Kind) -> Sample:
        bench = self.bench
        sample = crowd.run_freely(
            bench.tools,
            bench.servers[kind],
            echo_heartbeat(),
            self.size,
            bench.profile.barrier_seconds,
            bench.scratch,
        )
        return replace(sample, rate=sample.rate / self.size)

    def _barriers(self, kind: Kind, rounds: int) -> Sample:
        bench = self.bench
        self._measurements += 1
        workers, generation = self._job(kind)
        name = f"step-{self._measurements}"
        bodies = [
            messages.frame(messages.arrival(self._job_name, name, worker, generation))
            for worker in workers
        ]
        reply_bytes = messages.completed_rounds_bytes(rounds, generation, self.size)
        server = bench.servers[kind]
        return crowd.run_barriers(bench.tools, server, bodies, rounds, reply_bytes, bench.scratch)

    @property
    def _job_name(self) -> str:
        return f"barrier-{self.size}"

    def _job(self, kind: Kind) -> tuple[list[Worker], int]:
        if kind not in self._jobs:
            with connect(self.bench.servers[kind].address) as client:
                self._jobs[kind] = client.form_job(self._job_name, self.size, fixed=True)
        return self._jobs[kind]


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

    job: str
    workers: list[Worker]
    pulse: pb.HeartbeatResponse
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
            client.call("RegisterDataset", dataset, pb.DatasetRegistration)
            listing = pb.ShardListRequest(
                dataset_id=DATASET, worker_id=workers[0].worker_id, job=job
            )
            shards = client.call("ListShards", listing, pb.ShardList).shards
            pulse = client.beat(job, workers, gpus=messages.GPUS_PER_WORKER)[-1]
        return cls(job, workers, pulse, list(shards))

    def heartbeat(self) -> pb.HeartbeatRequest:
        """A heartbeat of the first worker."""
        return messages.heartbeat(self.job, self.workers[0])

    def shard_request(self) -> pb.ShardRequest:
        """Asks for the first worker's first shard."""
        return pb.ShardRequest(
            dataset_id=DATASET, worker_id=self.workers[0].worker_id, job=self.job
        )

    def heartbeat_load(self) -> Request:
        """The heartbeat as h2load sends it."""
        return Request(
            "Heartbeat", messages.frame(self.heartbeat()), messages.framed_bytes([self.pulse])
        )

    def shard_load(self) -> Request:
        """The shard request as h2load sends it."""
        return Request(
            "GetDataShard",
            messages.frame(self.shard_request()),
            messages.framed_bytes([self.shards[0]]),
        )
