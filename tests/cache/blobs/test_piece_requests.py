"""Test the requests of fills: each missing byte is requested once, together with adjacent bytes if
that saves requests, and a failed fetch ends all who wait for it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import FetchError, ObjectChangedError, PenstockError, StalledError
from penstock.cache.base import (
    Answer,
    BlobSource,
    BlobSpans,
    FetchPolicy,
    Folder,
    RequestError,
    Segment,
    TrafficMeter,
    blob_key,
)
from penstock.cache.blobs import BlobRequest, FillFailures, PieceRequests, Remote, Upstream
from penstock.cache.disk import PIECE_BYTES, BlobPieces, DiskCache, Fill
from penstock.cache.fetch import Fetcher
from tests.cache.blobs.remotes import SIZES, content, single
from tests.cache.peers.serving import source
from tests.properties import examples
from tests.stores import MemoryStore
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.cache.blobs import BlobRange


RANGE_BYTES = 3 * PIECE_BYTES


def fill_of(folder: Path, blob: BlobSource) -> Fill:
    return Fill.make(Folder.at(str(folder)), "x", BlobPieces(blob))


def requests_of(blob: BlobSource, fill: Fill, meter: TrafficMeter) -> list[BlobRequest]:
    pieces = PieceRequests(range_bytes=RANGE_BYTES, meter=meter)
    return [one for span in pieces.ranges(fill) for one in pieces.of(blob, fill, span)]


def answer_of(request: BlobRequest, *, version: str = "v", object_bytes: int = -1) -> Answer:
    one = request.range
    size_bytes = one.segment.whole_bytes if object_bytes < 0 else object_bytes
    data = bytes(n % 251 for n in range(one.start, one.end))
    return Answer(data=data, version=version, object_bytes=size_bytes)


@examples(60)
@given(
    sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=6).filter(any),
    here=st.sets(st.integers(0, 9)),
)
def test_all_that_is_missing_is_asked_for_and_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], here: set[int]
) -> None:
    blob, meter = source("x", *sizes), TrafficMeter()
    fill = fill_of(tmp_path_factory.mktemp("fill"), blob)
    whole = bytes(n % 251 for n in range(blob.size_bytes))
    for piece in here:
        if piece < fill.pieces.count:
            start, end = fill.pieces.span((piece, piece + 1))
            fill.write((piece, piece + 1), memoryview(whole[start:end]))
    missing_bytes = fill.missing_bytes()
    requests = requests_of(blob, fill, meter)
    for request in requests:
        one = request.range
        assert one.end - one.start == one.stored.end - one.stored.start > 0
        assert one.stored.path == one.segment.path
        assert one.end - one.start <= (RANGE_BYTES if len(sizes) == 1 else 40_000)
        request.receive(answer_of(request))
    assert fill.is_whole
    with open(fill.part, "rb") as file:
        assert file.read() == whole
    asked_bytes = sum(one.range.end - one.range.start for one in requests)
    assert missing_bytes <= asked_bytes == meter.snapshot().bytes_filled
    fill.close()


def test_another_object_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    blob = source("x", 5 * PIECE_BYTES)
    fill = fill_of(tmp_path, blob)
    first, second = requests_of(blob, fill, TrafficMeter())
    first.receive(answer_of(first))
    for wrong in (answer_of(second, version="w"), answer_of(second, object_bytes=7)):
        with pytest.raises(ObjectChangedError, match="memory://x: the object was replaced"):
            second.receive(wrong)
    assert fill.missing([(0, 5)]) == [(3, 5)]
    second.receive(answer_of(second, version=""))  # the blob's key identifies it
    assert fill.is_whole
    fill.close()


def test_a_stopped_fill_takes_nothing_more(tmp_path: Path) -> None:
    blob, stop = source("x", PIECE_BYTES), threading.Event()
    fill = fill_of(tmp_path, blob)
    pieces = PieceRequests(range_bytes=RANGE_BYTES, meter=TrafficMeter())
    (request,) = pieces.of(blob, fill, (0, 1), stop=stop)
    stop.set()
    with pytest.raises(StalledError, match="stopped"):
        request.receive(answer_of(request))
    assert not fill.is_whole
    fill.close()


class Refusing(Upstream):
    """An upstream that fails with one object. It keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(Fetcher(MemoryStore({})))
        self.asked: list[BlobRange] = []

    def fetch(
        self,
        ranges: Sequence[BlobRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        del deliver, urgent
        self.asked += ranges
        raise FetchError("no", uri=self.uri("x-1"))

    def uri(self, path: str) -> str:
        return f"mem://{path}"


def test_a_failure_is_noted_for_the_pieces_that_it_cost(tmp_path: Path) -> None:
    blob, upstream = source("x", 10, 20, 30), Refusing()
    fill = fill_of(tmp_path, blob)
    upstream.send([])
    assert not upstream.asked
    with pytest.raises(FetchError, match="no"):
        upstream.send(requests_of(blob, fill, TrafficMeter()))
    assert len(upstream.asked) == 3
    for piece in range(3):
        found = upstream.failures.since(0.0, [(blob.key, [(piece, piece + 1)])])
        assert (found is not None) is (piece == 1)
    fill.close()


MOST = 16  # pieces of a request


@examples(60)
@given(
    count=st.integers(1, 80),
    here=st.sets(st.integers(0, 79)),
    wanted=st.sets(st.integers(0, 79), min_size=1),
    times=st.integers(1, 5),
)
def test_all_that_is_waited_for_is_asked_for_once_and_little_more(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    here: set[int],
    wanted: set[int],
    times: int,
) -> None:
    fill = fill_of(tmp_path_factory.mktemp("fill"), source("x", count * PIECE_BYTES))
    fill.marks[[piece for piece in here if piece < count]] = 1
    pieces = PieceRequests(range_bytes=MOST * PIECE_BYTES, meter=TrafficMeter())
    asked = [(piece, piece + 1) for piece in sorted(wanted) if piece < count]
    missing = fill.missing(asked)
    found = list(pieces.widened(fill, missing, times=times))
    wide = [piece for (low, high), _ in found for piece in range(low, high)]
    exact = [piece for _, some in found for low, high in some for piece in range(low, high)]
    assert len(set(wide)) == len(wide) <= max(1, 2 * times) * max(1, len(exact))
    assert exact == [low for low, high in missing for low in range(low, high)]
    assert set(exact) <= set(wide)
    assert not here & set(wide)
    assert all(high - low <= MOST for (low, high), _ in found)
    if times == 1:
        assert wide == exact
    fill.close()


def spans(remote: Remote, store: MemoryStore, number: int, *starts: int) -> BlobSpans:
    blob = remote.open(single(store, number))
    return BlobSpans(blob=blob, starts=starts, ends=[start + 5000 for start in starts])


def test_neighbours_come_with_what_a_batch_waits_for(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote, data = remotes(store), content(store, single(store, 0))
    remote.fills.widening = 4
    for start in range(0, SIZES[0] - 5000, 5000):
        ((found,),) = remote.load([spans(remote, store, 0, start)])
        assert bytes(found) == data[start : start + 5000]
    assert len(store.reads) <= SIZES[0] / 5000 / 2.5
    assert store.bytes_read <= SIZES[0]


def test_a_load_waits_for_pieces_that_its_process_fetches_however_slowly(
    store: MemoryStore, remotes: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cache.blobs.blob_fills.BlobFills.others_s", 0.0)
    remote, began, go_on, asked = remotes(store), threading.Event(), threading.Event(), []

    def before(path: str, span: object) -> None:
        asked.append((path, span))
        began.set()
        assert go_on.wait(PATIENCE_S)

    store.before = before
    rounds = threading.Semaphore(0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(remote.load, [spans(remote, store, 0, 0)])
        assert began.wait(PATIENCE_S)
        missing = Fill.missing

        def counted(self: Fill, asked: list[tuple[int, int]]) -> list[tuple[int, int]]:
            rounds.release()
            return missing(self, asked)

        monkeypatch.setattr(Fill, "missing", counted)
        second = pool.submit(remote.load, [spans(remote, store, 0, 0)])
        for _ in range(3):
            assert rounds.acquire(timeout=PATIENCE_S)
        go_on.set()
        assert first.result(PATIENCE_S)[0][0].tobytes() == second.result(PATIENCE_S)[0][0].tobytes()
    assert len(asked) == 1


def test_pieces_that_another_process_claims_for_too_long_are_fetched_twice(
    store: MemoryStore, remotes: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cache.blobs.blob_fills.BlobFills.others_s", 0.0)
    remote = remotes(store)
    wanted = spans(remote, store, 0, 0)
    fill = wanted.blob.fill  # type: ignore[attr-defined]
    claims = fill.claims()
    assert claims.lock(0, 2)
    ((found,),) = remote.load([wanted])
    claims.close()
    assert bytes(found) == content(store, single(store, 0))[:5000]


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
