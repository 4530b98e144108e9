from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.base import BlobSource, Folder, Segment
from penstock.cache.disk import (
    BLOCK_BYTES,
    PIECE_BYTES,
    BlobPieces,
    Fill,
    bridge_gaps,
    crcs_of,
    cut_span,
    discard_fill,
    merge_spans,
)

if TYPE_CHECKING:
    from pathlib import Path


def source(*sizes: int) -> BlobSource:
    segments = tuple(Segment(path=f"p{i}", size_bytes=s, version=None) for i, s in enumerate(sizes))
    return BlobSource(key="0" * 40, uri="mem://x", segments=segments, size_bytes=sum(sizes))


def make(tmp_path: Path, blob: BlobSource) -> Fill:
    return Fill.make(Folder.at(str(tmp_path)), "x", BlobPieces(blob))


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=8),
    spans=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6),
)
def test_pieces_cover_spans_and_little_more(
    sizes: list[int], spans: list[tuple[float, float]]
) -> None:
    blob = source(*sizes)
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


@settings(max_examples=100)
@given(marks=st.lists(st.booleans(), min_size=1, max_size=60), waste=st.integers(0, 20))
def test_missing_runs_and_bridges(
    tmp_path_factory: pytest.TempPathFactory, marks: list[bool], waste: int
) -> None:
    folder = tmp_path_factory.mktemp("fill")
    fill = make(folder, source(len(marks) * PIECE_BYTES))
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


def test_cutting() -> None:
    assert list(cut_span((3, 10), most=3)) == [(3, 6), (6, 9), (9, 10)]


def test_writing_marks_and_reopening_goes_on(tmp_path: Path) -> None:
    blob = source(3 * PIECE_BYTES + 5)
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
        Fill(Folder.at(str(tmp_path)), "x", BlobPieces(source(77)))
    discard_fill(Folder.at(str(tmp_path)), "x")
    with pytest.raises(FileNotFoundError):
        Fill(Folder.at(str(tmp_path)), "x", BlobPieces(blob))


def test_one_fetches_while_others_keep_off(tmp_path: Path) -> None:
    fill = make(tmp_path, source(10 * PIECE_BYTES))
    one, two = fill.claims(), fill.claims()
    assert one.claim((0, 5))
    assert not two.claim((4, 6))
    assert two.claim((5, 10))
    one.close()
    assert two.claim((0, 5))
    two.close()
    fill.close()


def test_the_first_of_two_versions_decides(tmp_path: Path) -> None:
    blob = source(PIECE_BYTES)
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


def test_a_version_that_was_damaged_is_decided_anew(tmp_path: Path) -> None:
    fill = make(tmp_path, source(PIECE_BYTES))
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
    blob = source(2 * BLOCK_BYTES)
    fill = make(tmp_path, blob)
    fill.put(0, memoryview(bytes(BLOCK_BYTES)), 0x12345678)
    fill.put(4096, memoryview(b"x" * 4096), 0)
    fill.put(BLOCK_BYTES, memoryview(bytes(BLOCK_BYTES)), 0x12345678)
    data = memoryview(bytearray(2 * BLOCK_BYTES))
    data[4096:8192] = b"x" * 4096
    fill.mark((0, fill.pieces.count))
    assert fill.block_crcs(data) == crcs_of(data[:BLOCK_BYTES]) + b"\x78\x56\x34\x12"
    fill.close()
