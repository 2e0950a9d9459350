"""The ranks that train together, and how they come together again."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from .._loop import io
from ..client import TrainingOrchestrator
from ..errors import SyncError
from ..telemetry import EventLog
from .notices import Notices
from .recovery import Recovery

log = EventLog("run")

POLL_SECONDS = 0.1
ROUND_MS = 30_000
ASSEMBLE_MS = 5_000
"""After so long a worker that waits for others says so."""


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks of one formation, in order."""

    ranks: tuple[int, ...]
    rank: int
    """This worker's."""
    generation: int
    """The membership that it was formed of."""

    @property
    def index(self) -> int:
        """This worker's place among the ranks."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    @property
    def leads(self) -> bool:
        """Whether this worker does what one has to do for all."""
        return self.index == 0


class Membership(ABC):
    """Where the crew comes from."""

    @abstractmethod
    def assemble(self) -> Crew:
        """Come together with all others that are there."""

    @abstractmethod
    def share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        """Give the others a value, and get theirs by rank; ``SyncError`` when one is lost."""

    @abstractmethod
    def has_changed(self, crew: Crew) -> bool:
        """Whether a crew is not the present membership any more."""

    @abstractmethod
    def has_lost(self, crew: Crew) -> bool:
        """Whether one of a crew is gone."""


class Alone(Membership):
    """A run of one process, without a coordinator."""

    def assemble(self) -> Crew:
        """Just this one."""
        return Crew((0,), 0, 0)

    def share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        """Its own value."""
        return {0: value}

    def has_changed(self, crew: Crew) -> bool:
        """Never."""
        return False

    has_lost = has_changed


class Together(Membership):
    """The members of a job, as the coordinator knows them."""

    def __init__(
        self,
        orchestrator: TrainingOrchestrator,
        recovery: Recovery,
        notices: Notices,
    ) -> None:
        self._orchestrator = orchestrator
        self._notices = notices
        self._recovery = recovery
        self._wanted = orchestrator.config.world_size or recovery.min_workers
        """How many workers the run had, or is to have."""
        self._formed = False

    def assemble(self) -> Crew:
        """Register if need be, wait for the others by the policy, and come together."""
        deadline = time.monotonic() + self._recovery.assemble_seconds
        while True:
            self._notices.check()
            self._notices.wait(io.submit(self._orchestrator.register_worker()))
            try:
                if self._formed:
                    self._wait_for_replacements()
                seen = str(self._orchestrator.generation).encode()
                values = self._exchange("run:assemble", seen, ASSEMBLE_MS)
            except SyncError as exc:
                if exc.reason == "timeout" and time.monotonic() > deadline:
                    raise
                log.warning("run.assembling", reason=str(exc))
                continue
            # The same on all ranks, whatever their heartbeats have told them since.
            generation = max(int(value) for value in values.values())
            crew = Crew(tuple(sorted(values)), self._orchestrator.rank, generation)
            if crew.size >= self._recovery.min_workers:
                self._formed = True
                self._wanted = max(crew.size, self._orchestrator.config.world_size or 0)
                return crew
            self._wait_until(self._recovery.min_workers, deadline)

    def share(self, name: str, value: bytes, crew: Crew) -> Mapping[int, bytes]:
        """Give the others of the crew a value, and get theirs by rank."""
        return self._exchange(f"run:{crew.generation}:{name}", value, ROUND_MS, crew.ranks)

    def has_changed(self, crew: Crew) -> bool:
        """Whether somebody was lost, left, or came."""
        if not self._orchestrator.is_registered:
            return True
        return self._orchestrator.generation != crew.generation

    def has_lost(self, crew: Crew) -> bool:
        """Whether somebody was lost or left, or this worker itself is not a member any more."""
        if not self._orchestrator.is_registered:
            return True
        return self._orchestrator.lost_generation > crew.generation

    def _exchange(
        self, name: str, value: bytes, timeout_ms: int, ranks: tuple[int, ...] | None = None
    ) -> Mapping[int, bytes]:
        worker = self._orchestrator
        call = worker.exchange_async(name, value, timeout_ms, ranks=ranks)
        return self._notices.wait(io.submit(call))

    def _wait_for_replacements(self) -> None:
        deadline = time.monotonic() + self._recovery.wait_seconds
        live = self._wait_until(self._wanted, deadline)
        if live < self._wanted:
            log.warning("run.goes_on_smaller", workers=live, before=self._wanted)

    def _wait_until(self, workers: int, deadline: float) -> int:
        """Wait until so many workers are there, or time is up; returns how many there are."""
        announced = False
        while (live := self._orchestrator.live_workers()) < workers:
            self._notices.check()
            if time.monotonic() > deadline:
                return live
            if not announced:
                log.warning("run.waits_for_workers", live=live, wanted=workers)
                announced = True
            time.sleep(POLL_SECONDS)
        return live
