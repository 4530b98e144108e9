"""Who waits for another's fetch ends as that one does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.cache import FetchError, PenstockError
from penstock.cache.base import BlobSource, BlobSpans, FetchPolicy, RequestError, Segment, blob_key
from penstock.cache.blobs import FillFailures, Remote
from penstock.cache.disk import DiskCache
from penstock.cache.fetch import Fetcher
from tests.stores import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

READERS = 8


def test_all_who_wait_get_the_error_of_the_one_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request in all, though eight readers want its bytes; none ends as stalled."""
    store = MemoryStore({"x": bytes(300_000)})
    source = BlobSource(
        key=blob_key(scope="", uri="x", version="1"),
        uri=f"{store.url}/x",
        segments=(Segment(path="x", size_bytes=300_000, version=None),),
        size_bytes=300_000,
    )
    asked, go_on = threading.Event(), threading.Event()

    def before(_path: str, _span: tuple[int, int] | None) -> None:
        asked.set()
        assert go_on.wait(60)
        raise RequestError("denied", "not yours")

    store.before = before
    fetcher = Fetcher(store, policy=FetchPolicy(retry_timeout_s=60.0))
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    remote = Remote(fetcher, cache, group="g", label="mem://set")
    blob = remote.open(source)
    waiting = threading.Semaphore(0)
    seen: set[int] = set()
    raised: list[BaseException] = []

    def read() -> None:
        try:
            remote.load([BlobSpans(blob=blob, starts=[5], ends=[5000])])
        except PenstockError as error:
            raised.append(error)

    first = threading.Thread(target=read)
    first.start()
    assert asked.wait(60)
    # Each other one has found the pieces claimed, and looks whether their fetch has failed.
    original = FillFailures.since

    def since(failures: FillFailures, *args: Any) -> FetchError | None:
        found = original(failures, *args)
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            waiting.release()
        return found

    monkeypatch.setattr(FillFailures, "since", since)
    others = [threading.Thread(target=read) for _ in range(READERS - 1)]
    for other in others:
        other.start()
    for _ in others:
        assert waiting.acquire(timeout=60)
    go_on.set()
    for thread in (first, *others):
        thread.join(60)
    assert [type(error) for error in raised] == [FetchError] * READERS
    assert len({id(error) for error in raised}) == READERS
    assert {str(error) for error in raised} == {str(raised[0])}
    assert "not yours" in str(raised[0])
    assert fetcher.meter.snapshot().requests == 1
    remote.close()
    cache.close()


def test_a_failure_is_of_its_pieces_and_of_its_time() -> None:
    failures = FillFailures()
    assert failures.since(0.0, [("a", [(0, 100)])]) is None
    failures.note([("a", (10, 20)), ("b", (0, 1))], FetchError("no", uri="u", missing=True))
    for wanted, hit in (
        ([("a", [(0, 10)])], False),
        ([("a", [(20, 30)])], False),
        ([("a", [(0, 5), (19, 30)])], True),
        ([("c", [(0, 100)])], False),
        ([("c", [(0, 100)]), ("b", [(0, 4)])], True),
        ([("a", [])], False),
    ):
        found = failures.since(0.0, wanted)
        assert (found is not None) is hit
        if found is not None:
            assert (str(found), found.uri, found.missing) == ("no", "u", True)
        assert failures.since(float("inf"), wanted) is None
