"""Lengths of arrays in a sidecar are checked, because its source isn't trusted."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.readers.fields import Array, Schema
from penstock.readers.formats import SampleLayout, SpanNotes

TYPE = Array("float32", (None, None, None))
LAYOUT = SampleLayout(schema=Schema({"a": TYPE}), storage={"a": "span"}, lacking=frozenset(("a",)))


def _notes(shapes: list[tuple[int, int, int]], sizes: list[int], *, files: list[int]) -> SpanNotes:
    return SpanNotes(
        files=np.array(files, np.int32),
        starts=np.zeros(len(files), np.int64),
        sizes=np.array(sizes, np.int64),
        crcs=np.zeros(len(files), np.uint32),
        shapes=np.array(shapes, np.int64),
        codecs=["" if each < 0 else "<f4" for each in files],
    )


def test_a_missing_array_has_length_0() -> None:
    """Otherwise the arrays after it in a batch would be shifted."""
    notes = _notes([(5, 1, 1), (1, 2, 1)], [0, 8], files=[-1, 0])
    notes.check(np.array([8]), TYPE)
    table = np.zeros((2, LAYOUT.table.count), np.int64)
    place = LAYOUT.table.spans["a"]
    notes.fill(table, place, np.zeros(1, np.int64))
    assert place.lengths is not None
    assert table[:, place.lengths : place.lengths + 3].tolist() == [[0, 0, 0], [1, 2, 1]]


def test_the_other_lengths_are_bounded_if_one_length_is_0() -> None:
    notes = _notes([(0, 2**40, 2**40)], [0], files=[0])
    with pytest.raises(ValueError, match="an impossible length"):
        notes.check(np.array([8]), TYPE)
