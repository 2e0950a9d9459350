"""One round: a run, what is done to it, and the proof that it did no harm."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dtruntime.testing import LocalCoordinator, WorkerProcess

from . import faults
from .crew import ROOT, Crew
from .disk import SmallDisk
from .faults import Outage
from .plan import Fault, RoundPlan
from .proof import prove
from .traces import Traces

HEARTBEAT: dict[str, Any] = {"heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 2000}
TIMEOUT = HEARTBEAT["heartbeat_timeout_ms"] / 1000
TICK = 0.02
STALLED_SECONDS = 20.0
"""After so long without progress the next fault comes all the same."""
ROUND_SECONDS = 240.0
MOST_ERRORS = 40
NETWORK = "from tests.chaos.torture.network import main; main()"


class TortureError(AssertionError):
    """A promise that was not kept."""


@dataclass
class Result:
    """What came of a round."""

    plan: RoundPlan
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    outages: list[Outage] = field(default_factory=list)
    restarts: int = 0
    repeated: int = 0
    errors: list[str] = field(default_factory=list)
    """Why workers ended by themselves, which failing storage allows."""
    proof: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


class Round:
    """A run that is under way."""

    def __init__(self, plan: RoundPlan, folder: Path, s3: Mapping[str, str] | None) -> None:
        self.plan = plan
        self.folder = folder
        self.job = f"round-{plan.number}"
        self.result = Result(plan)
        self.storage_failed = False
        self.coordinator_is_away = False
        self.disk: SmallDisk | None = None
        self.coordinator = LocalCoordinator(folder / "coordinator", **HEARTBEAT)
        self.crew: Crew
        self.sockets: Path
        self.traces = Traces(folder / "traces")
        self.traces.folder.mkdir(parents=True)
        self._s3 = dict(s3 or {})
        self._network: WorkerProcess | None = None
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._threads: list[threading.Thread] = []
        self._trouble: list[BaseException] = []

    # What faults use

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after a while, whatever else happens."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), action))

    def in_background(self, action: Callable[[], None]) -> None:
        """Do something that takes a while, without holding up the supervisor."""

        def run() -> None:
            try:
                action()
            except BaseException as exc:
                self._trouble.append(exc)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def network(self, command: str) -> None:
        """Tell the network to do something."""
        assert self._network is not None
        self._network.send(command)
        self._network.expect("ok")

    def open_outage(self, kind: str, *, needs_crew: bool = False) -> Outage:
        """Take note of a fault that training has to get over."""
        for other in self.result.outages:
            if other.seconds is None:
                other.is_simple = False
        outage = Outage(kind, time.monotonic(), self.traces.crew, needs_crew=needs_crew)
        self.result.outages.append(outage)
        return outage

    def count(self, what: str) -> None:
        """Take note of something for the report."""
        self.result.faults[what] += 1

    # The round

    def run(self) -> Result:
        """Run it to its end, and prove what has to hold."""
        began = time.monotonic()
        try:
            with self._started():
                self._torture()
                self.result.proof = prove(self, self._places(), self._s3)
            self._check_processes()
        except AssertionError as exc:
            self.result.failure = f"{exc}\n{self._evidence()}"
        self.result.seconds = time.monotonic() - began
        self.result.restarts = self.crew.restarts
        self.result.repeated = self.traces.repeated
        self.result.errors = self.crew.errors
        return self.result

    @contextmanager
    def _started(self) -> Iterator[None]:
        with ExitStack() as stack:
            # The path of a socket must be short.
            self.sockets = Path(stack.enter_context(TemporaryDirectory(prefix="strata-chaos-")))
            if self.plan.place in ("disk", "tiers"):
                self.disk = stack.enter_context(SmallDisk(self.folder / "disk"))
            stack.enter_context(self.coordinator)
            stack.callback(self._join)
            targets = [self.coordinator.url.removeprefix("http://")]
            targets += [self._s3["AWS_ENDPOINT_URL"]] if self._s3 else []
            path = {"PYTHONPATH": str(ROOT)}
            self._network = stack.enter_context(WorkerProcess(NETWORK, targets, env=path))
            _, url, *s3_url = self._network.expect("listening").split()
            environment = {
                **self._s3,
                "COORDINATOR_URL": url,
                "STRATA_JOB": self.job,
                "WORLD_SIZE": str(self.plan.world),
                "STRATA_LOG": "info",
            }
            if s3_url:
                environment["AWS_ENDPOINT_URL"] = s3_url[0]
            self.crew = Crew(self.folder, self.plan.world, self._options(), environment)
            stack.callback(self.crew.close)
            self.crew.start_all()
            yield

    def _torture(self) -> None:
        left = list(self.plan.faults)
        deadline = time.monotonic() + ROUND_SECONDS
        since, step = time.monotonic(), 0
        while not self.crew.is_done or self._later:
            time.sleep(TICK)
            self._look()
            if time.monotonic() > deadline:
                raise TortureError(f"not finished after {ROUND_SECONDS:g} s")
            if len(self.crew.errors) > MOST_ERRORS:
                raise TortureError(f"workers end over and over: {self.crew.errors[-1]}")
            if not left or self.crew.finished:
                continue
            stalled = time.monotonic() - since > STALLED_SECONDS
            if stalled or self.traces.last_step >= step + left[0].after_steps:
                self._apply(left.pop(0))
                since, step = time.monotonic(), self.traces.last_step
        self.result.faults["left out, the run was over"] += len(left)

    def _apply(self, fault: Fault) -> None:
        faults.apply(fault, self)
        self.count(fault.kind)

    def _look(self) -> None:
        if self._trouble:
            raise self._trouble[0]
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        self.crew.look()
        fresh = self.traces.read()
        for outage in self.result.outages:
            if outage.seconds is None:
                self._heal(outage, fresh)

    def _heal(self, outage: Outage, fresh: list[dict[str, Any]]) -> None:
        times = [entry["at"] for entry in fresh if outage.heal(entry["at"], entry["crew"])]
        if not times:
            return
        outage.seconds = min(times) - outage.at
        if outage.over_at is not None:
            outage.after_seconds = max(0.0, min(times) - outage.over_at)
        if outage.is_simple and outage.victim is not None:
            slot = outage.victim.slot
            started = [w for w in self.crew.workers if w.slot == slot and w.started_at > outage.at]
            up = self.traces.up.get(started[0].process.pid) if started else None
            outage.startup = None if up is None else up - started[0].started_at

    def _options(self) -> dict[str, Any]:
        plan = self.plan
        main, *local = self._places()
        checkpoint: dict[str, Any] = {"incremental": plan.incremental}
        if local:
            checkpoint["local_tier"] = local[0]
        return {
            "traces": str(self.traces.folder),
            "pause": plan.pause,
            "sockets": str(self.sockets) if plan.direct else "",
            "recovery": {"wait_seconds": plan.wait_seconds, "max_failures": 100_000},
            "run": {
                "checkpoints": main,
                "data": plan.samples,
                "global_batch_size": plan.batch,
                "epochs": plan.epochs,
                "save_steps": plan.save_steps,
                "keep_count": 3,
                "loader": plan.reading,
                "checkpoint": checkpoint,
            },
        }

    def _places(self) -> list[str]:
        """Where checkpoints go: the main storage, and the local tier if there is one."""
        bucket = f"s3://ready/chaos/{self.plan.seed}/{self.plan.number}-{self.folder.name}"
        if self.plan.place == "s3":
            return [bucket]
        if self.plan.place == "tiers":
            return [bucket, str(self.folder / "disk" / "tier")]
        parent = self.folder / "disk" if self.plan.place == "disk" else self.folder
        return [str(parent / "checkpoints")]

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(60)

    def _check_processes(self) -> None:
        left = [worker.process.pid for worker in self.crew.running]
        if left:
            raise TortureError(f"processes are left behind: {left}")

    def _evidence(self) -> str:
        happened = [f"{o.kind} at crew {o.crew}: {o.seconds}" for o in self.result.outages]
        return "\n".join([*happened, self.crew.logs(), self.coordinator.log[-2000:]])
