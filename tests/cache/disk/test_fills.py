"""Test fills: blobs are cut into pieces, pieces are marked, and other processes read the marks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.base import BlobSource, Folder, Segment
from penstock.cache.disk import (
    BLOCK_BYTES,
    OBJECTS_AT_ONCE,
    PIECE_BYTES,
    BlobPieces,
    Fill,
    bridge_gaps,
    crcs_of,
    discard_fill,
    merge_spans,
)
from tests.cache.peers.serving import source
from tests.properties import examples

if TYPE_CHECKING:
    from pathlib import Path


def make(tmp_path: Path, blob: BlobSource) -> Fill:
    return Fill.make(Folder.at(str(tmp_path)), "x", BlobPieces(blob))


@examples(150)
@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=8),
    spans=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6),
)
def test_pieces_cover_spans_and_little_more(
    sizes: list[int], spans: list[tuple[float, float]]
) -> None:
    blob = source("x", *sizes)
    pieces = BlobPieces(blob)
    size = blob.size_bytes
    cuts = [tuple(sorted((int(a * size), int(b * size)))) for a, b in spans]
    runs = pieces.covering([a for a, _ in cuts], [b for _, b in cuts])
    there = np.zeros(size, bool)
    for low, high in runs:
        assert 0 <= low < high <= pieces.count
        a, b = pieces.span((low, high))
        there[a:b] = True
    for a, b in cuts:
        assert there[a:b].all()
    assert runs == merge_spans(runs)
    if len(sizes) == 1:
        wanted = sum(b - a for a, b in cuts)
        assert there.sum() <= wanted + 2 * PIECE_BYTES * len(cuts)
    whole = pieces.span((0, pieces.count))
    assert whole == (0, size)


@examples(100)
@given(marks=st.lists(st.booleans(), min_size=1, max_size=60), waste=st.integers(0, 20))
def test_missing_runs_and_bridges(
    tmp_path_factory: pytest.TempPathFactory, marks: list[bool], waste: int
) -> None:
    folder = tmp_path_factory.mktemp("fill")
    fill = make(folder, source("x", len(marks) * PIECE_BYTES))
    fill.marks[:] = np.array(marks, np.uint8)
    missing = fill.missing([(0, len(marks))])
    gone = np.ones(len(marks), bool)
    for low, high in missing:
        assert low < high
        gone[low:high] = False
    assert gone.tolist() == marks
    assert fill.is_whole == all(marks)
    joined = bridge_gaps(missing, waste=waste)
    again = np.zeros(len(marks), bool)
    for low, high in joined:
        again[low:high] = True
    assert not (again & ~gone).sum() < (~gone).sum()  # every missing piece is in
    assert (again & gone).sum() <= waste
    assert len(joined) <= len(missing)
    fill.close()


def test_writing_marks_and_reopening_continues(tmp_path: Path) -> None:
    blob = source("x", 3 * PIECE_BYTES + 5)
    fill = make(tmp_path, blob)
    fill.write((1, 2), memoryview(b"a" * PIECE_BYTES))
    fill.write((3, 4), memoryview(b"b" * 5))
    assert fill.agree("v1")
    fill.close()
    again = Fill(Folder.at(str(tmp_path)), "x", BlobPieces(blob))
    assert again.missing([(0, 4)]) == [(0, 1), (2, 3)]
    assert again.missing_bytes() == 2 * PIECE_BYTES
    assert again.version == "v1"
    assert again.agree("v1")
    assert not again.agree("v2")
    again.close()
    with pytest.raises(ValueError, match="another size"):
        Fill(Folder.at(str(tmp_path)), "x", BlobPieces(source("x", 77)))
    discard_fill(Folder.at(str(tmp_path)), "x")
    with pytest.raises(FileNotFoundError):
        Fill(Folder.at(str(tmp_path)), "x", BlobPieces(blob))


def test_one_fetches_while_others_keep_off(tmp_path: Path) -> None:
    fill = make(tmp_path, source("x", 10 * PIECE_BYTES))
    one, two = fill.claims(), fill.claims()
    assert one.lock(0, 5)
    assert not two.lock(4, 2)
    assert two.lock(5, 5)
    one.close()
    assert two.lock(0, 5)
    two.close()
    fill.close()


def test_the_first_of_two_versions_decides(tmp_path: Path) -> None:
    blob = source("x", PIECE_BYTES)
    fill = make(tmp_path, blob)
    others = [Fill(Folder.at(str(tmp_path)), "x", BlobPieces(blob)) for _ in range(8)]
    agreed: list[str] = []

    def vote(number: int) -> None:
        if others[number].agree(f"v{number}"):
            agreed.append(f"v{number}")

    threads = [threading.Thread(target=vote, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert agreed == [fill.version]
    for one in (fill, *others):
        one.close()


def test_a_version_that_was_damaged_is_decided_again(tmp_path: Path) -> None:
    fill = make(tmp_path, source("x", PIECE_BYTES))
    assert fill.agree("v1")
    for bit in range(8 * (6 + len("v1"))):
        fill._memory[bit // 8] ^= 1 << bit % 8
        assert fill.version in (None, "v1")
        fill._memory[bit // 8] ^= 1 << bit % 8
    fill._memory[7] ^= 4
    assert fill.version is None
    assert fill.agree("v1")
    assert not fill.agree("v2")
    fill.close()


def test_a_blocks_checksum_is_that_of_what_came_last(tmp_path: Path) -> None:
    """A block that a peer gave whole, of a range that it didn't end, may come again in parts."""
    blob = source("x", 2 * BLOCK_BYTES)
    fill = make(tmp_path, blob)
    fill.put(0, memoryview(bytes(BLOCK_BYTES)), 0x12345678)
    fill.put(4096, memoryview(b"x" * 4096), 0)
    fill.put(BLOCK_BYTES, memoryview(bytes(BLOCK_BYTES)), 0x12345678)
    data = memoryview(bytearray(2 * BLOCK_BYTES))
    data[4096:8192] = b"x" * 4096
    fill.mark((0, fill.pieces.count))
    assert fill.block_crcs(data) == crcs_of(data[:BLOCK_BYTES]) + b"\x78\x56\x34\x12"
    fill.close()


