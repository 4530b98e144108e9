"""Copying parts of decoded chunks into the samples that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.shard import Places

    Ints = NDArray[np.int64]

_LARGE_BYTES = 2**13
"""Samples from here on are copied one by one: a statement each costs less than the copy that an
index expression makes first."""


def copy_parts(
    chunk: NDArray[Any],
    begins: Ints,
    lengths: Sequence[int],
    out: NDArray[Any],
    places: Ints,
) -> None:
    """Copy what a chunk has of some parts of an array into out[places].

    begins: where the parts begin, counted from the chunk's first element, negative where that is
    in a chunk before; int64, shape (n, dimensions). lengths: of a part. out: shape (…, *lengths);
    places: int64, shape (n,).
    """
    shape = np.array(chunk.shape, np.int64)
    are_inside = ((begins >= 0) & (begins + np.array(lengths, np.int64) <= shape)).all(axis=1)
    if are_inside.all():
        _copy_whole(chunk, begins, lengths, out, places)
        return
    if are_inside.any():
        _copy_whole(chunk, begins[are_inside], lengths, out, places[are_inside])
    across = ~are_inside
    for place, begin in zip(places[across].tolist(), begins[across].tolist(), strict=True):
        _copy_overlap(chunk, begin, lengths, out[place])


def _copy_whole(
    chunk: NDArray[Any], begins: Ints, lengths: Sequence[int], out: NDArray[Any], places: Ints
) -> None:
    """Copy parts that lie in the chunk as a whole."""
    size_bytes = out.itemsize
    for length in lengths:
        size_bytes *= length
    if size_bytes < _LARGE_BYTES and len(places) > 1:
        windows = sliding_window_view(chunk, tuple(lengths))
        out[places] = windows[tuple(begins.T)]
        return
    if tuple(lengths[1:]) == chunk.shape[1:] and lengths[0] == 1:
        steps = out[:, 0]
        for place, begin in zip(places.tolist(), begins[:, 0].tolist(), strict=True):
            steps[place] = chunk[begin]
        return
    for place, begin in zip(places.tolist(), begins.tolist(), strict=True):
        where = tuple(slice(low, low + length) for low, length in zip(begin, lengths, strict=True))
        out[place] = chunk[where]


def _copy_overlap(
    chunk: NDArray[Any], begin: Sequence[int], lengths: Sequence[int], part: NDArray[Any]
) -> None:
    """Copy what one part and the chunk have in common."""
    into, source = [], []
    for low, length, size in zip(begin, lengths, chunk.shape, strict=True):
        into.append(slice(max(0, -low), min(length, size - low)))
        source.append(slice(max(0, low), min(size, low + length)))
    part[tuple(into)] = chunk[tuple(source)]


def fill_parts(
    value: Any,
    box: Sequence[tuple[int, int]],
    begins: Ints,
    lengths: Sequence[int],
    out: NDArray[Any],
    places: Ints,
) -> None:
    """Write a value where parts of an array lie in a box of it that isn't stored. box: first and
    end, by axis; begins: in the array; else as `copy_parts`."""
    shape = tuple(end - low for low, end in box)
    chunk = np.broadcast_to(np.asarray(value, out.dtype), shape)
    copy_parts(chunk, begins - np.array([low for low, _ in box], np.int64), lengths, out, places)


def numbers(places: Places, count: int) -> Ints:
    """Places in a batch as numbers."""
    if isinstance(places, slice):
        return np.arange(*places.indices(places.stop if places.stop is not None else count))
    return np.asarray(places, np.int64)
