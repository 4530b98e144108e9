"""Map samples that are windows of a chunked array to chunks, and copy them out of the chunks.

The windows are numbered like the elements of an array, with the first axis slowest. So a range of
samples is a few boxes of windows (`ArrayWindows.boxes`), and each box touches a box of chunks. All
of this is arithmetic; no data is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.cache import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Lengths = Sequence[int]

    from penstock.readers.fieldtypes import ColumnCrop
    from penstock.readers.formats.chunk_data import ShardData
    from penstock.readers.formats.dataset_arguments import Window
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.types import Encoded, Ints, Numbers


Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""The first index and the end of a range, by axis."""

MAX_AXES = 16
"""The most axes of an array of a NumPy file."""

MAX_TOUCHED = 2**24
"""The most chunks of one array that a range of samples may need."""

MAX_UNITS = 2**26
"""The most units of a dataset that are decoded as a whole."""

_TOO_SMALL = (
    f"the array has more than {MAX_UNITS:,} parts that are decoded as a whole, or one shard of it "
    f"more than {MAX_TOUCHED:,}: its chunks are too small for its size, write it with larger ones"
)


@dataclass(frozen=True, kw_only=True)
class ArrayWindows:
    """The windows of an array that are its samples.

    shape: of the array. window: of a sample, with as many axes. stride: from one window to the
    next. A last window that doesn't fit is left out. is_step: True if a sample is one step along
    the first axis, which is then dropped from its shape. repeat: number of consecutive samples with
    the same window, for an array that has only the first axes of the others (the time of an image's
    tiles).
    """

    shape: Shape
    window: Shape
    stride: Shape
    is_step: bool = False
    repeat: int = 1

    @classmethod
    def parse(
        cls, shape: Lengths, window: Lengths, stride: Lengths, is_step: object, repeat: int
    ) -> ArrayWindows:
        """Return windows as an index records them. Raises ValueError or TypeError if they don't fit
        the shape."""
        axes = zip(shape, window, stride, strict=True)
        if repeat < 1 or any(not 0 <= part <= length or step < 1 for length, part, step in axes):
            raise ValueError(f"it has invalid windows {window} of an array of shape {shape}")
        whole, part, step = (tuple(map(int, each)) for each in (shape, window, stride))
        more: Any = {"is_step": bool(is_step), "repeat": int(repeat)}
        return cls(shape=whole, window=part, stride=step, **more)

    @cached_property
    def counts(self) -> Shape:
        """Return the number of windows along each axis."""
        axes = zip(self.shape, self.window, self.stride, strict=True)
        return tuple(max(0, (length - part) // step + 1) for length, part, step in axes)

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return math.prod(self.counts) * self.repeat

    @property
    def sample_shape(self) -> Shape:
        """Return the shape of one sample."""
        return self.window[1:] if self.is_step else self.window

    def starts(self, rows: Ints) -> Ints:
        """Return the starts of samples' windows in the array, int64, shape (n, dimensions)."""
        left = rows // self.repeat if self.repeat > 1 else rows
        found = np.zeros((len(rows), len(self.shape)), np.int64)
        for axis in range(len(self.shape) - 1, 0, -1):
            if self.counts[axis] != 1:
                left, place = np.divmod(left, self.counts[axis])
                np.multiply(place, self.stride[axis], out=found[:, axis])
        np.multiply(left, self.stride[0], out=found[:, 0])
        return found

    def label(self, sample: int) -> str:
        """Return the part of the array that a sample is, as an index of Python: "[0:8, :, 2:6]"."""
        (start,) = self.starts(np.array([sample])).tolist()
        if self.is_step:
            return f"[{start[0]}]"
        axes = zip(start, self.window, self.shape, strict=True)
        parts = (":" if part == length else f"{low}:{low + part}" for low, part, length in axes)
        return f"[{', '.join(parts)}]"

    def following(self, lead: ArrayWindows) -> ArrayWindows | None:
        """Return these windows, repeated if necessary so that they are as many as those of the
        leading array; None if that is impossible."""
        axes = len(self.shape)
        if self.counts == lead.counts[:axes]:
            return replace(self, repeat=math.prod(lead.counts[axes:]))
        return self if self.samples == lead.samples else None

    def parts(self, rows: Ints, crop: ColumnCrop | None) -> tuple[Ints, Shape]:
        """Return where the cropped parts of samples begin in the array, int64, shape (n,
        dimensions), and their length along each axis. crop: None for whole samples."""
        starts = self.starts(rows)
        if crop is None:
            return starts, self.window
        starts[:, self.is_step :] += crop.corners
        return starts, (*self.window[: self.is_step], *crop.shape)

    def boxes(self, first: int, end: int) -> Iterator[Box]:
        """Yield samples [first, end) as boxes of windows, with the repeats as a last axis."""
        return _boxes(first, end, (*self.counts, self.repeat))


def _boxes(first: int, end: int, counts: Shape) -> Iterator[Box]:
    if first >= end:
        return
    if not counts:
        yield ()
        return
    rest = math.prod(counts[1:])
    (row, inside), (last, beyond) = divmod(first, rest), divmod(end, rest)
    if row == last:
        yield from (((row, row + 1), *box) for box in _boxes(inside, beyond, counts[1:]))
        return
    if inside:
        yield from (((row, row + 1), *box) for box in _boxes(inside, rest, counts[1:]))
        row += 1
    if row < last:
        yield ((row, last), *((0, count) for count in counts[1:]))
    if beyond:
        yield from (((last, last + 1), *box) for box in _boxes(0, beyond, counts[1:]))


class TouchedChunks(NamedTuple):
    """The chunks that some samples touch, as pairs.

    samples: places among the given samples. chunks: numbers in the grid. Both are int64, shape
    (pairs,). corners: the first element of each chunk, int64, shape (pairs, dimensions).
    """

    samples: Ints
    chunks: Ints
    corners: Ints


@dataclass(frozen=True, kw_only=True)
class ChunkGrid:
    """The division of an array into chunks of one shape, numbered with the first axis slowest.

    The last chunk of an axis may extend beyond the array.
    """

    shape: Shape
    chunk: Shape

    @cached_property
    def counts(self) -> Shape:
        """Return the number of chunks along each axis."""
        axes = zip(self.shape, self.chunk, strict=True)
        return tuple(-(-length // part) for length, part in axes)

    @property
    def chunks(self) -> int:
        """Return the number of chunks."""
        return math.prod(self.counts)

    def touched(self, starts: Ints, lengths: Sequence[int]) -> TouchedChunks:
        """Return the chunks that parts of the array touch, sorted by sample and then by number.

        starts: int64, shape (n, dimensions). lengths: of each part.
        """
        chunk = np.array(self.chunk, np.int64)
        places = starts // chunk
        spans = (starts + (np.array(lengths, np.int64) - 1)) // chunk - places + 1
        samples = np.arange(len(starts))
        if (spans != 1).any():
            counts = spans.prod(axis=1)
            samples = np.repeat(samples, counts)
            left = np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)
            places = places[samples]
            for axis in range(len(self.shape) - 1, -1, -1):
                left, place = np.divmod(left, spans[samples, axis])
                places[:, axis] += place
        numbers: Ints = np.ravel_multi_index(tuple(places.T), self.counts)
        return TouchedChunks(samples, numbers, places * chunk)

    def uses(self, windows: ArrayWindows, first: int, end: int) -> tuple[Ints, Ints]:
        """Return the chunks that samples [first, end) need, sorted, and how many samples need each.

        Both are int64, shape (chunks,). Raises ValueError for more than `MAX_TOUCHED` chunks.
        """
        chunks, uses = [], []
        for box in windows.boxes(first, end):
            numbers = counts = np.ones(1, np.int64)
            numbers = numbers - 1
            for axis, (low, high) in enumerate(box[:-1]):
                places, used = self._axis_uses(windows, axis, low, high)
                if len(numbers) * len(places) > MAX_TOUCHED:
                    raise ValueError(_TOO_SMALL)
                numbers = (numbers[:, None] * self.counts[axis] + places).reshape(-1)
                counts = (counts[:, None] * used).reshape(-1)
            chunks.append(numbers)
            uses.append(counts * (box[-1][1] - box[-1][0]))
        if len(chunks) == 1:
            return chunks[0], uses[0]
        if not chunks:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        found, places = np.unique(np.concatenate(chunks), return_inverse=True)
        total = np.zeros(len(found), np.int64)
        np.add.at(total, places, np.concatenate(uses))
        return found, total

    def _axis_uses(
        self, windows: ArrayWindows, axis: int, low: int, high: int
    ) -> tuple[Ints, Ints]:
        """Return the chunks that windows [low, high) touch along an axis, and how many windows
        touch each."""
        chunk, part, step = self.chunk[axis], windows.window[axis], windows.stride[axis]
        first, last = low * step // chunk, ((high - 1) * step + part - 1) // chunk
        if last - first >= MAX_TOUCHED:
            raise ValueError(_TOO_SMALL)
        places = np.arange(first, last + 1)
        begins = places * chunk
        least = np.maximum((begins - part) // step + 1, low)
        most = np.minimum(-(-(begins + chunk) // step), high)
        used = np.maximum(most - least, 0)
        return places[used > 0], used[used > 0]


def unit_rows(windows: ArrayWindows, grid: ChunkGrid, *, max_bytes: int, itemsize: int) -> Ints:
    """Return the lengths of runs of samples that share chunks, int64, shape (units,).

    A unit holds the windows that begin in the same chunks along the first axis, over all further
    axes. If a unit would take more than max_bytes, decoded, and no other window begins in its
    chunks, it is cut along the next axis. Raises ValueError for more than `MAX_UNITS` units.
    """
    counts, axis = windows.counts, 0
    while axis < len(counts) - 1:
        behind = zip(grid.counts[axis + 1 :], grid.chunk[axis + 1 :], strict=True)
        lengths = (*grid.chunk[: axis + 1], *(many * chunk for many, chunk in behind))
        is_shared = windows.stride[axis] < grid.chunk[axis] and counts[axis] > 1
        if is_shared or math.prod(lengths) * itemsize <= max_bytes:
            break
        axis += 1
    if math.prod(counts[:axis]) * min(grid.counts[axis], counts[axis]) > MAX_UNITS:
        raise ValueError(_TOO_SMALL)
    bounds = _first_windows(grid.chunk[axis], windows.stride[axis], grid.counts[axis], counts[axis])
    runs = np.diff(bounds) * (math.prod(counts[axis + 1 :]) * windows.repeat)
    return np.tile(runs, math.prod(counts[:axis])).astype(np.int64)


def _first_windows(chunk: int, stride: int, chunks: int, windows: int) -> Ints:
    """Return the first window that begins in each chunk in which one begins, and the end."""
    if windows <= chunks:  # a stride is about a chunk or more
        begins = np.arange(windows) * stride // chunk
        return np.append(np.flatnonzero(np.diff(begins, prepend=-1)), windows)
    firsts = -(-np.arange(chunks) * chunk // stride)
    return np.append(np.unique(firsts[firsts < windows]), windows)


def windows_of(
    shape: Shape,
    window: Window | None,
    stride: Window | None,
    *,
    what: str,
    is_named: bool = True,
    may_be_short: bool = False,
) -> ArrayWindows:
    """Return the windows of one array for the user's `sample=` and `stride=`.

    window: None for one step along the first axis. Axes that it doesn't name are whole. what: the
    array, for messages. is_named: True if the window was given for this array; otherwise it applies
    to all arrays, and an array of fewer axes uses its first lengths. may_be_short: True if the
    array may be too short for one window along its first axis. Raises ConfigError.
    """
    ones = (1,) * len(shape)
    if window is None:
        return ArrayWindows(shape=shape, window=(1, *shape[1:]), stride=ones, is_step=True)
    if len(window) > len(shape) and is_named:
        raise ConfigError(
            f"sample: got {window} for {what}, which has {len(shape)} axes: {shape}. Give at most "
            "one length for each axis."
        )
    parts = [*window[: len(shape)], *(None,) * (len(shape) - len(window))]
    steps = [*(stride or ())[: len(shape)], *(None,) * (len(shape) - len(stride or ()))]
    lengths = tuple(full if part is None else part for part, full in zip(parts, shape, strict=True))
    if may_be_short and lengths[0] > shape[0]:
        longest = (max(1, shape[0]), *shape[1:])
        return ArrayWindows(shape=(0, *shape[1:]), window=longest, stride=ones)
    if any(part > length for part, length in zip(lengths, shape, strict=True)):
        raise ConfigError(
            f"sample: got {window} for {what}, whose shape is {shape}: no such window fits. Give "
            "shorter lengths, or None for a whole axis."
        )
    pairs = zip(steps, lengths, strict=True)
    strides = tuple(max(1, length) if step is None else step for step, length in pairs)
    return ArrayWindows(shape=shape, window=lengths, stride=strides)


_LARGE_BYTES = 2**13
"""Larger samples are copied one by one: a statement for each costs less than the copy that an index
expression would make first."""


_MOST_HELD_BYTES = 2**17
"""Smaller samples are copied without releasing the GIL, for which a thread would wait longer than
the copy takes: with 49 kB a sample, two threads wait for one another a third less often."""


class PartCopier:
    """Copies parts of an array out of the chunks that they overlap.

    begins: start of each part, counted from the first element of a chunk that it overlaps, negative
    if it begins in an earlier chunk, int64, shape (n, dimensions). lengths: of a part. out: shape
    (…, *lengths). places: of the parts in out. chunk: shape of a chunk.
    """

    def __init__(
        self, begins: Ints, lengths: Shape, out: Numbers, places: Places, chunk: Shape
    ) -> None:
        self._begins, self._lengths, self._out = begins, lengths, out
        self._places = place_numbers(places, len(begins))
        self._run = places if isinstance(places, slice) and out.flags.c_contiguous else None
        # Each part is one step of a chunk, which is whole along all other axes.
        self.are_steps = lengths == (1, *chunk[1:]) and not begins[:, 1:].any()
        self._row_bytes = size = math.prod(lengths) * out.itemsize
        self._are_small = size < _LARGE_BYTES
        self._bytes: memoryview | None = None
        if self.are_steps and _LARGE_BYTES <= size <= _MOST_HELD_BYTES and out.flags.c_contiguous:
            self._bytes = out.reshape(-1).view(np.uint8).data
            self._firsts: list[int] = (self._places * size).tolist()
            self._steps: list[int] = (begins[:, 0] * size).tolist()

    def copy(self, chunk: Numbers, low: int, high: int) -> None:
        """Copy from a chunk its overlap with the parts [low, high)."""
        begins, out = self._begins, self._out
        if self.are_steps:
            run, are_like = self._run, chunk.dtype == out.dtype and chunk.flags.c_contiguous
            if run is not None and high - low == len(begins) and are_like:
                # The steps are valid; with a mode other than "raise", numpy writes to the slots.
                chunk.take(begins[:, 0], axis=0, out=out[run][:, 0], mode="clip")
            elif are_like and self._bytes is not None:
                data, into = chunk.reshape(-1).view(np.uint8).data, self._bytes
                size = self._row_bytes
                for place in range(low, high):
                    first, step = self._firsts[place], self._steps[place]
                    into[first : first + size] = data[step : step + size]
            elif self._are_small:
                out[self._places[low:high], 0] = chunk[begins[low:high, 0]]
            else:
                places, steps = self._places[low:high].tolist(), begins[low:high, 0].tolist()
                for place, step in zip(places, steps, strict=True):
                    out[place, 0] = chunk[step]
            return
        begins = begins[low:high]
        if self._are_small and high - low > 1:
            last = np.array(chunk.shape, np.int64) - np.array(self._lengths, np.int64)
            if ((begins >= 0) & (begins <= last)).all():
                windows = sliding_window_view(chunk, self._lengths)
                out[self._places[low:high]] = windows[tuple(begins.T)]
                return
        for place, begin in zip(self._places[low:high].tolist(), begins.tolist(), strict=True):
            _copy_overlap(chunk, begin, self._lengths, out[place])


def _copy_overlap(
    chunk: Numbers, begin: Sequence[int], lengths: Sequence[int], part: Numbers
) -> None:
    """Copy the overlap of one part and the chunk."""
    into, source = [], []
    for low, length, size in zip(begin, lengths, chunk.shape, strict=True):
        into.append(slice(max(0, -low), min(length, size - low)))
        source.append(slice(max(0, low), min(size, low + length)))
    part[tuple(into)] = chunk[tuple(source)]


def mark(wrong: dict[int, str], rows: Ints, reason: str) -> None:
    """Give a reason to the rows that have none yet."""
    for row in rows.tolist():
        wrong.setdefault(row, reason)


def place_numbers(places: Places, count: int) -> Ints:
    """Return places in a batch as numbers."""
    if isinstance(places, slice):
        return np.arange(*places.indices(places.stop if places.stop is not None else count))
    return np.asarray(places, np.int64)


_MAX_RANGES = 4096
RANGE_COST_BYTES = 2**16
"""The cost of one more range, expressed as unneeded bytes that could be read in the same time."""

DIRECT_BYTES = 2**14
"""Parts of at least this size that are one range are read directly into their slots."""


class PartRanges:
    """Computes the byte ranges that cover parts of one shape in an array of bare numbers.

    A part takes one range, or one range for each run of consecutive numbers, whichever costs less.
    shape: of the array, row-major. lengths: of a part, along each axis.
    """

    def __init__(self, shape: Shape, dtype: np.dtype[Any], lengths: Sequence[int]) -> None:
        self._dtype, self._lengths, item = dtype, tuple(lengths), dtype.itemsize
        self._strides = [math.prod(shape[axis + 1 :]) * item for axis in range(len(shape))]
        # One range covers this axis and all behind it; each step along the others is a range.
        axes = [n for n in range(len(shape) + 1) if math.prod(lengths[:n]) <= _MAX_RANGES]
        self._axis = axis = min(axes, key=self._cost)
        self._range_bytes = self._covered_bytes(axis)
        steps = np.indices(self._lengths[:axis]).reshape(axis, math.prod(lengths[:axis]))
        self._offsets: Ints = np.array(self._strides[:axis], np.int64) @ steps

    def read_into(
        self, data: ShardData, extents: Sequence[int], starts: Ints, out: Numbers, places: Ints
    ) -> bool:
        """Read parts directly into out[places]; return False, without effect, unless each part is
        exactly one range that is large enough for a read of its own.

        extents: of each part. Raises the errors of `ShardData.read_into`.
        """
        size_bytes = math.prod(self._lengths) * self._dtype.itemsize
        is_one_range = not self._axis and self._range_bytes == size_bytes >= DIRECT_BYTES
        if not is_one_range or out.dtype != self._dtype or not out[:1].flags.c_contiguous:
            return False
        flat = out.reshape(len(out), -1).view(np.uint8)
        data.read_into(extents, self.bounds(starts)[0], [flat[place] for place in places.tolist()])
        return True

    def _covered_bytes(self, axis: int) -> int:
        """Return the bytes from the first to the last number of one range that covers this axis and
        all behind it."""
        axes = zip(self._lengths[axis:], self._strides[axis:], strict=True)
        return sum((length - 1) * stride for length, stride in axes) + self._dtype.itemsize

    def _cost(self, axis: int) -> int:
        ranges = math.prod(self._lengths[:axis])
        return ranges * (self._covered_bytes(axis) + RANGE_COST_BYTES)

    def bounds(self, starts: Ints) -> tuple[list[int], list[int]]:
        """Return the first and end bytes of the ranges of the parts that begin at these places,
        part by part."""
        strides = np.array(self._strides, np.int64)
        begins = ((starts @ strides)[:, None] + self._offsets).reshape(-1)
        return begins.tolist(), (begins + self._range_bytes).tolist()

    def copy(self, encoded: Iterator[Encoded], slot: Numbers) -> None:
        """Copy the ranges of the next part into its slot."""
        inner, strides = self._lengths[self._axis :], tuple(self._strides[self._axis :])
        for place in np.ndindex(self._lengths[: self._axis]):
            slot[place] = np.ndarray(inner, self._dtype, next(encoded).data, 0, strides)
