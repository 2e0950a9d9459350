"""Token buckets: how much at once, how much on average, and when to come back."""

import pytest

from dtruntime.config import CoordinatorConfig
from dtruntime.coordinator.limits import RateLimits, TokenBuckets
from dtruntime.coordinator.state import Refused


def taken(buckets: TokenBuckets, key: str, now: float) -> int:
    """How many tokens can be had at this moment."""
    for count in range(100_000):
        try:
            buckets.take(key, now)
        except Refused:
            return count
    raise AssertionError("no limit")


def test_burst_then_the_rate() -> None:
    buckets = TokenBuckets("worker", rate=10.0, burst=4.0)
    assert taken(buckets, "a", 0.0) == 40
    assert taken(buckets, "a", 1.0) == 10
    assert taken(buckets, "a", 1.05) == 0
    assert taken(buckets, "a", 1.1) == 1


def test_bucket_holds_no_more_than_the_burst() -> None:
    buckets = TokenBuckets("worker", rate=10.0, burst=4.0)
    taken(buckets, "a", 0.0)
    assert taken(buckets, "a", 1000.0) == 40


def test_hint_says_when_the_next_call_succeeds() -> None:
    buckets = TokenBuckets("worker", rate=4.0, burst=1.0)
    taken(buckets, "a", 0.0)
    with pytest.raises(Refused, match="worker a makes more than 4 calls a second") as caught:
        buckets.take("a", 0.1)
    assert caught.value.reason == "rate_limited"
    assert caught.value.retry_after == pytest.approx(0.15)
    assert caught.value.retry_after is not None
    buckets.take("a", 0.1 + caught.value.retry_after + 1e-9)


def test_refused_calls_cost_nothing() -> None:
    buckets = TokenBuckets("worker", rate=1.0, burst=1.0)
    taken(buckets, "a", 0.0)
    for moment in range(10):
        assert taken(buckets, "a", moment / 20) == 0
    assert taken(buckets, "a", 1.0) == 1


def test_average_is_the_rate_over_a_long_time() -> None:
    buckets = TokenBuckets("worker", rate=7.0, burst=2.0)
    passed = sum(taken(buckets, "a", step / 10) for step in range(1000))
    assert passed == pytest.approx(14 + 7 * 99.9, abs=2)


def test_keys_do_not_share_a_bucket() -> None:
    buckets = TokenBuckets("worker", rate=1.0, burst=1.0)
    taken(buckets, "a", 0.0)
    buckets.take("b", 0.0)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rate_below_one_lets_one_call_through(rate: float) -> None:
    buckets = TokenBuckets("worker", rate=rate, burst=1.0)
    assert taken(buckets, "a", 0.0) == 1
    assert taken(buckets, "a", 0.9 / rate) == 0
    assert taken(buckets, "a", 1.9 / rate) == 1


def test_idle_buckets_are_forgotten_and_busy_ones_kept() -> None:
    buckets = TokenBuckets("worker", rate=1.0, burst=1.0)
    for number in range(1000):
        buckets.take(f"worker-{number}", 0.0)
    buckets.take("busy", 50.0)
    buckets.forget_idle(61.0)
    assert len(buckets) == 1
    with pytest.raises(Refused):
        buckets.take("busy", 50.5)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("ipv4:10.0.0.1:5000", "ipv4:10.0.0.1:6000", True),
        ("ipv4:10.0.0.1:5000", "ipv4:10.0.0.2:5000", False),
        ("ipv6:[::1]:5000", "ipv6:[::1]:6000", True),
        ("ipv6:[::1]:5000", "ipv6:[::2]:5000", False),
    ],
)
def test_peers_are_told_apart_by_address_and_not_by_port(
    first: str, second: str, same: bool
) -> None:
    limits = RateLimits(worker_rate=1.0, peer_rate=0.5)
    limits.check_peer(first, 0.0)
    if same:
        with pytest.raises(Refused, match="peer_rate_limit"):
            limits.check_peer(second, 0.0)
    else:
        limits.check_peer(second, 0.0)


def test_workers_of_two_jobs_do_not_share_a_bucket() -> None:
    limits = RateLimits(worker_rate=0.25, peer_rate=1.0)
    limits.check_worker("a", "worker-0", 0.0)
    limits.check_worker("b", "worker-0", 0.0)
    with pytest.raises(Refused, match="worker a/worker-0"):
        limits.check_worker("a", "worker-0", 0.0)
    limits.forget_idle(1000.0)
    limits.check_worker("a", "worker-0", 1000.0)


def by_default() -> RateLimits:
    config = CoordinatorConfig()
    return RateLimits(config.worker_rate_limit, config.peer_rate_limit)


def accepted_seconds(limits: RateLimits, peer: str, seconds: float, per_call: float) -> float:
    """How much work an address gets done that calls without pause."""
    done, now = 0.0, 0.0
    while now < seconds:
        try:
            limits.check_peer(peer, now)
        except Refused as refused:
            now += (refused.retry_after or 0.0) + 1e-6
            continue
        limits.charge_peer(peer, per_call)
        done, now = done + per_call, now + per_call
    return done


@pytest.mark.parametrize("per_call", [0.000_2, 0.005, 0.5])
def test_address_gets_half_of_a_core_however_long_its_calls_take(per_call: float) -> None:
    done = accepted_seconds(by_default(), "ipv4:10.0.0.1:1", 60.0, per_call)
    assert 0.4 * 60 < done < 0.6 * 60


def test_crowd_behind_one_address_is_not_hurt() -> None:
    """1,000 workers that send a heartbeat a second, each of which takes 0.1 ms."""
    limits = by_default()
    for beat in range(60_000):
        peer = f"ipv4:10.0.0.1:{beat % 1000}"
        limits.check_peer(peer, beat / 1000)
        limits.charge_peer(peer, 0.000_1)


def test_crowd_comes_up_behind_one_address_within_seconds() -> None:
    """1,000 workers that make ten calls each at once, and come back when they are told to."""
    limits = by_default()
    waiting, now = 10_000, 0.0
    while waiting:
        try:
            limits.check_peer("ipv4:10.0.0.1:1", now)
        except Refused as refused:
            now += (refused.retry_after or 0.0) + 1e-6
        else:
            waiting -= 1
    assert now <= 3.0


def test_processor_time_is_asked_for_after_a_long_call_only() -> None:
    limits, peer = by_default(), "ipv4:10.0.0.1:1"
    limits.note_duration(peer, 0.000_05)
    assert not limits.is_costly(peer)
    limits.note_duration(peer, 0.01)
    assert limits.is_costly("ipv4:10.0.0.1:2"), "another connection of the address"
    assert not limits.is_costly("ipv4:10.0.0.2:1")
    limits.charge_peer(peer, 0.01)
    assert limits.is_costly(peer)
    limits.charge_peer(peer, 0.000_05)
    assert not limits.is_costly(peer), "it only waited for the processor"
