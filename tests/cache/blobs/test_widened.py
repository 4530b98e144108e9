"""What batches wait for, with what lies beside it: fewer requests, and each byte still once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.base import BlobSpans, TrafficMeter
from penstock.cache.blobs import PieceRequests
from penstock.cache.disk import PIECE_BYTES, Fill
from tests.cache.blobs.remotes import SIZES, content, single
from tests.cache.blobs.test_piece_requests import fill_of, source
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from penstock.cache.blobs import Remote
    from tests.stores import MemoryStore

MOST = 16  # pieces of a request


@settings(max_examples=60)
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
    fill = fill_of(tmp_path_factory.mktemp("fill"), source(count * PIECE_BYTES))
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
    remote.widening = 4
    for start in range(0, SIZES[0] - 5000, 5000):
        ((found,),) = remote.load([spans(remote, store, 0, start)])
        assert bytes(found) == data[start : start + 5000]
    assert len(store.reads) <= SIZES[0] / 5000 / 2.5
    assert store.bytes_read <= SIZES[0]


def test_a_load_waits_for_pieces_that_its_process_fetches_however_slowly(
    store: MemoryStore, remotes: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cache.blobs.blob_fills.DemandFills.others_s", 0.0)
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
    monkeypatch.setattr("penstock.cache.blobs.blob_fills.DemandFills.others_s", 0.0)
    remote = remotes(store)
    wanted = spans(remote, store, 0, 0)
    fill = wanted.blob.fill  # type: ignore[attr-defined]
    claims = fill.claims()
    assert claims.claim((0, 2))
    ((found,),) = remote.load([wanted])
    claims.close()
    assert bytes(found) == content(store, single(store, 0))[:5000]
