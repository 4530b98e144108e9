"""Resize, mirror, normalise and turn HWC to CHW in one pass over the pixels, compiled by numba.

DALI's three passes take about half of the time that it spends on an image; this pass takes a fifth
of theirs, since it writes no intermediate images and blends only the necessary rows. It is
compiled at the first import on a machine (some seconds), and numba keeps the result next to this
file, or in the user's cache folder if this one is read-only.

A resize blends the source pixels around the output pixel's centre c = low + (i + 0.5) * scale - 0.5
with a triangle's weights max(0, 1 - |j - c| / radius), radius = max(1, scale) with antialiasing
and 1 without. Pixels beyond the edge have no weight, and the weights of the others are divided by
their sum, as in torchvision, torch's `interpolate` and Pillow's BILINEAR. DALI's
`fn.resize(interp_type=INTERP_LINEAR)` repeats the edge pixel instead, which gives the outermost
pixels of an image or a window other values. Sums are float32, the tables float64.

The functions that DALI's threads call have the arguments of its NumbaFunction, four for outputs and
four for inputs: addresses of their arrays, of their shapes and of their dimensions, and their
number. The inputs in their order: image (uint8, HWC); low and high, the region of the image
to resize (float32, (y, x) in pixels; high of 0: the full image); filtered (bool): antialias; mirror
(int32); like: float32 of the output's shape, whose first values are, for each channel, the factor
and the summand that normalise it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

# Multiply and add in one instruction; no other part of numba's fastmath, so that infinite values
# and the order of sums are kept.
_MATH = {"contract", "nsz"}
_RUN = types.void(*[types.uint64, types.uint64, types.uint64, types.int32] * 2)
_SETUP = types.void(
    types.uint64, types.uint64, types.int32, types.uint64, types.uint64, types.int32, types.int32
)
_LIKE = 5  # the input whose shape is the output's


def _compiled(signature: Any) -> Callable[[Any], Any]:
    def compile_it(function: Any) -> Any:
        try:
            return cfunc(signature, cache=True)(function)
        except RuntimeError:  # no writable folder: each process compiles
            return cfunc(signature)(function)

    return compile_it


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    del typing, address

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@njit
def _words(address: Any, count: Any) -> Any:
    return carray(_pointer(address), count, np.int64)


@njit
def _taps(low: Any, high: Any, size: Any, resized: Any, filtered: Any) -> Any:
    """Return for each output pixel its first source pixel, int64 (resized,), and the weights of
    this and the following ones, float32 (taps, resized); at most as many taps as source pixels."""
    scale = (high - low) / resized
    radius = max(1.0, scale) if filtered else 1.0
    count = 2 if radius == 1.0 else int(np.ceil(2 * radius)) + 1
    first = np.empty(resized, np.int64)
    weights = np.zeros((min(count, size), resized), np.float32)
    for i in range(resized):
        center = low + (i + 0.5) * scale - 0.5
        start = int(np.floor(center - radius)) + 1
        begin, end = max(start, 0), min(start + count, size)
        total = 0.0
        for place in range(begin, end):
            total += max(0.0, 1.0 - abs(place - center) / radius)
        first[i] = min(begin, max(size - count, 0))
        for place in range(begin, end):
            weight = max(0.0, 1.0 - abs(place - center) / radius) / total
            weights[place - first[i], i] = np.float32(weight)
    return first, weights


@njit(fastmath=_MATH)
def _blend(row: Any, above: Any, below: Any, a: Any, b: Any) -> None:
    for i in range(row.size):
        row[i] = np.float32(above[i]) * a + np.float32(below[i]) * b


@njit(fastmath=_MATH)
def _begin(row: Any, source: Any, weight: Any) -> None:
    for i in range(row.size):
        row[i] = np.float32(source[i]) * weight


@njit(fastmath=_MATH)
def _add(row: Any, source: Any, weight: Any) -> None:
    for i in range(row.size):
        row[i] += np.float32(source[i]) * weight


@njit(fastmath=_MATH)
def _across(out: Any, row: Any, at: Any, weights: Any, step: Any) -> None:
    """Compute one channel: out[i] = sum over k of row[at[i] + k * step] * weights[k, i]."""
    first = weights[0]
    for i in range(out.size):
        out[i] = row[at[i]] * first[i]
    for k in range(1, weights.shape[0]):
        more, offset = weights[k], np.uint64(k * step)
        for i in range(out.size):
            out[i] += row[at[i] + offset] * more[i]


@njit(fastmath=_MATH)
def _across_rgb(red: Any, green: Any, blue: Any, row: Any, at: Any, left: Any, right: Any) -> None:
    """Compute three channels with two taps, by far the most frequent case."""
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    four, five = np.uint64(4), np.uint64(5)
    for i in range(red.size):
        t, a, b = at[i], left[i], right[i]
        red[i] = row[t] * a + row[t + three] * b
        green[i] = row[t + one] * a + row[t + four] * b
        blue[i] = row[t + two] * a + row[t + five] * b


@njit(fastmath=_MATH)
def _scaled(out: Any, values: Any, factor: Any, summand: Any) -> None:
    for i in range(out.size):
        out[i] = np.rint(values[i]) * factor + summand


@njit(fastmath=_MATH)
def _rounded(out: Any, values: Any, channel: Any, channels: Any) -> None:
    """Write values into every `channels`th byte, rounded half up. Weights sum to 1, so values
    leave 0..255 only by rounding."""
    for i in range(values.size):
        out[i * channels + channel] = np.uint8(np.int32(np.rint(values[i])))


@njit(fastmath=_MATH)
def _resample(
    image: Any, region: Any, filtered: Any, mirror: Any, planes: Any, pixels: Any, norm: Any
) -> None:
    """Resample into planes (float32, CHW, normalised), or into pixels (uint8, HW by C) if planes is
    empty."""
    height, width, channels = image.shape
    in_planes = planes.size > 0
    rows = planes.shape[1] if in_planes else pixels.shape[0]
    columns = planes.shape[2] if in_planes else pixels.shape[1] // channels
    from_y, weights_y = _taps(region[0], region[2], height, rows, filtered)
    from_x, weights_x = _taps(region[1], region[3], width, columns, filtered)
    taps_y, taps_x = weights_y.shape[0], weights_x.shape[0]
    begin = from_x[0] * channels
    length = (from_x[columns - 1] + taps_x) * channels - begin
    at = np.empty((channels, columns), np.uint64)
    across = np.empty((taps_x, columns), np.float32)
    for i in range(columns):
        j = columns - 1 - i if mirror else i
        for channel in range(channels):
            at[channel, i] = np.uint64(from_x[j] * channels - begin + channel)
        for k in range(taps_x):
            across[k, i] = weights_x[k, j]
    flat = image.reshape(image.size)  # numba knows that its slices are contiguous
    row = np.empty(length, np.float32)
    lines = np.empty((channels, columns), np.float32)
    for y in range(rows):
        low = from_y[y] * width * channels + begin
        if taps_y == 2:
            next_low = low + width * channels
            above, below = flat[low : low + length], flat[next_low : next_low + length]
            _blend(row, above, below, weights_y[0, y], weights_y[1, y])
        else:
            _begin(row, flat[low : low + length], weights_y[0, y])
            for k in range(1, taps_y):
                low += width * channels
                if weights_y[k, y] != 0:
                    _add(row, flat[low : low + length], weights_y[k, y])
        if taps_x == 2 and channels == 3:
            _across_rgb(lines[0], lines[1], lines[2], row, at[0], across[0], across[1])
        else:
            for channel in range(channels):
                _across(lines[channel], row, at[channel], across, channels)
        for channel in range(channels):
            if in_planes:
                _scaled(planes[channel, y], lines[channel], norm[channel, 0], norm[channel, 1])
            else:
                _rounded(pixels[y], lines[channel], channel, channels)


@njit
def _image(given: Any, shapes: Any, ins: Any) -> Any:
    """Return the first input, uint8 HWC."""
    dims = _words(_words(shapes, ins)[0], 3)
    return carray(_pointer(_words(given, ins)[0]), (dims[0], dims[1], dims[2]), np.uint8)


@njit
def _arguments(given: Any, shapes: Any, ins: Any) -> Any:
    """Return the image, the region as (low y, low x, high y, high x), float64, antialias, mirror,
    the shape of the output, and the address of the last input."""
    places = _words(given, ins)
    image = _image(given, shapes, ins)
    start = carray(_pointer(places[1]), 2, np.float32)
    end = carray(_pointer(places[2]), 2, np.float32)
    region = np.empty(4)
    for k in range(2):
        region[k] = start[k]
        region[k + 2] = end[k] if end[k] > 0 else image.shape[k]
    filtered = carray(_pointer(places[3]), 1, np.uint8)[0] != 0
    mirror = carray(_pointer(places[4]), 1, np.int32)[0] != 0
    dims = _words(_words(shapes, ins)[_LIKE], 3)
    return image, region, filtered, mirror, (dims[0], dims[1], dims[2]), places[_LIKE]


@_compiled(_RUN)
def to_planes(
    out: Any, sizes: Any, _o: Any, outs: Any, given: Any, shapes: Any, _i: Any, ins: Any
) -> None:
    """Turn one sample into float32 CHW, normalised."""
    image, region, filtered, mirror, shape, like = _arguments(given, shapes, ins)
    planes = carray(_pointer(_words(out, outs)[0]), shape, np.float32)
    norm = carray(_pointer(like), (shape[0], 2), np.float32)
    _resample(image, region, filtered, mirror, planes, np.empty((0, 0), np.uint8), norm)


@_compiled(_RUN)
def to_pixels(
    out: Any, sizes: Any, _o: Any, outs: Any, given: Any, shapes: Any, _i: Any, ins: Any
) -> None:
    """Turn one sample into uint8 HWC."""
    image, region, filtered, mirror, shape, _ = _arguments(given, shapes, ins)
    size = (shape[0], shape[1] * shape[2])
    pixels = carray(_pointer(_words(out, outs)[0]), size, np.uint8)
    none = np.empty((0, 0, 0), np.float32)
    _resample(image, region, filtered, mirror, none, pixels, np.empty((0, 2), np.float32))


@_compiled(_SETUP)
def shape_like(
    out_shapes: Any, _o: Any, outs: Any, in_shapes: Any, _i: Any, ins: Any, samples: Any
) -> None:
    """Set the shape of each sample's output to that of its last input."""
    shapes, given = _words(out_shapes, samples), _words(in_shapes, ins * samples)
    for i in range(samples):
        shape, like = _words(shapes[i], 3), _words(given[(ins - 1) * samples + i], 3)
        for k in range(3):
            shape[k] = like[k]


@_compiled(_RUN)
def equalize(
    out: Any, sizes: Any, _o: Any, outs: Any, given: Any, shapes: Any, _i: Any, ins: Any
) -> None:
    """Equalize the histogram of each channel of one sample, uint8 HWC, as Pillow does."""
    image = _image(given, shapes, ins)
    equal = carray(_pointer(_words(out, outs)[0]), image.shape, np.uint8)
    for channel in range(image.shape[2]):
        counts = np.zeros(256, np.int64)
        for pixel in image[:, :, channel].flat:
            counts[pixel] += 1
        step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        table, below = np.arange(256).astype(np.uint8), step // 2
        for level in range(256):
            if step > 0:
                table[level] = min(below // step, 255)
            below += counts[level]
        for y in range(image.shape[0]):
            for x in range(image.shape[1]):
                equal[y, x, channel] = table[image[y, x, channel]]
