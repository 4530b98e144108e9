"""Test the scheduler and its arithmetic without a network, on a clock that the test sets."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.cache.base import Failure, FetchPolicy, RequestError
from penstock.cache.fetch import (
    Attempt,
    Call,
    ConnectionBudget,
    Health,
    Hedging,
    Scheduler,
    StoreRequest,
    backoff_s,
    quantile,
)
from tests.properties import examples

POLICY = FetchPolicy(
    min_connections=2, start_connections=4, max_connections=4, max_attempts=3, retry_timeout_s=50.0
)


class Clocked:
    """A scheduler with a count of its wake-ups."""

    def __init__(self, policy: FetchPolicy = POLICY) -> None:
        self.wakeups = 0
        self.scheduler = Scheduler(policy, jitter=random.Random(3), changed=self._changed)

    def _changed(self) -> None:
        self.wakeups += 1


def call_of(
    count: int, *, urgent: bool = True, limit_s: float = 50.0, began_s: float = 100.0
) -> Call:
    requests = deque(
        StoreRequest(number=n, uri=f"test://{n}", run=int, size_bytes=10, may_hedge=urgent)
        for n in range(count)
    )
    return Call(
        deliver=lambda _number, _answer: None,
        urgent=urgent,
        unsent=requests,
        undelivered=count,
        began_s=began_s,
        began_round=0,
        limit_s=limit_s,
    )


def numbers(attempts: list[Attempt]) -> list[int]:
    return [attempt.request.number for attempt in attempts]


def test_as_many_as_there_are_connections_and_one_more_for_each_that_ends() -> None:
    clocked = Clocked()
    call = call_of(6)
    chosen, wait_s = clocked.scheduler.choose(call, 100.0)
    assert numbers(chosen) == [0, 1, 2, 3]
    assert 0 < wait_s <= 50.0
    assert clocked.scheduler.choose(call, 100.1)[0] == []
    assert clocked.scheduler.succeeded(call, chosen[1], 101.0, size_bytes=10, seconds=1.0)
    following = clocked.scheduler.delivered(call, chosen[1], 101.0, None)
    assert following is not None
    assert following[0] is call
    assert following[1].request.number == 4
    assert clocked.wakeups == 0  # the thread continues by itself
    assert call.undelivered == 5
    assert clocked.scheduler.budget.in_flight == 4


def test_who_came_first_gets_the_next_connection() -> None:
    clocked = Clocked()
    first, second = call_of(5, began_s=99.0), call_of(2, began_s=99.5)
    chosen, _ = clocked.scheduler.choose(first, 100.0)
    assert clocked.scheduler.choose(second, 100.0)[0] == []
    served = []
    for attempt in chosen[:3]:
        assert clocked.scheduler.succeeded(first, attempt, 101.0, size_bytes=10, seconds=1.0)
        served += [clocked.scheduler.delivered(first, attempt, 101.0, None)]
    assert [(each[0], each[1].request.number) for each in served if each is not None] == [
        (first, 4),
        (second, 0),
        (second, 1),
    ]
    assert clocked.wakeups == 0


def test_waiting_calls_are_notified_when_the_first_frees_connections() -> None:
    clocked = Clocked()
    busy = call_of(4, began_s=98.0)
    chosen, _ = clocked.scheduler.choose(busy, 100.0)
    first, second = call_of(1, began_s=99.0), call_of(1, began_s=99.5)
    assert not clocked.scheduler.choose(first, 100.0)[0]
    assert not clocked.scheduler.choose(second, 100.0)[0]
    for attempt in chosen[:3]:
        clocked.scheduler.failed(busy, attempt, 100.5, RequestError("missing", "gone"))
    before = clocked.wakeups
    assert not clocked.scheduler.choose(second, 100.6)[0]  # its thread happens to look first
    assert numbers(clocked.scheduler.choose(first, 100.6)[0]) == [0]
    assert clocked.wakeups == before + 1
    assert numbers(clocked.scheduler.choose(second, 100.6)[0]) == [0]


def test_who_comes_later_leaves_a_free_connection_to_who_waits() -> None:
    clocked = Clocked()
    first, second = call_of(5, began_s=99.0), call_of(1, began_s=99.5)
    chosen, _ = clocked.scheduler.choose(first, 100.0)
    clocked.scheduler.failed(first, chosen[0], 100.5, RequestError("transient", "cut"))
    assert clocked.scheduler.choose(second, 101.0)[0] == []
    assert numbers(clocked.scheduler.choose(first, 101.0)[0])  # its caller was notified
    clocked.scheduler.leave(first)
    for attempt in chosen[1:]:
        clocked.scheduler.end(first, attempt)
    assert numbers(clocked.scheduler.choose(second, 101.0)[0]) == [0]


def test_a_failed_request_is_tried_again_behind_its_pause_and_so_often() -> None:
    clocked = Clocked()
    call = call_of(1)
    now_s = 100.0
    for attempt in range(POLICY.max_attempts):
        (sent,), _ = clocked.scheduler.choose(call, now_s)
        assert sent.request.attempts == attempt + 1
        clocked.scheduler.failed(call, sent, now_s, RequestError("transient", "cut"))
        if call.retries:
            again_s = call.retries[0][0]
            assert clocked.scheduler.choose(call, again_s - 1e-6)[0] == []
            now_s = again_s
    assert "not fetched after 3 attempts" in str(call.error)
    assert clocked.scheduler.choose(call, now_s) == ([], 0.0)
    assert clocked.scheduler.budget.in_flight == 0


def test_a_call_that_has_had_its_time_fails_with_what_it_waits_for() -> None:
    clocked = Clocked()
    call = call_of(5, limit_s=2.0)
    clocked.scheduler.choose(call, 100.0)
    assert call.error is None
    assert clocked.scheduler.choose(call, 102.0) == ([], 0.0)
    assert "test://0: not fetched after 1 attempt in 2.0 s" in str(call.error)


def test_a_request_that_was_never_sent_says_how_long_it_waited() -> None:
    clocked = Clocked()
    call = call_of(5, limit_s=15.0)
    for attempt in clocked.scheduler.choose(call, 100.0)[0]:
        attempt.request.is_done = True  # by their hedges, so that only the fifth waits
        clocked.scheduler.failed(call, attempt, 101.0, RequestError("transient", "cut"))
    call.last_failure = RequestError("unreachable", "connection refused")
    clocked.scheduler.choose(call, 115.0)
    message = str(call.error)
    assert "test://4: not fetched in 15.0 s, because the server didn't answer" in message
    assert "(unreachable: connection refused)" in message


def test_the_twin_of_a_late_request_is_sent_once() -> None:
    clocked = Clocked()
    warm = call_of(40)
    ready, _ = clocked.scheduler.choose(warm, 100.0)
    now_s = 100.0
    while ready:
        sent = ready.pop()
        now_s += 0.001
        assert clocked.scheduler.succeeded(warm, sent, now_s, size_bytes=10, seconds=0.001)
        following = clocked.scheduler.delivered(warm, sent, now_s, None)
        ready += [following[1]] if following is not None else []
    call = call_of(1)
    (first,), wait_s = clocked.scheduler.choose(call, now_s)
    assert wait_s <= POLICY.hedge_floor_s + 1e-9
    (twin,), _ = clocked.scheduler.choose(call, now_s + wait_s)
    assert twin.is_hedge
    assert twin.request is first.request
    assert clocked.scheduler.choose(call, now_s + 1.0)[0] == []
    clocked.scheduler.failed(call, twin, now_s + 1.0, RequestError("transient", "cut"))
    assert not call.retries  # the first may still bring it
    assert clocked.scheduler.succeeded(call, first, now_s + 1.1, size_bytes=10, seconds=1.1)


def test_an_attempt_ends_once() -> None:
    clocked = Clocked()
    call = call_of(2)
    chosen, _ = clocked.scheduler.choose(call, 100.0)
    for _ in range(2):
        clocked.scheduler.end(call, chosen[0])
    assert clocked.scheduler.budget.in_flight == 1
    assert clocked.wakeups == 1


def test_hedges_keep_to_their_share_of_the_bytes_too() -> None:
    hedging = Hedging(POLICY, Health(POLICY))
    sizes = [1000] * 50 + [100] * 500
    for size_bytes in sizes:
        hedging.sent(size_bytes)
        hedging.succeeded(size_bytes, 0.001)
    call = call_of(0)
    for number in range(8):
        large = StoreRequest(number=number, uri="", run=int, size_bytes=1000, may_hedge=True)
        large.last_s, call.in_flight[number] = 100.0, large
    late = list(hedging.late(call, 200.0, most=8))
    assert sum(request.size_bytes for request in late) == 3000  # of 2 %, and one more
    assert hedging.due_s(call.in_flight[7]) is None


@given(
    steps=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.booleans(), st.booleans(), st.integers(1, 9)), max_size=40
    ),
    beside=st.integers(0, 6),
)
def test_fills_are_granted_no_more_than_they_need_and_batches_leave(
    steps: list[tuple[float, bool, bool, int]], beside: int
) -> None:
    policy = FetchPolicy(start_connections=8, max_connections=8)
    budget = ConnectionBudget(policy, Health(policy))
    budget.fills_beside_urgent = beside
    now_s, urgent_s = 100.0, -math.inf
    granted: list[int] = []
    for passed_s, urgent, ends, needed in steps:
        now_s += passed_s
        if urgent:
            budget.acquire(now_s, urgent=True)
            budget.in_flight -= 1
            urgent_s = now_s
        before = sum(granted)
        granted.append(budget.grant(now_s, needed))
        most = beside if now_s < urgent_s + 1.0 else 6
        assert granted[-1] == max(0, min(min(most, 6) - before, needed))
        if ends:
            budget.granted -= granted.pop()
    assert budget.in_flight == 0


@given(attempts=st.integers(0, 10_000), seed=st.integers(0, 100))
def test_a_pause_is_bounded(attempts: int, seed: int) -> None:
    policy = FetchPolicy()
    assert 0 <= backoff_s(policy, attempts, random.Random(seed)) <= policy.backoff_cap_s


@given(attempts=st.integers(0, 9), kind=st.sampled_from(("throttled", "transient")))
@pytest.mark.parametrize("after", [None, 7.0, 1000.0])
def test_a_request_is_tried_again_when_the_server_asks_for_it(
    attempts: int, kind: Failure, after: float | None
) -> None:
    policy = FetchPolicy()
    scheduler, call = Scheduler(policy, changed=lambda: None), call_of(1)
    call.unsent[0].attempts = attempts
    (sent,), _ = scheduler.choose(call, 100.0)
    scheduler.failed(call, sent, 100.0, RequestError(kind, "later", retry_after_s=after))
    pause_s = call.retries[0][0] - 100.0
    assert (after or 0) <= pause_s <= (after or 0) + policy.backoff_cap_s


@given(values=st.lists(st.floats(0, 100), min_size=1), share=st.floats(0, 1))
def test_a_quantile_is_passed_by_no_more_than_the_rest(values: list[float], share: float) -> None:
    found = quantile(sorted(values), share)
    assert found in values
    assert sum(value > found for value in values) <= (1 - share) * len(values) + 1e-9


@examples(50)
@given(times=st.lists(st.floats(1e-4, 10), min_size=0, max_size=300), size=st.integers(1, 10**9))
def test_late_is_later_than_the_usual(times: list[float], size: int) -> None:
    policy = FetchPolicy()
    recent = Hedging(policy, Health(policy))
    for seconds in times:
        recent.succeeded(size, seconds)
    late = recent.late_after_s(size)
    assert recent.late_after_s(size * 1000) is None  # another size is another matter
    if len(times) < policy.hedge_least:
        assert late is None
    else:
        assert late is not None
        assert late >= policy.hedge_floor_s
    mean, worst = recent.summary()
    assert mean <= worst or worst == pytest.approx(mean)


@examples(50)
@given(
    steps=st.lists(
        st.tuples(st.floats(0.001, 1), st.integers(0, 10**8), st.floats(0.001, 20), st.booleans()),
        max_size=300,
    )
)
def test_connections_stay_within_their_bounds(steps: list[tuple[float, int, float, bool]]) -> None:
    policy = FetchPolicy()
    budget = ConnectionBudget(policy, Health(policy))
    now = 100.0
    for passed, size, seconds, throttled in steps:
        now += passed
        before = budget.count
        if throttled:
            budget.throttled(now)
            assert budget.count <= before
        else:
            budget.succeeded(now, size_bytes=size, seconds=seconds)
        assert policy.min_connections <= budget.count <= policy.max_connections


@pytest.mark.parametrize(("busy", "grows"), [(0.9, True), (0.5, False)])
def test_connections_grow_if_nearly_all_are_busy_and_more_of_them_help(
    busy: float, grows: bool
) -> None:
    policy = FetchPolicy()
    budget = ConnectionBudget(policy, Health(policy))
    now = 0.0
    for _ in range(20_000):
        now += 0.1 / (busy * budget.count)  # every request takes 0.1 s
        budget.succeeded(now, size_bytes=2**20, seconds=0.1)
    assert budget.count == (policy.max_connections if grows else policy.start_connections)


def test_a_throttled_request_halves_the_connections_once_a_period() -> None:
    policy = FetchPolicy()
    budget = ConnectionBudget(policy, Health(policy))
    for now in (1000.0, 1000.1, 1000.2):
        budget.throttled(now)
    assert budget.count == policy.start_connections // 2
    for now in (2000.0, 3000.0, 4000.0):
        budget.throttled(now)
    assert budget.count == policy.min_connections


def test_a_full_link_ends_the_growth() -> None:
    """More connections slow each other down: the total is always 100 MB/s."""
    policy = FetchPolicy(start_connections=8)
    budget = ConnectionBudget(policy, Health(policy))
    now = 0.0
    for _ in range(3000):
        now += 0.01
        budget.succeeded(now, size_bytes=10**6, seconds=0.01 * budget.count)
    assert budget.count < 16


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
