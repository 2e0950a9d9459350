"""What a run measured: each operation beside its echo, its targets and the published claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from dtruntime.bench.tables import table

from ..harness import MEGABYTE, Row, Target, three_digits, times_as_much
from ..plots import LIMIT, PEER, STRATA_SECOND, Bar, Panel
from .load import Sample, Summary, summarize
from .operations import LIGHT_SUFFIX
from .servers import Kind
from .verify import Verdict

NOISE_WORTH_A_WARNING = 0.15
RATES = (
    "operation",
    "in\nflight",
    "\n/s",
    "p50\nms",
    "p99\nms",
    "CPU µs\n/call",
    "k6\nchecked",
    "\nfailed",
    "load\ncore",
)
RATIOS = (
    "Strata against",
    "itself on\ngrpc.aio",
    "echo on\ngrpc.aio",
    "echo on\nnative",
    "reference\n64 cores",
    "which is\n/s",
    "p99\nms",
)
PUBLISHED = {
    "heartbeat": (11_500, 1.2),
    "get shard": (8_900, 3.8),
    "registration": (1_200, None),
    "barrier(100)": (180, 48),
}
"""The reference's claims for 64 cores: rates, and 99th percentiles in milliseconds."""
OTHERS = (Kind.STRATA_AIO, Kind.ECHO_AIO, Kind.ECHO_NATIVE)


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
    def published(self) -> tuple[float, float | None] | None:
        """The reference's claim."""
        return PUBLISHED.get(self.name.removesuffix(LIGHT_SUFFIX))

    def ratio_to(self, kind: Kind) -> float | None:
        """The median rate against another server's, when that one took part."""
        samples = self.samples.get(kind)
        return self.strata.rate / summarize(samples).rate if samples else None

    @property
    def failed(self) -> int:
        """Calls that failed, on any server and under either generator."""
        return sum(s.failed for found in self.samples.values() for s in found) + self.verdict.failed

    def document(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "name": self.name,
            "unit": self.unit,
            "in_flight": self.in_flight,
            "servers": {kind.value: asdict(s) for kind, s in self.summaries.items()},
            "ratio_to": {k.value: self.ratio_to(k) for k in OTHERS if k in self.samples},
            "reference_on_64_cores": self.published,
            "verified": asdict(self.verdict),
        }


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a coordinator."""

    idle_bytes: int
    workers: int
    loaded_bytes: int


def tables(measured: Sequence[Measured]) -> list[Table]:
    """Rates, and ratios of rates."""
    return [
        table(RATES, map(_rates, measured), "Coordinator under load"),
        table(RATIOS, map(_ratios, measured), "Ratios of rates"),
    ]


def _rates(one: Measured) -> Row:
    ours = one.strata
    return [
        one.name,
        f"{one.in_flight:,}",
        f"{ours.rate:,.0f}" if ours.rate >= 100 else f"{ours.rate:.1f}",
        three_digits(ours.p50_ms),
        three_digits(ours.p99_ms),
        f"{ours.server_cpu_us:.0f}",
        f"{one.verdict.verified:,}",
        Text(f"{one.failed:,}", style="red" if one.failed else ""),
        f"{ours.load_share:.0%}",
    ]


def _ratios(one: Measured) -> Row:
    rate, p99 = one.published or (None, None)
    return [
        one.name,
        *(times_as_much(one.ratio_to(kind)) for kind in OTHERS),
        times_as_much(one.strata.rate / rate if rate else None),
        f"{rate:,.0f}" if rate else "",
        f"{p99:g}" if p99 else "",
    ]


def targets(measured: Sequence[Measured], memory: Memory | None) -> Iterable[Target]:
    """Every target whose operation was measured."""
    by_name = {one.name: one for one in measured}
    if heartbeat := by_name.get("heartbeat"):
        over_aio, of_echo = heartbeat.ratio_to(Kind.ECHO_AIO), heartbeat.ratio_to(Kind.ECHO_NATIVE)
        if over_aio and of_echo:
            name = "heartbeat / echo on"
            yield Target(f"{name} grpc.aio", "≥ 8×", f"{over_aio:.1f}×", over_aio >= 8)
            yield Target(f"{name} pygrpc-native", "≥ 80%", f"{of_echo:.0%}", of_echo >= 0.8)
    for name, least in (("barrier(100)", 180), ("registration", 1_200)):
        if one := by_name.get(name):
            rate, p99 = one.strata.rate, one.strata.p99_ms
            yield Target(name, f"≥ {least:,.0f}/s", f"{rate:,.0f}/s", rate >= least)
            if name == "barrier(100)":
                yield Target(f"{name}, p99", "< 20 ms", f"{p99:.1f} ms", p99 < 20)
    if memory is not None:
        loaded = memory.loaded_bytes / MEGABYTE
        name = f"memory of {memory.workers:,} workers"
        yield Target(name, "< 200 MB", f"{loaded:.0f} MB", loaded < 200)


def notes(
    measured: Sequence[Measured],
    memory: Memory | None,
    survivors: Verdict | None,
    environment: Mapping[str, object],
) -> Iterable[str]:
    """How to read the tables, and what has no table."""
    yield (
        f"Medians of interleaved rounds; servers on core {environment['server_cores']}, load on "
        f"core {environment['load_cores']}. "
        "An echo server does nothing but answer, one bare call for each of Strata's. "
        "k6 checked status and fields of as many replies as shown. "
        "A load core near 100% means that the generator is the limit, not the server."
    )
    if memory:
        idle, loaded = memory.idle_bytes / MEGABYTE, memory.loaded_bytes / MEGABYTE
        workers = f"{memory.workers:,} workers that report resources"
        yield f"Memory: {idle:.0f} MB idle, {loaded:.0f} MB with {workers}."
    if survivors:
        kept, lost = survivors.verified, survivors.failed
        yield f"After kill -9: {kept:,} registered workers still known, {lost:,} not."
    if environment["data_on_tmpfs"]:
        yield "The data directory is on tmpfs: registration did not wait for a disk."
    noise = max((s.foreign_share for m in measured for s in m.summaries.values()), default=0.0)
    if noise > NOISE_WORTH_A_WARNING:
        yield (
            f"Other processes took up to {noise:.0%} of a core in spite of second attempts: "
            "rates are too low, ratios hold better."
        )


def panels(measured: Sequence[Measured]) -> Iterable[Panel]:
    """Rates per operation, and the heartbeat against its ceilings."""
    bars = []
    for one in measured:
        if one.name.endswith(LIGHT_SUFFIX):
            continue
        ours = one.strata
        bars.append(Bar(one.name, ours.rate, f"{_rate(ours.rate)}  p99 {ours.p99_ms:.1f} ms"))
        if (aio := one.summaries.get(Kind.STRATA_AIO)) is not None:
            label = f"{_rate(aio.rate)}  Strata is {ours.rate / aio.rate:.1f}×"
            bars.append(Bar("on grpc.aio", aio.rate, label, STRATA_SECOND))
        if one.published is not None:
            claim = one.published[0]
            label = f"{_rate(claim)}  Strata is {ours.rate / claim:.1f}×"
            bars.append(Bar("reference's claim, 64 cores", claim, label, PEER))
    yield Panel("operations per second (log scale)", bars, log=True)
    for one in measured:
        if one.name == "heartbeat":
            rates = sorted(one.summaries.items(), key=lambda item: -item[1].rate)
            bars = [_ceiling(one, kind, summary.rate) for kind, summary in rates]
            yield Panel("heartbeats per second, same run", bars)


def _ceiling(one: Measured, kind: Kind, rate: float) -> Bar:
    if kind is Kind.STRATA_NATIVE:
        return Bar(kind.value, rate, _rate(rate))
    label = f"{_rate(rate)}  Strata is {one.ratio_to(kind):.2g}×"
    return Bar(kind.value, rate, label, LIMIT if kind.is_echo else STRATA_SECOND)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"
