"""Pauses, quantiles, the number of connections, and when a remote is gone: pure arithmetic."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.cache.base import FetchPolicy
from penstock.cache.fetch import ConnectionLimit, Health, RequestTimes, backoff_s, quantile


@given(
    attempts=st.integers(0, 10_000),
    seed=st.integers(0, 100),
    throttled=st.booleans(),
    after=st.none() | st.floats(0, 1000),
)
def test_a_pause_is_bounded_and_never_before_retry_after(
    attempts: int, seed: int, throttled: bool, after: float | None
) -> None:
    policy = FetchPolicy()
    pause = backoff_s(
        policy, attempts, random.Random(seed), throttled=throttled, retry_after_s=after
    )
    assert (after or 0) <= pause <= (after or 0) + policy.backoff_cap_s


@given(values=st.lists(st.floats(0, 100), min_size=1), share=st.floats(0, 1))
def test_a_quantile_is_passed_by_no_more_than_the_rest(values: list[float], share: float) -> None:
    found = quantile(sorted(values), share)
    assert found in values
    assert sum(value > found for value in values) <= (1 - share) * len(values) + 1e-9


@settings(max_examples=50)
@given(times=st.lists(st.floats(1e-4, 10), min_size=0, max_size=300), size=st.integers(1, 10**9))
def test_late_is_later_than_the_usual(times: list[float], size: int) -> None:
    policy = FetchPolicy()
    recent = RequestTimes(policy)
    for seconds in times:
        recent.add(size, seconds)
    late = recent.late_after_s(size)
    assert recent.late_after_s(size * 1000) is None  # another size is another matter
    if len(times) < policy.hedge_least:
        assert late is None
    else:
        assert late is not None
        assert late >= policy.hedge_floor_s
    mean, worst = recent.summary()
    assert mean <= worst or worst == pytest.approx(mean)


@settings(max_examples=50)
@given(
    steps=st.lists(
        st.tuples(st.floats(0.001, 1), st.integers(0, 10**8), st.floats(0.001, 20), st.booleans()),
        max_size=300,
    )
)
def test_connections_stay_within_their_bounds(steps: list[tuple[float, int, float, bool]]) -> None:
    policy = FetchPolicy()
    connections = ConnectionLimit(policy)
    now = 100.0
    for passed, size, seconds, throttled in steps:
        now += passed
        before = connections.count
        if throttled:
            connections.throttled(now)
            assert connections.count <= before
        else:
            connections.done(now, size_bytes=size, seconds=seconds)
        assert policy.min_connections <= connections.count <= policy.max_connections


@pytest.mark.parametrize(
    ("rate", "request_s", "wanted"), [(50.0, 0.1, 8), (200.0, 0.1, 25), (400.0, 0.1, 50)]
)
def test_a_steady_consumer_gets_a_quarter_more_than_it_needs(
    rate: float, request_s: float, wanted: int
) -> None:
    """Requests a second times seconds a request, by Little's law, and a quarter."""
    connections = ConnectionLimit(FetchPolicy(standing_connections=8))
    now = 0.0
    for _ in range(20_000):
        now += max(1 / rate, request_s / connections.count)
        connections.done(now, size_bytes=2**20, seconds=request_s)
    assert connections.count == pytest.approx(wanted, abs=5)


def test_a_pause_costs_no_connections_that_a_burst_needs() -> None:
    policy = FetchPolicy()
    connections = ConnectionLimit(policy)
    for number in range(5000):  # a request now and then
        connections.done(0.1 * number, size_bytes=2**20, seconds=0.05)
    assert connections.count == policy.standing_connections
    connections.throttled(1000.0)
    connections.throttled(2000.0)
    connections.throttled(3000.0)
    assert connections.count == policy.min_connections


def test_a_full_link_ends_the_growth() -> None:
    """More connections make each slower: 100 MB/s in all, whatever their number."""
    connections = ConnectionLimit(FetchPolicy(start_connections=8))
    now = 0.0
    for _ in range(3000):
        now += 0.01
        connections.done(now, size_bytes=10**6, seconds=0.01 * connections.count)
    assert connections.count < 32


def test_a_failing_remote_gets_probes_and_one_success_opens_the_way() -> None:
    policy = FetchPolicy()
    health = Health(policy)
    jitter = random.Random(0)
    for _ in range(Health.GONE_AFTER - 1):
        health.failure(0.0, jitter)
    assert health.may_start_s(0.0, 1000) == 0
    for _ in range(50):  # all at one moment: one pause, not fifty
        health.failure(0.0, jitter)
    assert health.is_gone
    pause = health.may_start_s(0.0, 0)
    assert 0 < pause <= 2 * policy.backoff_base_s
    assert health.may_start_s(pause, 1) == 0
    assert health.may_start_s(pause, policy.probes) == float("inf")
    health.success(pause)
    assert health.may_start_s(pause, 1000) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"retry_timeout_s": 0},
        {"read_timeout_s": -1.0},
        {"max_attempts": 0},
        {"min_connections": 0},
        {"min_connections": 80},
    ],
)
def test_nonsense_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="got"):
        FetchPolicy(**wrong)
