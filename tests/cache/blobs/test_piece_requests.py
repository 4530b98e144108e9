"""The requests of fills: every missing byte is asked for, and only right bytes are written."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import FetchError, ObjectChangedError
from penstock.cache.base import Answer, BlobSource, Folder, Segment, TrafficMeter
from penstock.cache.blobs import (
    BlobRequest,
    FillFailures,
    FillStoppedError,
    PieceRequests,
    Requester,
)
from penstock.cache.disk import PIECE_BYTES, BlobPieces, Fill

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.cache.blobs import BlobRange

RANGE_BYTES = 3 * PIECE_BYTES


def source(*sizes: int) -> BlobSource:
    segments = tuple(Segment(path=f"p{i}", size_bytes=s, version=None) for i, s in enumerate(sizes))
    return BlobSource(key="0" * 40, uri="mem://x", segments=segments, size_bytes=sum(sizes))


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


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=6).filter(any),
    here=st.sets(st.integers(0, 9)),
)
def test_all_that_is_missing_is_asked_for_and_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], here: set[int]
) -> None:
    blob, meter = source(*sizes), TrafficMeter()
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
        request.take(answer_of(request))
    assert fill.is_whole
    with open(fill.part, "rb") as file:
        assert file.read() == whole
    asked_bytes = sum(one.range.end - one.range.start for one in requests)
    assert missing_bytes <= asked_bytes == meter.snapshot().bytes_filled
    fill.close()


def test_another_object_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    blob = source(5 * PIECE_BYTES)
    fill = fill_of(tmp_path, blob)
    first, second = requests_of(blob, fill, TrafficMeter())
    first.take(answer_of(first))
    for wrong in (answer_of(second, version="w"), answer_of(second, object_bytes=7)):
        with pytest.raises(ObjectChangedError, match="mem://x: the object was replaced"):
            second.take(wrong)
    assert fill.missing([(0, 5)]) == [(3, 5)]
    second.take(answer_of(second, version=""))  # the blob's key says what it is
    assert fill.is_whole
    fill.close()


def test_a_stopped_fill_takes_nothing_more(tmp_path: Path) -> None:
    blob, stop = source(PIECE_BYTES), threading.Event()
    fill = fill_of(tmp_path, blob)
    pieces = PieceRequests(range_bytes=RANGE_BYTES, meter=TrafficMeter())
    (request,) = pieces.of(blob, fill, (0, 1), stop=stop)
    stop.set()
    with pytest.raises(FillStoppedError):
        request.take(answer_of(request))
    assert not fill.is_whole
    fill.close()


class Refusing:
    """An upstream that fails with one object. It keeps what it was asked for."""

    range_bytes, timeout_s = RANGE_BYTES, 5.0

    def __init__(self) -> None:
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
        raise FetchError("no", uri=self.uri("p1"))

    def reserve_fills(self, key: str, most: int) -> threading.Lock:
        del key, most
        raise AssertionError("not asked for here")

    def uri(self, path: str) -> str:
        return f"mem://{path}"


def test_a_failure_is_noted_for_the_pieces_that_it_cost(tmp_path: Path) -> None:
    blob, upstream, failures = source(10, 20, 30), Refusing(), FillFailures()
    fill = fill_of(tmp_path, blob)
    requester = Requester(upstream, failures)  # type: ignore[arg-type]
    requester.send([])
    assert not upstream.asked
    with pytest.raises(FetchError, match="no"):
        requester.send(requests_of(blob, fill, TrafficMeter()))
    assert len(upstream.asked) == 3
    for piece in range(3):
        found = failures.since(0.0, [(blob.key, [(piece, piece + 1)])])
        assert (found is not None) is (piece == 1)
    fill.close()
