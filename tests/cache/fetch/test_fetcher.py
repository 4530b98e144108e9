"""Test the fetcher with a scripted store: retries, hedges, limits and the end, in bounded time."""

from __future__ import annotations

import threading

import pytest

from penstock.cache import ClosedError, FetchError
from penstock.cache.base import Answer, FetchPolicy, RequestError
from penstock.cache.fetch import Fetcher
from tests.cache.fetch.scripted import QUICK, Scripted, answer, collect, numbered


def test_a_late_request_is_sent_twice_and_the_first_answer_wins() -> None:
    stuck = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if path == "150" and store.calls[path] == 1:
            assert stuck.wait(30)
        return answer(path, span)

    store = Scripted(act)
    fetcher = Fetcher(store, policy=QUICK)
    assert len(collect(fetcher, numbered(151))) == 151
    assert store.calls["150"] == 2
    assert fetcher.meter.snapshot().hedges >= 1  # of others too, on a machine that is slow
    stuck.set()
    fetcher.close()
    traffic = fetcher.meter.snapshot()
    assert traffic.bytes_remote == (151 + traffic.hedges) * 10  # the loser's came too


def test_hedges_keep_to_their_share() -> None:
    stuck = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if int(path) >= 100:
            stuck.wait(0.5)
        return answer(path, span)

    fetcher = Fetcher(Scripted(act), policy=QUICK)
    collect(fetcher, numbered(130))
    traffic = fetcher.meter.snapshot()
    assert 1 <= traffic.hedges <= QUICK.max_hedge_share * traffic.requests + 1
    stuck.set()
    fetcher.close()


def test_an_exception_of_deliver_stops_the_rest_and_is_raised() -> None:
    fetcher = Fetcher(Scripted(answer), policy=QUICK)

    def deliver(number: int, answer: Answer) -> None:
        del answer
        if number == 3:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fetcher.fetch(numbered(500), deliver)
    assert collect(fetcher, numbered(5)) == [bytes(10)] * 5
    fetcher.close()


def test_nothing_is_delivered_after_fetch_has_raised() -> None:
    go_on = threading.Event()
    arrived = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if path == "0":
            arrived.set()
            assert go_on.wait(30)
        elif path == "5":
            assert arrived.wait(30)
            raise RequestError("denied", "no")
        return answer(path, span)

    delivered: list[int] = []
    fetcher = Fetcher(Scripted(act), policy=QUICK)
    with pytest.raises(FetchError, match="denied"):
        fetcher.fetch(numbered(6), lambda number, _: delivered.append(number))
    known = list(delivered)
    go_on.set()
    fetcher.close()
    assert delivered == known
    assert 0 not in delivered


def test_a_mistake_in_a_store_surfaces() -> None:
    def act(path: str, span: tuple[int, int] | None) -> Answer:
        raise ZeroDivisionError(path, span)

    fetcher = Fetcher(Scripted(act), policy=QUICK)
    with pytest.raises(ZeroDivisionError):
        collect(fetcher, numbered(3))
    fetcher.close()


def test_total_failure_ends_within_its_time() -> None:
    stuck = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        stuck.wait(30)
        return answer(path, span)

    fetcher = Fetcher(Scripted(act), policy=FetchPolicy(retry_timeout_s=0.2))
    with pytest.raises(FetchError, match="no answer came"):
        collect(fetcher, numbered(100))
    stuck.set()
    fetcher.close()


def test_retry_after_is_waited_for() -> None:
    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if store.calls[path] == 1:
            raise RequestError("throttled", "slow down", retry_after_s=100.0)
        return answer(path, span)

    store = Scripted(act)
    fetcher = Fetcher(store, policy=FetchPolicy(retry_timeout_s=0.3))
    with pytest.raises(FetchError, match="slow down"):
        collect(fetcher, numbered(1))
    assert store.calls["0"] == 1  # it was not tried before its time
    fetcher.close()


def test_a_fill_leaves_connections_to_who_is_waiting() -> None:
    stuck = threading.Event()
    filling = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if path.isdigit() and not stuck.is_set():
            filling.set()
            assert stuck.wait(30)
        return answer(path, span)

    fetcher = Fetcher(Scripted(act), policy=QUICK)
    fill = threading.Thread(target=collect, args=(fetcher, numbered(200)), kwargs={"urgent": False})
    fill.start()
    assert filling.wait(30)
    fetcher.fetch_object("urgent")  # comes through while every connection of the fill is stuck
    stuck.set()
    fill.join(30)
    assert not fill.is_alive()
    fetcher.close()


def test_many_callers_share_the_connections() -> None:
    lock = threading.Lock()
    now = peak = 0

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        nonlocal now, peak
        with lock:
            now += 1
            peak = max(peak, now)
        found = answer(path, span)
        with lock:
            now -= 1
        return found

    policy = FetchPolicy(min_connections=2, start_connections=4, max_connections=6)
    fetcher = Fetcher(Scripted(act), policy=policy)
    callers = [threading.Thread(target=collect, args=(fetcher, numbered(100))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert fetcher.meter.snapshot().requests >= 800
    assert peak <= 6 + 8  # and the hedges
    fetcher.close()


def test_close_ends_who_waits_and_the_threads() -> None:
    stuck = threading.Event()
    started = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        started.set()
        stuck.wait(30)
        return answer(path, span)

    store = Scripted(act)
    fetcher = Fetcher(store, policy=QUICK)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            collect(fetcher, numbered(5))
        except ClosedError as error:
            raised.append(error)
            stuck.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert started.wait(30)
    fetcher.close()
    fetcher.close()
    waiting.join(30)
    assert len(raised) == 1
    assert store.closed >= 1
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-fetch")]
    with pytest.raises(ClosedError):
        fetcher.fetch_object("x")


def test_a_walk_that_fails_continues_where_it_was() -> None:
    failures = iter([True, False, True, True, False, False, True] + [False] * 50)

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if next(failures):
            raise RequestError("transient", "cut")
        return answer(path, span)

    fetcher = Fetcher(Scripted(act), policy=QUICK)
    assert [info.path for info in fetcher.walk()] == [str(number) for number in range(2500)]
    fetcher.put("local", "path")
    assert fetcher.list_folder() == ([], ["x"])
    fetcher.close()


def test_no_thread_before_the_first_request_and_none_for_no_spans() -> None:
    before = threading.active_count()
    fetcher = Fetcher(Scripted(answer), policy=QUICK)
    fetcher.fetch([], lambda *_: None)
    assert threading.active_count() == before
    assert fetcher.request_time() == (0.0, 0.0)
    fetcher.close()


def test_the_process_has_no_stray_threads() -> None:
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-")]
