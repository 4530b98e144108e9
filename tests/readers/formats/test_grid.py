"""Test windows over chunks against plain loops, and the bounds of parts and spans."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.readers.fieldtypes import Array, Schema, codec_number
from penstock.readers.formats import (
    ArrayWindows,
    ChunkGrid,
    FieldNotes,
    PartCopier,
    SampleLayout,
    part_bounds,
    place_numbers,
    unit_rows,
    windows_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


@st.composite
def cases(draw: st.DrawFn) -> tuple[ArrayWindows, ChunkGrid]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    window = tuple(draw(st.integers(1, length)) for length in shape)
    stride = tuple(draw(st.integers(1, 4)) for _ in shape)
    is_step = draw(st.booleans())
    if is_step:
        window, stride = (1, *shape[1:]), (1,) * len(shape)
    chunk = tuple(draw(st.integers(1, 8)) for _ in shape)
    repeat = draw(st.integers(1, 3))
    windows = ArrayWindows(
        shape=shape, window=window, stride=stride, is_step=is_step, repeat=repeat
    )
    return windows, ChunkGrid(shape=shape, chunk=chunk)


def all_starts(windows: ArrayWindows) -> Iterator[tuple[int, ...]]:
    """Yield the start of each sample's window, computed by plain loops."""
    lengths = zip(windows.shape, windows.window, windows.stride, strict=True)
    axes = [range(0, length - part + 1, step) for length, part, step in lengths]
    for start in product(*axes):
        for _ in range(windows.repeat):
            yield start


