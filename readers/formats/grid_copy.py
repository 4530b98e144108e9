"""Copying parts of decoded chunks into the samples that they belong to."""

from __future__ import annotations

import math
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


class StepCopier:
    """Copies steps along the first axis out of chunks that are whole along all others: each lies in
    one chunk.

    begins: where each begins, counted from the first element of its chunk, int64, shape (n,
    dimensions). lengths: of a step. out: shape (…, *lengths); places: of the steps there, int64,
    shape (n,).
    """

    def __init__(
        self, begins: Ints, lengths: Sequence[int], out: NDArray[Any], places: Ints
    ) -> None:
        self._out, self._places, self._steps = out[:, 0], places, begins[:, 0]
        self._are_large = math.prod(lengths) * out.itemsize >= _LARGE_BYTES
        self._listed = (places.tolist(), self._steps.tolist()) if self._are_large else ([], [])

    def copy(self, chunk: NDArray[Any], low: int, high: int) -> None:
        """Copy the steps [low, high), which are the chunk's."""
        if not self._are_large:
            self._out[self._places[low:high]] = chunk[self._steps[low:high]]
            return
        out, (places, steps) = self._out, self._listed
        for number in range(low, high):
            out[places[number]] = chunk[steps[number]]


class PartCopier:
    """Copies parts of an array out of the chunks that each overlaps; as StepCopier, but that begins
    are negative where a part begins in a chunk before."""

    def __init__(
        self, begins: Ints, lengths: Sequence[int], out: NDArray[Any], places: Ints
    ) -> None:
        self._begins, self._lengths, self._out, self._places = begins, lengths, out, places

    def copy(self, chunk: NDArray[Any], low: int, high: int) -> None:
        """Copy what the chunk has of the parts [low, high)."""
        begins, places = self._begins[low:high], self._places[low:high]
        ends = begins + np.array(self._lengths, np.int64)
        are_inside = ((begins >= 0) & (ends <= np.array(chunk.shape, np.int64))).all(axis=1)
        if are_inside.all():
            _copy_whole(chunk, begins, self._lengths, self._out, places)
            return
        if are_inside.any():
            whole = begins[are_inside]
            _copy_whole(chunk, whole, self._lengths, self._out, places[are_inside])
        across = ~are_inside
        for place, begin in zip(places[across].tolist(), begins[across].tolist(), strict=True):
            _copy_overlap(chunk, begin, self._lengths, self._out[place])


def _copy_whole(
    chunk: NDArray[Any], begins: Ints, lengths: Sequence[int], out: NDArray[Any], places: Ints
) -> None:
    """Copy parts that lie in the chunk as a whole."""
    if math.prod(lengths) * out.itemsize < _LARGE_BYTES and len(places) > 1:
        windows = sliding_window_view(chunk, tuple(lengths))
        out[places] = windows[tuple(begins.T)]
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


def numbers(places: Places, count: int) -> Ints:
    """Places in a batch as numbers."""
    if isinstance(places, slice):
        return np.arange(*places.indices(places.stop if places.stop is not None else count))
    return np.asarray(places, np.int64)
