"""Test how processes exchange values through a store of torch's, and wait for them."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from penstock.cache import JobStore, JobStoreError
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
def test_a_wait_that_times_out_returns_the_missing_keys(
    store: JobStore, timeout_s: float, capfd: pytest.CaptureFixture[str]
) -> None:
    store.set("a", "1")
    assert store.wait(["a", "b", "c"], timeout_s=timeout_s) == ["b", "c"]
    assert capfd.readouterr().err == ""  # torch's own wait complains there


def test_a_wait_ends_with_the_last_key(store: JobStore) -> None:
    setter = threading.Thread(target=store.set, args=("a", "1"))
    setter.start()
    assert store.wait(["a"], timeout_s=30.0) == []
    setter.join()


def test_an_interrupt_ends_a_wait_and_the_store_still_answers(store: JobStore) -> None:
    def look() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        store.wait(["a"], timeout_s=PATIENCE_S, look=look)
    assert store.get("a") is None


def test_other_threads_use_the_store_while_one_waits(store: JobStore) -> None:
    waits = threading.Event()
    waiter = threading.Thread(
        target=lambda: store.wait(["a"], timeout_s=PATIENCE_S, look=waits.set)  # type: ignore[arg-type]
    )
    waiter.start()
    assert waits.wait(PATIENCE_S)
    store.set("a", "1")
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


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
        lambda: store.wait(["a"], timeout_s=1.0),
        lambda: store.get_all(["a"]),
    ):
        with pytest.raises(JobStoreError, match=r"reset by peer.*look at rank 0"):
            ask()