def chunks_of(start: tuple[int, ...], windows: ArrayWindows, grid: ChunkGrid) -> set[int]:
    axes = [
        range(low // chunk, (low + part - 1) // chunk + 1)
        for low, part, chunk in zip(start, windows.window, grid.chunk, strict=True)
    ]
    return {int(np.ravel_multi_index(place, grid.counts)) for place in product(*axes)}


@given(cases())
def test_windows_are_numbered_like_elements(case: tuple[ArrayWindows, ChunkGrid]) -> None:
    windows, _ = case
    wanted = list(all_starts(windows))
    assert windows.samples == len(wanted)
    found = windows.starts(np.arange(windows.samples))
    assert list(map(tuple, found.tolist())) == wanted
    rank = len(windows.shape) - windows.is_step
    assert len(windows.sample_shape) == rank


@given(cases(), st.data())
def test_boxes_hold_each_sample_of_a_range_once(
    case: tuple[ArrayWindows, ChunkGrid], data: st.DataObject
) -> None:
    windows, _ = case
    first = data.draw(st.integers(0, windows.samples))
    end = data.draw(st.integers(first, windows.samples))
    shape = (*windows.counts, windows.repeat)
    boxes = list(windows.boxes(first, end))
    assert len(boxes) <= 2 * len(shape)
    inside = [place for box in boxes for place in product(*(range(*each) for each in box))]
    assert [int(np.ravel_multi_index(place, shape)) for place in inside] == list(range(first, end))


@given(cases(), st.data())
@settings(deadline=None)
def test_samples_touch_the_chunks_that_they_overlap(
    case: tuple[ArrayWindows, ChunkGrid], data: st.DataObject
) -> None:
    windows, grid = case
    first = data.draw(st.integers(0, windows.samples))
    end = data.draw(st.integers(first, windows.samples))
    starts = list(all_starts(windows))[first:end]
    wanted = [chunks_of(start, windows, grid) for start in starts]
    touched = grid.touched(windows.starts(np.arange(first, end)), windows.window)
    pairs = list(zip(touched.samples.tolist(), touched.chunks.tolist(), strict=True))
    assert pairs == [(i, chunk) for i, some in enumerate(wanted) for chunk in sorted(some)]
    chunks, uses = grid.uses(windows, first, end)
    found = dict(zip(chunks.tolist(), uses.tolist(), strict=True))
    assert list(found) == sorted(found)
    assert found == {
        chunk: sum(chunk in some for some in wanted) for some in wanted for chunk in some
    }


@given(cases(), st.integers(1, 400))
def test_neighbouring_units_begin_in_different_chunks(
    case: tuple[ArrayWindows, ChunkGrid], max_bytes: int
) -> None:
    windows, grid = case
    runs = unit_rows(windows, grid, max_bytes=max_bytes, itemsize=1)
    assert runs.sum() == windows.samples
    assert (runs > 0).all()
    assert not (runs % windows.repeat).any()
    starts = list(all_starts(windows))
    first = [starts[i] for i in (np.cumsum(runs) - runs).tolist()]
    last = [starts[i] for i in (np.cumsum(runs) - 1).tolist()]
    chunk = grid.chunk[0]
    assert all(a[0] // chunk == b[0] // chunk for a, b in zip(first, last, strict=True))
    if len(grid.shape) == 1:
        assert len({start[0] // chunk for start in first}) == len(runs)


def test_a_large_volume_is_cut_along_a_later_axis() -> None:
    windows = windows_of((2, 64, 64), (1, 8, 8), None, what="x")
    grid = ChunkGrid(shape=(2, 64, 64), chunk=(1, 16, 16))
    assert unit_rows(windows, grid, max_bytes=64 * 64, itemsize=1).tolist() == [64, 64]
    assert unit_rows(windows, grid, max_bytes=16 * 64, itemsize=1).tolist() == [16] * 8
    shared = ChunkGrid(shape=(2, 64, 64), chunk=(2, 16, 16))
    assert unit_rows(windows, shared, max_bytes=1, itemsize=1).tolist() == [128]


def copied(array: NDArray[Any], windows: ArrayWindows, grid: ChunkGrid) -> NDArray[Any]:
    """Return all samples, copied chunk by chunk as a reader does."""
    out = np.full((windows.samples, *windows.window), -1, array.dtype)
    starts = windows.starts(np.arange(windows.samples))
    touched = grid.touched(starts, windows.window)
    for number in np.unique(touched.chunks).tolist():
        rows = touched.samples[touched.chunks == number]
        low = np.array(np.unravel_index(number, grid.counts)) * grid.chunk
        part = array[tuple(map(slice, low, low + grid.chunk))]
        pad = [(0, b - length) for b, length in zip(grid.chunk, part.shape, strict=True)]
        copy = PartCopier(starts[rows] - low, windows.window, out, rows, grid.chunk).copy
        copy(np.pad(part, pad), 0, len(rows) // 2)
        copy(np.pad(part, pad), len(rows) // 2, len(rows))
    return out


@pytest.mark.parametrize("itemsize", [1, 4096])
@given(case=cases())
@settings(deadline=None)
def test_chunks_are_copied_into_windows(
    itemsize: int, case: tuple[ArrayWindows, ChunkGrid]
) -> None:
    windows, grid = case
    ramp = np.arange(math.prod(windows.shape)).reshape(windows.shape)
    array = ramp.astype("i8" if itemsize == 1 else "U1024")
    found = copied(array, windows, grid)
    for sample, start in zip(found, all_starts(windows), strict=True):
        part = (slice(a, a + b) for a, b in zip(start, windows.window, strict=True))
        assert (sample == array[tuple(part)]).all()


def test_windows_follow_the_arguments_of_users() -> None:
    step = windows_of((10, 3, 8, 8), None, None, what="x")
    assert (step.samples, step.sample_shape) == (10, (3, 8, 8))
    kept = windows_of((10, 3, 8, 8), (1,), None, what="x")
    assert (kept.samples, kept.sample_shape) == (10, (1, 3, 8, 8))
    tiles = windows_of((10, 3, 9, 8), (4, None, 4, 4), (2, None, 2), what="x")
    assert tiles.counts == (4, 1, 3, 2)
    assert tiles.sample_shape == (4, 3, 4, 4)
    assert windows_of((10,), (4, None, 4, 4), None, what="t", is_named=False).counts == (2,)
    with pytest.raises(ConfigError, match="no such window fits"):
        windows_of((10, 3), (11,), None, what="x")
    with pytest.raises(ConfigError, match="2 axes"):
        windows_of((10, 3), (1, 1, 1), None, what="x")


def test_too_many_units_or_chunks_are_refused() -> None:
    shape = (2**40, 2**20)
    windows = windows_of(shape, (1, None), None, what="x")
    grid = ChunkGrid(shape=shape, chunk=(1, 1))
    with pytest.raises(ValueError, match="parts"):
        unit_rows(windows, grid, max_bytes=1, itemsize=1)
    with pytest.raises(ValueError, match="chunks"):
        grid.uses(windows, 0, 2**30)


def test_places_are_numbers_or_a_slice() -> None:
    assert place_numbers(slice(2, 5), 3).tolist() == [2, 3, 4]
    assert place_numbers(np.array([4, 1]), 2).tolist() == [4, 1]


SIZES = st.lists(st.integers(0, 2**40), max_size=60)


@given(sizes=SIZES, target=st.integers(1, 2**40))
def test_parts_hold_each_item_once_and_none_is_empty(sizes: list[int], target: int) -> None:
    bounds = part_bounds(sizes, target_bytes=target)
    assert bounds[0] == 0
    assert bounds[-1] == len(sizes)
    assert (np.diff(bounds) > 0).all()


@given(sizes=st.lists(st.integers(1, 2**40), min_size=1, max_size=60), target=st.integers(1, 2**40))
def test_parts_are_as_equal_as_the_items_allow(sizes: list[int], target: int) -> None:
    bounds = part_bounds(sizes, target_bytes=target)
    held = np.add.reduceat(np.array(sizes, object), bounds[:-1])
    wanted = max(1, min(len(sizes), round(sum(sizes) / target)))
    assert max(held) <= sum(sizes) / wanted * (1 + 1e-9) + max(sizes)


def test_equal_items_make_equal_parts() -> None:
    assert np.diff(part_bounds([2**20] * 640)).tolist() == [64] * 10
    assert np.diff(part_bounds([2**20] * 100)).tolist() == [50] * 2
    assert part_bounds([]).tolist() == [0]
    assert part_bounds([0, 0]).tolist() == [0, 2]
    assert part_bounds([2**31]).tolist() == [0, 1]


TYPE = Array("float32", (None, None, None))


LAYOUT = SampleLayout(schema=Schema({"a": TYPE}), storage={"a": "span"}, lacking=frozenset(("a",)))


def _notes(shapes: list[tuple[int, int, int]], sizes: list[int], *, files: list[int]) -> FieldNotes:
    return FieldNotes(
        storage="span",
        files=np.array(files, np.int32),
        starts=np.zeros(len(files), np.int64),
        sizes=np.array(sizes, np.int64),
        crcs=np.zeros(len(files), np.uint32),
        shapes=np.array(shapes, np.int64),
        present=np.array(files) >= 0,
        numbers=codec_number("<f4"),
    )


def test_a_missing_array_has_length_0() -> None:
    """Otherwise the arrays after it in a batch would be shifted."""
    notes = _notes([(5, 1, 1), (1, 2, 1)], [0, 8], files=[-1, 0])
    notes.check(TYPE, np.array([8]))
    table = np.zeros((2, LAYOUT.table.count), np.int64)
    place = LAYOUT.table.spans["a"]
    notes.fill(table, place, np.zeros(1, np.int64))
    assert place.lengths is not None
    assert table[:, place.lengths : place.lengths + 3].tolist() == [[0, 0, 0], [1, 2, 1]]


def test_the_other_lengths_are_bounded_if_one_length_is_0() -> None:
    notes = _notes([(0, 2**40, 2**40)], [0], files=[0])
    with pytest.raises(ValueError, match="an impossible length"):
        notes.check(TYPE, np.array([8]))
