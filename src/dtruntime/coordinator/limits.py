"""Rate limits: token buckets per worker and per peer address."""

from __future__ import annotations

from .state import Refused

WORKER_BURST = 4.0
PEER_BURST = 2.0
PEER_SHARE = 0.5
"""The share of a core that calls from one address may use; a long call counts as several."""
COSTLY_KEPT = 4096
IDLE_SECONDS = 60.0
"""A bucket unused for this long is full again and can be forgotten."""


class TokenBuckets:
    """One bucket per key: ``rate`` calls a second, ``burst`` seconds' worth at once."""

    __slots__ = ("_buckets", "_capacity", "_rate", "_what")

    def __init__(self, what: str, rate: float, burst: float) -> None:
        self._what = what
        self._rate = rate
        self._capacity = max(1.0, rate * burst)
        self._buckets: dict[str, list[float]] = {}

    def take(self, key: str, now: float) -> None:
        """Take one token, or refuse with the time until there is one."""
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = [self._capacity - 1.0, now]
            return
        tokens = bucket[0] + (now - bucket[1]) * self._rate
        if tokens > self._capacity:
            tokens = self._capacity
        bucket[1] = now
        if tokens < 1.0:
            bucket[0] = tokens
            self._refuse(key, tokens)
        bucket[0] = tokens - 1.0

    def charge(self, key: str, tokens: float) -> None:
        """Take tokens even if there are none: later calls wait until the debt is paid."""
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket[0] -= tokens

    def forget_idle(self, now: float) -> None:
        """Drop buckets that nobody has used for a while."""
        stale = [key for key, (_, used) in self._buckets.items() if now - used > IDLE_SECONDS]
        for key in stale:
            del self._buckets[key]

    def __len__(self) -> int:
        return len(self._buckets)

    def _refuse(self, key: str, tokens: float) -> None:
        raise Refused(
            "rate_limited",
            f"{self._what} {key} makes more than {self._rate:g} calls a second: wait as the "
            f"retry hint says, or raise {self._what}_rate_limit in [coordinator]",
            retry_after=(1.0 - tokens) / self._rate,
        )


class RateLimits:
    """Both limits of the service."""

    __slots__ = ("_costly", "_peer_rate", "_peers", "_workers")

    def __init__(self, worker_rate: float, peer_rate: float) -> None:
        self._peer_rate = peer_rate
        self._costly: set[str] = set()
        """Addresses whose last call was long."""
        self._workers = TokenBuckets("worker", worker_rate, WORKER_BURST)
        self._peers = TokenBuckets("peer", peer_rate, PEER_BURST)

    def check_peer(self, peer: str, now: float) -> None:
        """Count a call from an address; ``peer`` is ``ipv4:ADDRESS:PORT``."""
        self._peers.take(peer.rpartition(":")[0], now)

    def is_costly(self, peer: str) -> bool:
        """Whether to measure the processor time of an address's next call.

        That takes a system call, so short calls are not measured.
        """
        return bool(self._costly) and peer.rpartition(":")[0] in self._costly

    def note_duration(self, peer: str, seconds: float) -> None:
        """Note how long a call took by the clock, which may include other work."""
        if self._worth(seconds) > 1.0 and len(self._costly) < COSTLY_KEPT:
            self._costly.add(peer.rpartition(":")[0])

    def charge_peer(self, peer: str, seconds: float) -> None:
        """Charge an address for the processor time of a call, if that was long."""
        address, worth = peer.rpartition(":")[0], self._worth(seconds)
        if worth > 1.0:
            self._peers.charge(address, worth - 1.0)
        else:
            self._costly.discard(address)

    def _worth(self, seconds: float) -> float:
        """How many calls this much processor time is worth."""
        return seconds * self._peer_rate / PEER_SHARE

    def check_worker(self, job: str, worker_id: str, now: float) -> None:
        """Count a call of a known worker."""
        self._workers.take(f"{job}/{worker_id}", now)

    def forget_idle(self, now: float) -> None:
        """Drop buckets that nobody has used for a while."""
        self._workers.forget_idle(now)
        self._peers.forget_idle(now)
