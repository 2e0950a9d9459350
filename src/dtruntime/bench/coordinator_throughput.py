"""Registrations, heartbeats and barriers, beside bare calls that do next to nothing."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ..testing import LocalCoordinator
from .crew import BenchWorkers, CallTimes
from .measures import Fact, Section, Series, Tell, in_round, results

JOB_PREFIX = "strata-bench-"
ROUNDS = 5
LIMIT = "bare call"
_KINDS = 4
"""Calls that share a round's time."""
_OWN_INTERVAL_MS = 20_000
_OWN_TIMEOUT_MS = 60_000
_OWN_RATE = 1e9


def bench_coordinator(url: str | None, seconds: float, workers: int, tell: Tell) -> Section:
    """Measure the coordinator at ``url``, or one that is started for it and ended.

    At ``url`` a job with a name of its own remains: coordinators never remove jobs.
    """
    job = f"{JOB_PREFIX}{secrets.token_hex(4)}"
    tell("starting")
    with _coordinator(url) as (address, process), BenchWorkers(address, job, workers) as crew:
        race = _Race(crew, workers, process)
        for number in range(ROUNDS):
            race.round(seconds / ROUNDS / _KINDS, in_round(tell, number + 1))
    facts: dict[str, Fact] = {
        "workers": workers,
        "rounds": ROUNDS,
        "job": job,
        "client_cores": round(race.client_load, 3),
    }
    notes = ["registering includes connecting", _loads(race)]
    if race.coordinator_load is not None:
        facts["coordinator_cores"] = round(race.coordinator_load, 3)
    if url is not None:
        notes.append(f"job {job} stays at the coordinator: jobs are never removed")
    place = url or "a coordinator of its own on loopback"
    return Section("coordinator", place, facts, results(race.records), notes)


def _loads(race: _Race) -> str:
    here = f"all workers are in this process, which used {race.client_load:.2f} cores"
    if race.coordinator_load is None:
        return f"{here} during heartbeats"
    return f"{here} during heartbeats, and the coordinator's {race.coordinator_load:.2f}"


class _Race:
    """Everything in each round, so that all meet the same machine."""

    def __init__(self, crew: BenchWorkers, workers: int, process: psutil.Process | None) -> None:
        self._crew = crew
        self._workers = workers
        self._watch = _Watch(psutil.Process()), None if process is None else _Watch(process)
        self._bare = Series(LIMIT, "calls")
        self._check = Series("health check", "calls", LIMIT)
        self._register = Series("connect and register", "calls", LIMIT)
        self._beat = Series("heartbeat", "calls", LIMIT)
        self._barrier = Series("barrier", "calls", LIMIT)

    @property
    def records(self) -> list[Series]:
        """The limit, and what is compared with it."""
        return [self._bare, self._check, self._register, self._beat, self._barrier]

    @property
    def client_load(self) -> float:
        """How many cores this process used during heartbeats."""
        return self._watch[0].cores

    @property
    def coordinator_load(self) -> float | None:
        """How many cores the coordinator used meanwhile; None where it cannot be seen."""
        return None if self._watch[1] is None else self._watch[1].cores

    def round(self, seconds: float, tell: Tell) -> None:
        """Let all register, call, meet, and leave; each kind of call for some time."""
        tell("registering")
        _note(self._register, self._crew.register())
        tell("bare calls")
        _note(self._bare, self._crew.questions(seconds))
        tell("health checks")
        _note(self._check, self._crew.health_checks(seconds))
        tell("heartbeats")
        with contextlib.ExitStack() as watched:
            for watch in filter(None, self._watch):
                watched.enter_context(watch.watching())
            _note(self._beat, self._crew.heartbeats(seconds))
        tell("barriers")
        _note(self._barrier, self._crew.barriers(seconds))
        self._crew.leave()


class _Watch:
    """Adds up how much processor time a process uses."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._used = 0.0
        self._passed = 0.0

    @property
    def cores(self) -> float:
        """Processor time by time."""
        return self._used / self._passed if self._passed else 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch it for a while."""
        began, used = time.perf_counter(), self._time()
        yield
        self._passed += time.perf_counter() - began
        self._used += self._time() - used

    def _time(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def _note(record: Series, turn: CallTimes) -> None:
    record.add(turn.seconds, len(turn.calls), turn.calls)


@contextlib.contextmanager
def _coordinator(url: str | None) -> Iterator[tuple[str, psutil.Process | None]]:
    """The address of the coordinator, and its process where it is on this machine and ours."""
    if url is not None:
        yield url, None
        return
    with (
        tempfile.TemporaryDirectory(prefix=JOB_PREFIX, ignore_cleanup_errors=True) as folder,
        LocalCoordinator(
            Path(folder),
            heartbeat_interval_ms=_OWN_INTERVAL_MS,
            heartbeat_timeout_ms=_OWN_TIMEOUT_MS,
            # A few workers here do the calls of many.
            settings={"worker_rate_limit": _OWN_RATE, "peer_rate_limit": _OWN_RATE},
        ) as coordinator,
    ):
        yield coordinator.url, psutil.Process(coordinator.pid)
