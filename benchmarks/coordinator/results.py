"""Everything one run measured, and how it compares with the targets and the published claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..tables import Target
from .memory import Memory
from .samples import Sample, Summary, summarize
from .servers import Kind
from .verify import Verdict

MEGABYTE = 1e6
LIGHT_SUFFIX = ", light"
"""Marks an operation measured with few calls in flight: for its latency, not its rate."""


@dataclass(frozen=True, slots=True)
class Published:
    """What the reference claims for an operation, on 64 cores."""

    rate: float
    p99_ms: float | None = None


PUBLISHED = {
    "heartbeat": Published(11_500, 1.2),
    "get shard": Published(8_900, 3.8),
    "registration": Published(1_200),
    "barrier(100)": Published(180, 48),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation on every server that took part."""

    name: str
    unit: str
    in_flight: int
    samples: Mapping[Kind, Sequence[Sample]]
    """Of each server, one per round. An echo server did as many bare calls instead."""
    verdict: Verdict

    @property
    def summaries(self) -> dict[Kind, Summary]:
        """The medians of each server."""
        return {kind: summarize(samples) for kind, samples in self.samples.items()}

    @property
    def strata(self) -> Summary:
        """The coordinator as it is deployed."""
        return summarize(self.samples[Kind.STRATA_NATIVE])

    @property
    def published(self) -> Published | None:
        """The reference's claim."""
        return PUBLISHED.get(self.name.removesuffix(LIGHT_SUFFIX))

    def ratio_to(self, kind: Kind) -> float | None:
        """The median rate against another server's, when that one took part."""
        samples = self.samples.get(kind)
        return self.strata.rate / summarize(samples).rate if samples else None

    def failed(self) -> int:
        """Calls that failed, on any server and under either generator."""
        by_load = sum(sample.failed for found in self.samples.values() for sample in found)
        return by_load + self.verdict.failed


@dataclass(frozen=True, slots=True)
class Results:
    """One run of the benchmark."""

    operations: Sequence[Measured]
    memory: Memory | None
    survivors: Verdict | None
    """Of registered workers, after the coordinator was killed."""
    environment: Mapping[str, object]

    def find(self, name: str) -> Measured | None:
        """An operation by its full name, when it was measured."""
        return next((m for m in self.operations if m.name == name), None)

    def targets(self) -> list[Target]:
        """Every target whose operation was measured."""
        return [
            *self._heartbeat_targets(),
            *self._rate_target("barrier(100)", 180),
            *self._barrier_latency_target(),
            *self._rate_target("registration", 1_200),
            *self._memory_target(),
        ]

    def _heartbeat_targets(self) -> list[Target]:
        measured = self.find("heartbeat")
        if measured is None:
            return []
        targets = []
        over_aio = measured.ratio_to(Kind.ECHO_AIO)
        if over_aio is not None:
            met = over_aio >= 8
            targets.append(Target("heartbeat / echo on grpc.aio", "≥ 8×", f"{over_aio:.1f}×", met))
        of_echo = measured.ratio_to(Kind.ECHO_NATIVE)
        if of_echo is not None:
            met = of_echo >= 0.8
            targets.append(
                Target("heartbeat / echo on pygrpc-native", "≥ 80%", f"{of_echo:.0%}", met)
            )
        return targets

    def _rate_target(self, name: str, least: float) -> list[Target]:
        measured = self.find(name)
        if measured is None:
            return []
        rate = measured.strata.rate
        return [Target(name, f"≥ {least:,.0f}/s", f"{rate:,.0f}/s", rate >= least)]

    def _barrier_latency_target(self) -> list[Target]:
        measured = self.find("barrier(100)")
        if measured is None:
            return []
        p99 = measured.strata.p99_ms
        return [Target("barrier(100), p99", "< 20 ms", f"{p99:.1f} ms", p99 < 20)]

    def _memory_target(self) -> list[Target]:
        if self.memory is None:
            return []
        loaded = self.memory.loaded_bytes / MEGABYTE
        name = f"memory of {self.memory.workers:,} workers"
        return [Target(name, "< 200 MB", f"{loaded:.0f} MB", loaded < 200)]