OBJECT_BYTES = 100_000


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Ranges of a few objects, some in a row, and whole objects."""
    found: list[Segment] = []
    for number in range(draw(st.integers(1, 8))):
        if draw(st.booleans()):
            size = draw(st.integers(0, 20_000))
            found.append(Segment(path=f"whole-{number}", size_bytes=size, version=None))
            continue
        last = found[-1] if found else None
        goes_on = last is not None and last.object_bytes is not None and draw(st.booleans())
        start = last.start + last.size_bytes if goes_on and last else draw(st.integers(0, 50_000))
        found.append(
            Segment(
                path=last.path if goes_on and last else f"o{draw(st.integers(0, 2))}",
                size_bytes=draw(st.integers(0, min(20_000, OBJECT_BYTES - start))),
                version=None,
                start=start,
                object_bytes=OBJECT_BYTES,
            )
        )
    return tuple(found)


def where(source: BlobSource) -> list[tuple[str, int]]:
    """Of each byte of a blob its object, and its place there."""
    return [(one.path, one.start + at) for one in source.segments for at in range(one.size_bytes)]


@examples(150)
@given(
    segments=segments(), range_bytes=st.integers(1, 40_000), span=st.tuples(*[st.floats(0, 1)] * 2)
)
def test_what_is_asked_for_at_a_time_is_the_pieces_and_no_more(
    segments: tuple[Segment, ...], range_bytes: int, span: tuple[float, float]
) -> None:
    size = sum(one.size_bytes for one in segments)
    source = BlobSource(key="0" * 40, uri="mem://x", segments=segments, size_bytes=size)
    pieces, places = BlobPieces(source), where(source)
    assert pieces.span((0, pieces.count)) == (0, size)
    start, end = sorted(int(share * size) for share in span)
    asked: list[int] = []
    for whole in pieces.covering([start], [end]):
        cuts = list(pieces.cut(whole, range_bytes=range_bytes))
        assert [cuts[0][0], *(b for _, b in cuts)] == [*(a for a, _ in cuts), whole[1]]
        for cut in cuts:
            stretches = list(pieces.stretches(cut))
            assert len(stretches) <= OBJECTS_AT_ONCE
            first, last = pieces.span(cut)
            if pieces.are_small and cut[1] - cut[0] > 1:
                assert last - first <= max(range_bytes, PIECE_BYTES)
            for one in stretches:
                wanted = [(one.segment.path, one.at + n) for n in range(one.end - one.start)]
                assert places[one.start : one.end] == wanted
                assert len(wanted) > 0
                ((low, high),) = pieces.covering([one.start], [one.end])
                assert pieces.span((low, high)) == (one.start, one.end)
                asked += range(one.start, one.end)
    assert set(range(start, end)) <= set(asked)
    assert len(set(asked)) == len(asked)
    if pieces.are_small:
        assert len(asked) < end - start + 2 * PIECE_BYTES
    assert pieces.is_of_one_object == (
        len(segments) == 1 or len({one.path for one in segments if one.size_bytes}) <= 1
    )
