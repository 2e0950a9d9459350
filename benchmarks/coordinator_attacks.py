"""What one client can do to the others: an honest worker's heartbeats while the coordinator is
attacked, and the coordinator's memory.

`python -m benchmarks.coordinator_attacks [--quick] [--only ATTACK]`
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil

from dtruntime.bench.report import Announce, percentile
from dtruntime.bench.tables import table
from dtruntime.config import split_address
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator

from .coordinator.client import Client
from .coordinator.raw_http2 import RawHttp2Client
from .harness import MEGABYTE, Benchmark, Outcome, environment

SOURCE = "127.0.0.2"
"""The attacker's address; the honest worker has 127.0.0.1."""
BEATS_PER_SECOND = 50
AT_ONCE = 256
NAMES = 12_000
"""More than a coordinator remembers."""


ATTACK = """
import sys
from benchmarks.coordinator_attacks import ATTACKS
attack, url, http_url, seconds = sys.argv[1:]
ATTACKS[attack](url, http_url, float(seconds))
"""
COLUMNS = {
    "attack": "{0.attack}",
    "p50 ms": "{0.p50_ms:.1f}",
    "p99 ms": "{0.p99_ms:.1f}",
    "max ms": "{0.max_ms:.0f}",
    "failed": "{0.failed}",
    "health": "{0.health}",
    "MB before": "{0.memory_before_mb:.0f}",
    "MB most": "{0.memory_mb:.0f}",
    "load": "{0.load:.1f}",
}


def _client(url: str) -> Client:
    return Client(grpc.insecure_channel(url.removeprefix("http://")))


