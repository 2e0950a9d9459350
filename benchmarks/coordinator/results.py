"""Everything one run measured, and how it compares with the targets and the published claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .memory import Memory
from .samples import Summary
from .servers import Kind
from .verify import Verdict

MEGABYTE = 1e6


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
    summaries: Mapping[Kind, Summary]
    echo_rates: Mapping[Kind, float]
    """Of each echo server, under the same load: bare calls, for a barrier divided by its size."""
    verdict: Verdict | None = None

    @property
    def strata(self) -> Summary:
        """The coordinator as it is deployed."""
        return self.summaries[Kind.STRATA_NATIVE]

    @property
    def operation(self) -> str:
        """The name without the load it was measured under."""
        return self.name.partition(",")[0] if self.unit == "calls/s" else self.name

    @property
    def published(self) -> Published | None:
        """The reference's claim."""
        return PUBLISHED.get(self.operation)

    def ratio_to_own_aio(self) -> float | None:
        """Against the same coordinator on grpc.aio."""
        other = self.summaries.get(Kind.STRATA_AIO)
        return self.strata.rate / other.rate if other else None

    def ratio_to_echo(self, kind: Kind) -> float | None:
        """Against a handler that does nothing, on the given transport."""
        rate = self.echo_rates.get(kind)
        return self.strata.rate / rate if rate else None

    def failed(self) -> int:
        """Calls that failed, on any server and under either generator."""
        by_load = sum(summary.failed for summary in self.summaries.values())
        return by_load + (self.verdict.failed if self.verdict else 0)


@dataclass(frozen=True, slots=True)
class Target:
    """A number to reach."""

    name: str
    wanted: str
    measured: str
    met: bool


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
        over_aio = measured.ratio_to_echo(Kind.ECHO_AIO)
        if over_aio is not None:
            met = over_aio >= 8
            targets.append(Target("heartbeat / echo on grpc.aio", "≥ 8×", f"{over_aio:.1f}×", met))
        of_echo = measured.ratio_to_echo(Kind.ECHO_NATIVE)
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
