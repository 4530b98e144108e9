"""Test how processes exchange values through a store of torch's, and wait for them."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from penstock.cache import (
    Barrier,
    JobStore,
    JobStoreError,
    RankFailedError,
    StalledError,
    format_ranks,
)
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("hash", "file", "tcp", "prefix")


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> JobStore:
    if request.param == "file":
        return JobStore.of(dist.FileStore(str(tmp_path / "store"), 1))  # type: ignore[attr-defined]
    kept: Any = dist.HashStore()  # type: ignore[attr-defined]
    if request.param == "tcp":
        kept = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    if request.param == "prefix":
        kept = dist.PrefixStore("quorum 3", kept)  # type: ignore[attr-defined]
    return JobStore.of(kept)


def test_get_returns_what_was_set(store: JobStore) -> None:
    assert store.get("a") is None
    store.set("a", "1")
    store.set("a", "é 2")
    assert store.get("a") == "é 2"
    assert store.under("x").get("a") is None
    assert [store.set_once("b", "mine"), store.set_once("b", "yours")] == ["mine", "mine"]
    assert [store.add("n", 2), store.add("n", 3), store.add("n", 0)] == [2, 5, 5]
    assert store.get_all(["a", "b"]) == ["é 2", "mine"]


@pytest.mark.parametrize("timeout_s", [0.0, 1e-5, 0.003])
def test_a_wait_that_times_out_returns_nothing(
    store: JobStore, timeout_s: float, capfd: pytest.CaptureFixture[str]
) -> None:
    store.set("a", "1")
    assert store.wait("b", timeout_s=timeout_s) is None
    assert capfd.readouterr().err == ""  # torch's own wait complains there


def test_a_wait_ends_with_the_key(store: JobStore) -> None:
    setter = threading.Thread(target=store.set, args=("a", "1"))
    setter.start()
    assert store.wait("a", timeout_s=30.0) == "1"
    setter.join()


def test_an_interrupt_ends_a_wait_and_the_store_still_answers(store: JobStore) -> None:
    def look() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        store.wait("a", timeout_s=PATIENCE_S, look=look)
    assert store.get("a") is None


def test_other_threads_use_the_store_while_one_waits(store: JobStore) -> None:
    waits = threading.Event()
    waiter = threading.Thread(target=lambda: store.wait("a", timeout_s=PATIENCE_S, look=waits.set))
    waiter.start()
    assert waits.wait(PATIENCE_S)
    store.set("a", "1")
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


def test_notices_are_read_by_number_and_replaced(store: JobStore) -> None:
    assert store.notices("n") == {}
    assert [store.post("n", text) for text in ("a", "b", "c")] == [1, 2, 3]
    store.set("n-2", "B")
    store.set("n-3", "")
    store.add("n", 1)  # a process that will write its notice next
    assert store.notices("n") == {1: "a", 2: "B"}


def test_a_thousand_notices_take_three_requests() -> None:
    kept = dist.HashStore()  # type: ignore[attr-defined]
    for number in range(1024):
        JobStore(kept).post("n", str(number))
    asked: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(kept, name)

    assert len(JobStore(Counted()).notices("n")) == 1024
    assert len(asked) == 3


def barrier(store: JobStore, process: int, *, processes: int = 6) -> Barrier:
    return Barrier(store=store, process=process, processes=processes, purpose="to begin")


def test_all_get_what_process_0_decides_once(store: JobStore) -> None:
    asked: list[list[str]] = []

    def choose(texts: list[str]) -> dict[str, Any]:
        asked.append(texts)
        return {"text": "x"}

    def decide(process: int) -> dict[str, Any]:
        one = barrier(store, process)
        return one.decide(str(process), choose, timeout_s=PATIENCE_S)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(decide, range(6))) == [{"text": "x"}] * 6
    assert asked == [["0", "1", "2", "3", "4", "5"]]


def test_who_does_not_come_is_named(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cache.channel.ANSWER_SPARE_S", 0.0)
    for process in (1, 4):
        barrier(store, process).arrive()
    with pytest.raises(StalledError, match=r"^Rank 0 of 6 waited .*ranks 2 to 3 and 5 to begin"):
        barrier(store, 0).decide("", dict, timeout_s=0.05)
    with pytest.raises(StalledError, match=r"for ranks 0 and 2 to 5 to begin"):
        barrier(store.under("x"), 1).decide("", dict, timeout_s=0.05)


def test_what_look_raises_ends_a_wait(store: JobStore) -> None:
    def look() -> None:
        raise RankFailedError("Rank 3 failed", rank=3)

    with pytest.raises(RankFailedError):
        barrier(store, 0).wait_for_all(timeout_s=PATIENCE_S, look=look)
    with pytest.raises(RankFailedError):
        barrier(store, 1).decide("", dict, timeout_s=PATIENCE_S, look=look)


def test_ranks_are_listed_in_runs() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5]) == "ranks 0 to 2 and 5"
    assert format_ranks(range(0, 100, 2)).endswith("and others")


def test_a_store_that_does_not_answer_raises_a_job_store_error() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: object) -> None:
                raise RuntimeError("Connection reset by peer")

            return fail

    store = JobStore(Gone())
    for ask in (
        lambda: store.get("a"),
        lambda: store.set_once("a", "1"),
        lambda: store.wait("a", timeout_s=1.0),
        lambda: store.get_all(["a"]),
    ):
        with pytest.raises(JobStoreError, match=r"reset by peer.*look at rank 0"):
            ask()