class Forwarder:
    """Carries connections on to a server from another address, which gRPC cannot bind."""

    def __init__(self, url: str) -> None:
        self._target = split_address(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            inside, _ = self._listener.accept()
            outside = socket.create_connection(self._target, source_address=(SOURCE, 0))
            for ends in ((inside, outside), (outside, inside)):
                threading.Thread(target=_carry, args=ends, daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


# The attacks: each goes on for some seconds, in a process of its own


def quiet(url: str, http_url: str, seconds: float) -> None:
    """Do nothing."""
    time.sleep(seconds)


def large_dataset(url: str, http_url: str, seconds: float) -> None:
    """Ask for shards of datasets with as many as are allowed, in ever other epochs."""
    client, end = _client(Forwarder(url).url), time.monotonic() + seconds
    member = client.call("RegisterWorker", pb.WorkerInfo(job="large"))
    for number in range(4):
        request = pb.DatasetInfo(
            job="large",
            dataset_id=f"d-{number}",
            total_samples=10_000_000,
            shard_size=1,
            shuffle=True,
        )
        client.call("RegisterDataset", request)
    epoch = 0
    while time.monotonic() < end:
        epoch += 1
        asked = pb.ShardRequest(
            job="large",
            dataset_id=f"d-{epoch % 4}",
            worker_id=member.worker_id,
            incarnation=member.incarnation,
            epoch=epoch,
        )
        with suppress(grpc.RpcError):
            client.call("GetDataShard", asked)


def unread_answers(url: str, http_url: str, seconds: float) -> None:
    """Ask a thousand times for an answer of 4 MB, and read none."""
    layout = pb.DatasetLayout(
        fingerprint="f",
        shard_samples=[1],
        shard_bytes=[1],
        root="/data/",
        files=["a.parquet"],
        file_samples=[1],
        total_bytes=1,
    )
    dataset = pb.DatasetInfo(
        job="unread",
        dataset_id="d",
        path="/data",
        format="parquet",
        total_samples=1,
        shard_size=1,
        layout=layout,
        index=bytes(4 * 2**20 - 4096),
    )
    _client(url).call("RegisterDataset", dataset)
    request = pb.DatasetRequest(job="unread", dataset_id="d", full=True)
    end = time.monotonic() + seconds
    with RawHttp2Client(url, SOURCE) as client:
        for _ in range(1000):
            client.ask("GetDataset", request)
        time.sleep(max(0.0, end - time.monotonic()))


def empty_worlds(url: str, http_url: str, seconds: float) -> None:
    """Register one of 65,536 workers in job after job, and open barriers that nobody comes to."""
    client, end = _client(Forwarder(url).url), time.monotonic() + seconds
    with ExitStack() as stack:
        number = 0
        while time.monotonic() < end and number < 2000:
            number += 1
            job = f"world-{number}"
            try:
                member = client.call("RegisterWorker", pb.WorkerInfo(job=job, world_size=65_536))
            except grpc.RpcError:
                continue
            waits = number % 50 == 1
            waiting = stack.enter_context(RawHttp2Client(url, SOURCE)) if waits else None
            for barrier in range(10):
                if waiting is None:
                    break
                request = pb.BarrierRequest(
                    job=job,
                    worker_id=member.worker_id,
                    incarnation=member.incarnation,
                    generation=member.generation,
                    barrier_id=f"b-{barrier}",
                    ticket=barrier + 1,
                    timeout_ms=600_000,
                )
                waiting.ask("WaitBarrier", request)
        time.sleep(max(0.0, end - time.monotonic()))


def job_names(url: str, http_url: str, seconds: float) -> None:
    """Use up names of jobs."""
    client, end, names = _client(Forwarder(url).url), time.monotonic() + seconds, 0
    while time.monotonic() < end or names < NAMES:
        jobs = [f"name-{names + number}" for number in range(AT_ONCE)]
        begun = [client.begin("RegisterWorker", pb.WorkerInfo(job=job)) for job in jobs]
        left = []
        for job, call in zip(jobs, begun, strict=True):
            with suppress(grpc.RpcError):
                member = call.result()
                names += 1
                gone = pb.DeregisterRequest(
                    job=job, worker_id=member.worker_id, incarnation=member.incarnation
                )
                left.append(client.begin("DeregisterWorker", gone))
        for call in left:
            with suppress(grpc.RpcError):
                call.result()
    print(f"{names} names of jobs were taken", flush=True)


def half_requests(url: str, http_url: str, seconds: float) -> None:
    """Begin as many HTTP requests as there may be connections, and end none."""
    with ExitStack() as stack:
        for _ in range(1024):
            one = socket.create_connection(split_address(http_url), source_address=(SOURCE, 0))
            stack.enter_context(one)
            one.sendall(b"GET /api/health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        time.sleep(seconds)


def flood(url: str, http_url: str, seconds: float) -> None:
    """Call as fast as answers come, 64 calls at a time on each of four connections."""
    end = time.monotonic() + seconds

    def connections() -> None:
        while time.monotonic() < end:
            with suppress(OSError):
                one_connection()

    def one_connection() -> None:
        with RawHttp2Client(url, SOURCE, window=65_535) as client:
            while time.monotonic() < end:
                calls = [client.call("ListJobs", pb.ListJobsRequest()) for _ in range(64)]
                client.send(b"".join(calls))
                while client.drain(0.002):
                    pass

    threads = [threading.Thread(target=connections) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ATTACKS: dict[str, Callable[[str, str, float], None]] = {
    "quiet": quiet,
    "large dataset": large_dataset,
    "unread answers": unread_answers,
    "empty worlds": empty_worlds,
    "job names": job_names,
    "half requests": half_requests,
    "flood": flood,
}


# The honest worker


@dataclass(frozen=True, slots=True)
class Measured:
    """What the others felt of an attack."""

    attack: str
    beats: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    failed: int
    """Heartbeats that were refused or not answered within 5 seconds."""
    health: int
    """The status of /api/health in the middle of it; 0: no answer within 5 seconds."""
    memory_mb: float
    """The most that the coordinator had."""
    memory_before_mb: float
    load: float
    """How many processes wanted a processor, over the last minute, with everything else here."""


def beat(url: str, until: threading.Event, took: list[float], failed: list[str]) -> None:
    """Send heartbeats at a fixed rate and time them."""
    client = _client(url)
    member = client.call("RegisterWorker", pb.WorkerInfo(job="honest"))
    request = pb.HeartbeatRequest(
        job="honest", worker_id=member.worker_id, incarnation=member.incarnation
    )
    while not until.wait(1 / BEATS_PER_SECOND):
        began = time.perf_counter()
        try:
            client.call("Heartbeat", request, 5.0)
        except grpc.RpcError as exc:
            failed.append(repr(exc))
        took.append(time.perf_counter() - began)


def attacked(attack: str, seconds: float) -> Measured:
    """Attack a fresh coordinator while an honest worker beats."""
    took: list[float] = []
    failed: list[str] = []
    stop = threading.Event()
    with LocalCoordinator(http=True) as coordinator:
        honest = threading.Thread(target=beat, args=(coordinator.url, stop, took, failed))
        honest.start()
        process = psutil.Process(coordinator.pid)
        before = most = process.memory_info().rss
        arguments = attack, coordinator.url, coordinator.http_url, str(seconds)
        attacker = subprocess.Popen([sys.executable, "-c", ATTACK, *arguments])
        health, asked_at = 0, time.monotonic() + seconds * 0.75
        while attacker.poll() is None:
            most = max(most, process.memory_info().rss)
            if not health and time.monotonic() > asked_at:
                health = health_of(coordinator.http_url)
            time.sleep(0.02)
        stop.set()
        honest.join()
    return Measured(
        attack=attack,
        beats=len(took),
        p50_ms=1000 * (percentile(took, 50) or 0.0),
        p99_ms=1000 * (percentile(took, 99) or 0.0),
        max_ms=1000 * max(took),
        failed=len(failed),
        health=health,
        memory_mb=most / MEGABYTE,
        memory_before_mb=before / MEGABYTE,
        load=os.getloadavg()[0],
    )


def health_of(http_url: str) -> int:
    """The status of a health check."""
    try:
        return httpx.get(f"{http_url}/api/health", timeout=5.0).status_code
    except httpx.HTTPError:
        return 0


def measure(options: argparse.Namespace, scratch: Path, announce: Announce) -> Outcome:
    """Measure each attack."""
    seconds = 5.0 if options.quick else 30.0
    here = environment(["grpcio", "pygrpc-native"])
    measured = []
    for attack in options.only:
        announce(attack)
        measured.append(attacked(attack, seconds))
    title = "An honest worker's heartbeats, and the coordinator"
    rows = [[text.format(one) for text in COLUMNS.values()] for one in measured]
    return Outcome(
        tables=[table([*COLUMNS], rows, title)],
        document={"environment": here, "seconds": seconds, "attacks": measured},
    )


BENCHMARK = Benchmark(
    name="coordinator_attacks",
    description="what the others feel of an attack by one client",
    quick="a minute",
    measure=measure,
    parts=tuple(ATTACKS),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
