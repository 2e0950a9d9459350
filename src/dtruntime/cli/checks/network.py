"""The way to the coordinator, step by step, and what it says about itself."""

from __future__ import annotations

import re
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..._version import __version__
from ...client import Observer
from ...display import duration
from ...errors import ConfigError, ConnectionError
from ...rpc.channel import target_of
from .finding import Finding

GROUP = "coordinator"
CONNECT_SECONDS = 3.0
ROUND_TRIPS = 9
_REFERRAL = re.compile(r"[;.] 'strata doctor [^']*' checks .*$")
"""Where errors end with a word on this very check."""
CLOCK_SECONDS = 1.0
"""A larger difference between clocks is worth a warning."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One call, and what it says about the clocks."""

    seconds: float
    clock_difference: float
    """The coordinator's clock minus ours, had both directions taken equally long."""


@dataclass(frozen=True, slots=True)
class Contact:
    """A coordinator that answered."""

    version: str
    transport: str
    term: int
    live_workers: int
    round_trips: list[RoundTrip]


class NetworkCheck:
    """Walks to the coordinator; each step needs the one before it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.contact: Contact | None = None
        """What answered, when the walk came that far."""

    def findings(self) -> Iterator[Finding]:
        """Address, name, connection, calls, then what the answers tell."""
        try:
            host, _, port = target_of(self._url).rpartition(":")
        except ConfigError as exc:
            yield _fail("address", str(exc), "give it as --url http://HOST:50051")
            return
        yield (resolved := _resolve(host.strip("[]")))
        if resolved.verdict == "fail":
            return
        yield (connected := _connect(host.strip("[]"), int(port)))
        if connected.verdict == "fail":
            return
        yield self._call()
        if self.contact is not None:
            yield _clock(self.contact)
            yield _version(self.contact)

    def _call(self) -> Finding:
        try:
            with Observer(self._url) as observer:
                self.contact = _talk(observer)
        except ConnectionError as exc:
            return _fail(
                "gRPC",
                f"the port is open, but calls fail: {_REFERRAL.sub('', str(exc))}",
                "check that the port is the coordinator's gRPC port, and the proxy setting above",
            )
        times = sorted(trip.seconds for trip in self.contact.round_trips)
        median = statistics.median(times)
        text = f"round trip {duration(median)} (median of {len(times)}), at most "
        text += f"{duration(times[-1])}"
        return Finding(
            GROUP,
            "gRPC",
            "ok",
            text,
            measured={"median_seconds": median, "longest_seconds": times[-1]},
        )


def _resolve(host: str) -> Finding:
    started = time.perf_counter()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as exc:
        return _fail(
            "name",
            f"{host} is not known here: {exc}",
            "check the spelling, /etc/hosts and the DNS settings; an IP address works too",
        )
    seconds = time.perf_counter() - started
    addresses = ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))
    text = f"{host} is {addresses}" if addresses != host else f"{host} needs no look-up"
    measured = {"seconds": seconds}
    return Finding(GROUP, "name", "ok", f"{text} ({duration(seconds)})", measured=measured)


def _connect(host: str, port: int) -> Finding:
    started = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            seconds = time.perf_counter() - started
    except ConnectionRefusedError:
        return _fail(
            "connection",
            f"nothing listens at {host}:{port}",
            f"start one there: strata coordinator 0.0.0.0:{port}; or name another with --url",
        )
    except OSError as exc:
        return _fail(
            "connection",
            f"{host}:{port} cannot be reached: {exc}",
            "check the address, the firewall and the security group between the two machines",
        )
    text = f"to {host}:{port} in {duration(seconds)}"
    return Finding(GROUP, "connection", "ok", text, measured={"seconds": seconds})


def _talk(observer: Observer) -> Contact:
    info = observer.server_info()
    trips = []
    for _ in range(ROUND_TRIPS):
        sent, started = time.time(), time.perf_counter()
        answer = observer.server_info()
        seconds = time.perf_counter() - started
        trips.append(RoundTrip(seconds, answer.now - (sent + seconds / 2)))
    live = sum(observer.status(job).live_workers for job in observer.jobs())
    return Contact(info.version, info.transport, info.term, live, trips)


def _clock(contact: Contact) -> Finding:
    """The quickest round trip leaves least room for an error."""
    trip = min(contact.round_trips, key=lambda trip: trip.seconds)
    difference, error = trip.clock_difference, trip.seconds / 2
    direction = "ahead of" if difference > 0 else "behind"
    text = f"the coordinator's clock is {duration(abs(difference))} {direction} this one"
    measured = {"difference_seconds": difference, "error_seconds": error}
    if abs(difference) > CLOCK_SECONDS:
        remedy = "run a time service (chrony, systemd-timesyncd) on both, restart the coordinator"
        return Finding(GROUP, "clock", "warn", text, remedy, measured)
    text += f", give or take {duration(error)}"
    return Finding(GROUP, "clock", "ok", text, measured=measured)


def _version(contact: Contact) -> Finding:
    text = f"strata {contact.version} over {contact.transport}, term {contact.term}"
    if contact.version != __version__:
        remedy = f"install the same version on both: pip install dtruntime=={contact.version}"
        return Finding(GROUP, "version", "warn", f"{text}, but strata {__version__} here", remedy)
    return Finding(GROUP, "version", "ok", f"{text}, as here")


def _fail(name: str, text: str, remedy: str) -> Finding:
    return Finding(GROUP, name, "fail", text, remedy)
