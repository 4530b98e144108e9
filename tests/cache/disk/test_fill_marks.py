"""Who knows only a key reads of a fill's map exactly what its filler has marked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.base import BlobSource, Folder, Segment
from penstock.cache.disk import BlobPieces, Fill, FillMarks, map_name

if TYPE_CHECKING:
    from pathlib import Path


def source(sizes: list[int], *, ranges: bool) -> BlobSource:
    whole = None if not ranges else 10**9
    segments = tuple(
        Segment(path=f"p{i}", size_bytes=size, version=None, object_bytes=whole)
        for i, size in enumerate(sizes)
    )
    return BlobSource(key="0" * 40, uri="mem://x", segments=segments, size_bytes=sum(sizes))


@settings(max_examples=80)
@given(st.data())
def test_marked_bytes_are_there_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=6))
    blob = source(sizes, ranges=data.draw(st.booleans()))
    folder = Folder.at(str(tmp_path_factory.mktemp("fill")))
    fill = Fill.make(folder, "x", BlobPieces(blob))
    there = np.zeros(blob.size_bytes, bool)
    for piece in range(fill.pieces.count):
        if data.draw(st.booleans()):
            fill.marks[piece] = 1
            there[slice(*fill.pieces.span((piece, piece + 1)))] = True
    fd = folder.open(map_name("x"))
    try:
        marks = FillMarks(fd, blob.size_bytes)
        told = np.zeros(blob.size_bytes, bool)
        for start, end in marks.held(data.draw(st.integers(0, blob.size_bytes))):
            told[start:end] = True
        assert (told == there).all()
        for _ in range(5):
            start = data.draw(st.integers(0, blob.size_bytes - 1))
            end = data.draw(st.integers(start + 1, blob.size_bytes))
            if marks.has(start, end):
                assert there[start:end].all()
            # For whole pieces the answer is exact.
            (low, high), *_ = fill.pieces.covering([start], [end])
            start, end = fill.pieces.span((low, high))
            assert marks.has(start, end) == there[start:end].all()
    finally:
        os.close(fd)
        fill.close()


def test_a_blob_of_very_many_pieces_reports_those_around_a_byte(tmp_path: Path) -> None:
    folder = Folder.at(str(tmp_path))
    fill = Fill.make(folder, "x", BlobPieces(source([100 * 4096 - 1], ranges=False)))
    fill.marks[:] = 1
    fd = folder.open(map_name("x"))
    marks = FillMarks(fd, 100 * 4096 - 1, most_marks=10)
    assert marks.held(0) == [(0, 10 * 4096)]
    assert marks.held(50 * 4096) == [(45 * 4096, 55 * 4096)]
    assert marks.held(10**9) == [(90 * 4096, 100 * 4096 - 1)]
    assert marks.has(0, 100 * 4096 - 1)
    os.close(fd)
    fill.close()


OF_OLD_VERSION = bytes(512) + b"\1"  # without the starts of its pieces


@pytest.mark.parametrize("content", [b"", b"\0" * 513, b"\1" * 512, b"\2" * 5000, OF_OLD_VERSION])
def test_a_file_that_is_no_map_is_refused(tmp_path: Path, content: bytes) -> None:
    place = tmp_path / "x.map"
    place.write_bytes(content)
    fd = os.open(place, os.O_RDONLY)
    with pytest.raises(ValueError, match="isn't a map"):
        FillMarks(fd, 4096)
    os.close(fd)
