"""Resize, mirror, normalise and turn HWC to CHW in one pass over the pixels, compiled by numba.

DALI's three passes take about half of the time that it spends on an image; this pass takes a fifth
of theirs, since it writes no intermediate images and blends only the necessary rows. It is
compiled at the first import on a machine (some seconds), and numba keeps the result next to this
file, or in the user's cache folder if this one is read-only.

A resize blends the source pixels around the output pixel's centre c = low + (i + 0.5) * scale - 0.5
with a triangle's weights max(0, 1 - |j - c| / radius), radius = max(1, scale) with antialiasing
and 1 without; or with those of Pillow's BICUBIC, a cubic (a = -0.5) of twice this radius, whose
results are clipped to 0..255. Pixels beyond the edge have no weight, and the weights of the others
are divided by their sum, as in torchvision, torch's `interpolate` and Pillow. DALI's
`fn.resize(interp_type=INTERP_LINEAR)` repeats the edge pixel instead, which gives the outermost
pixels of an image or a window other values. Sums are float32, the tables float64.

The functions that DALI's threads call have the arguments of its NumbaFunction, four for outputs and
four for inputs: addresses of their arrays, of their shapes and of their dimensions, and their
number. The inputs of `resample` in their order:
- image: uint8, HWC;
- low, high: the region of the image to resize, float32, (y, x) in pixels; high of 0: all of it;
- numbers: int32, (10,): the kind of filter, 1 with antialiasing, and 2 more for a cubic; 1 to flip
  it upside down, or left to right; top, left, height and width of the resized image in the output;
  height and width of the window around it; the kind of output: PLANES (float32, CHW, normalised),
  OCTETS (uint8, CHW) or PIXELS (uint8, HWC);
- like: uint8, whose shape is the output's (height, width, 0), without memory;
- norm: float32, (channels + 1, 2): factor and summand that normalise each channel, then the value
  of the window around the image, in units of pixels, and of the padding around the window, in units
  of the output.
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
_LIKE = 4  # the input whose shape is the output's
PLANES, OCTETS, PIXELS = 0, 1, 2
CUBIC = 2


def _compiled(signature: Any) -> Callable[[Any], Any]:
    def compile_it(function: Any) -> Any:
        try:
            return cfunc(signature, cache=True)(function)
        except RuntimeError:  # no writable folder: each process compiles
            return cfunc(signature)(function)

    return compile_it


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@njit
def _words(address: Any, count: Any) -> Any:
    return carray(_pointer(address), count, np.int64)


@njit
def _weight(distance: Any, cubic: Any) -> Any:
    """Return the weight of a pixel at a distance from the center, in pixels of the output if they
    are the larger ones."""
    x = abs(distance)
    if not cubic:
        return max(0.0, 1.0 - x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0


@njit
def _taps(low: Any, high: Any, size: Any, resized: Any, kind: Any) -> Any:
    """Return for each output pixel its first source pixel, int64 (resized,), and the weights of
    this and the following ones, float32 (taps, resized); at most as many taps as source pixels."""
    scale, cubic = (high - low) / resized, kind >= CUBIC
    stretch = max(1.0, scale) if kind % CUBIC else 1.0
    radius = 2 * stretch if cubic else stretch
    count = int(2 * radius) if stretch == 1.0 else int(np.ceil(2 * radius)) + 1
    first = np.empty(resized, np.int64)
    weights = np.zeros((min(count, size), resized), np.float32)
    for i in range(resized):
        center = low + (i + 0.5) * scale - 0.5
        start = int(np.floor(center - radius)) + 1
        begin, end = max(start, 0), min(start + count, size)
        total = 0.0
        for place in range(begin, end):
            total += _weight((place - center) / stretch, cubic)
        first[i] = min(begin, max(size - count, 0))
        for place in range(begin, end):
            weight = _weight((place - center) / stretch, cubic) / total
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
def _add_two(row: Any, source: Any, other: Any, a: Any, b: Any) -> None:
    for i in range(row.size):
        row[i] = (row[i] + np.float32(source[i]) * a) + np.float32(other[i]) * b


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
def _across_rgb_filtered(red: Any, green: Any, blue: Any, row: Any, at: Any, weights: Any) -> None:
    """Compute three channels with more taps, two at a time, as `_across` would."""
    one, two = np.uint64(1), np.uint64(2)
    first = weights[0]
    for i in range(red.size):
        t, a = at[i], first[i]
        red[i], green[i], blue[i] = row[t] * a, row[t + one] * a, row[t + two] * a
    taps = weights.shape[0]
    for k in range(1, taps - 1, 2):
        left, right = weights[k], weights[k + 1]
        here, there = np.uint64(3 * k), np.uint64(3 * k + 3)
        for i in range(red.size):
            t, u, a, b = at[i] + here, at[i] + there, left[i], right[i]
            red[i] = (red[i] + row[t] * a) + row[u] * b
            green[i] = (green[i] + row[t + one] * a) + row[u + one] * b
            blue[i] = (blue[i] + row[t + two] * a) + row[u + two] * b
    if taps % 2 == 0:
        last, here = weights[taps - 1], np.uint64(3 * taps - 3)
        for i in range(red.size):
            t, a = at[i] + here, last[i]
            red[i] += row[t] * a
            green[i] += row[t + one] * a
            blue[i] += row[t + two] * a


@njit(fastmath=_MATH)
def _clip(values: Any) -> None:
    for i in range(values.size):
        values[i] = min(max(values[i], np.float32(0)), np.float32(255))


@njit(fastmath=_MATH)
def _scaled(out: Any, values: Any, factor: Any, summand: Any) -> None:
    for i in range(out.size):
        out[i] = np.rint(values[i]) * factor + summand


@njit(fastmath=_MATH)
def _bytes(out: Any, values: Any) -> None:
    for i in range(out.size):
        out[i] = np.uint8(np.int32(np.rint(values[i])))


@njit(fastmath=_MATH)
def _rounded(out: Any, values: Any, channel: Any, channels: Any) -> None:
    """Write values into every `channels`th byte, rounded half up. Weights sum to 1, so values
    leave 0..255 only by rounding."""
    for i in range(values.size):
        out[i * channels + channel] = np.uint8(np.int32(np.rint(values[i])))


@njit(fastmath=_MATH)
def _rounded_rgb(out: Any, red: Any, green: Any, blue: Any) -> None:
    """Write three channels, rounded half up."""
    for i in range(red.size):
        out[3 * i] = np.uint8(np.int32(np.rint(red[i])))
        out[3 * i + 1] = np.uint8(np.int32(np.rint(green[i])))
        out[3 * i + 2] = np.uint8(np.int32(np.rint(blue[i])))


@njit(fastmath=_MATH)
def _split(red: Any, green: Any, blue: Any, row: Any) -> None:
    """Divide pixels of three channels into planes."""
    for i in range(red.size):
        red[i], green[i], blue[i] = row[3 * i], row[3 * i + 1], row[3 * i + 2]


@njit
def _is_copy(low: Any, high: Any, resized: Any) -> Any:
    """Return True if a resize along an axis copies pixels."""
    return high - low == resized and low == np.floor(low)


@njit(fastmath=_MATH)
def _copy(image: Any, region: Any, flips: Any, place: Any, planes: Any) -> None:
    """Copy a region of three channels into planes of bytes."""
    top, left, rows, columns = place
    width = image.shape[1]
    flat = image.reshape(image.size)
    for y in range(rows):
        from_y = int(region[0]) + (rows - 1 - y if flips[0] else y)
        begin = 3 * (from_y * width + int(region[1]))
        red = planes[0, top + y, left : left + columns]
        green = planes[1, top + y, left : left + columns]
        blue = planes[2, top + y, left : left + columns]
        _split(red, green, blue, flat[begin : begin + 3 * columns])
        if flips[1]:
            for plane in (red, green, blue):
                for i in range(columns // 2):
                    j = columns - 1 - i
                    plane[i], plane[j] = plane[j], plane[i]


@njit(fastmath=_MATH)
def _resample(
    image: Any, region: Any, kind: Any, flips: Any, place: Any, out: Any, norm: Any
) -> None:
    """Resample a region into a part of the output.

    kind: of filter. flips: upside down, left to right. place: top, left, height and width of the
    part. out: planes (float32, CHW, normalised), planes of bytes (uint8, CHW), and pixels (uint8,
    HW by C); all but one are empty.
    """
    planes, octets, pixels = out
    height, width, channels = image.shape
    top, left, rows, columns = place
    is_copy = _is_copy(region[0], region[2], rows) and _is_copy(region[1], region[3], columns)
    if is_copy and octets.size and channels == 3:
        _copy(image, region, flips, place, octets)
        return
    from_y, weights_y = _taps(region[0], region[2], height, rows, kind)
    from_x, weights_x = _taps(region[1], region[3], width, columns, kind)
    taps_y, taps_x = weights_y.shape[0], weights_x.shape[0]
    begin = from_x[0] * channels
    length = (from_x[columns - 1] + taps_x) * channels - begin
    at = np.empty((channels, columns), np.uint64)
    across = np.empty((taps_x, columns), np.float32)
    for i in range(columns):
        j = columns - 1 - i if flips[1] else i
        for channel in range(channels):
            at[channel, i] = np.uint64(from_x[j] * channels - begin + channel)
        for k in range(taps_x):
            across[k, i] = weights_x[k, j]
    flat = image.reshape(image.size)  # numba knows that its slices are contiguous
    row = np.empty(length, np.float32)
    lines = np.empty((channels, columns), np.float32)
    for line in range(rows):
        y = rows - 1 - line if flips[0] else line
        low = from_y[y] * width * channels + begin
        if taps_y == 2:
            next_low = low + width * channels
            above, below = flat[low : low + length], flat[next_low : next_low + length]
            _blend(row, above, below, weights_y[0, y], weights_y[1, y])
        else:
            _begin(row, flat[low : low + length], weights_y[0, y])
            for k in range(1, taps_y - 1, 2):
                a, b = weights_y[k, y], weights_y[k + 1, y]
                low += width * channels
                next_low = low + width * channels
                if a != 0 or b != 0:
                    above, below = flat[low : low + length], flat[next_low : next_low + length]
                    _add_two(row, above, below, a, b)
                low = next_low
            if taps_y % 2 == 0 and weights_y[taps_y - 1, y] != 0:
                low += width * channels
                _add(row, flat[low : low + length], weights_y[taps_y - 1, y])
        if taps_x == 2 and channels == 3:
            _across_rgb(lines[0], lines[1], lines[2], row, at[0], across[0], across[1])
        elif channels == 3:
            _across_rgb_filtered(lines[0], lines[1], lines[2], row, at[0], across)
        else:
            for channel in range(channels):
                _across(lines[channel], row, at[channel], across, channels)
        if kind >= CUBIC:
            for channel in range(channels):
                _clip(lines[channel])
        to = top + line
        if pixels.size and channels == 3:
            end = pixels[to, left * 3 : (left + columns) * 3]
            _rounded_rgb(end, lines[0], lines[1], lines[2])
            continue
        for channel in range(channels):
            if planes.size:
                end = planes[channel, to, left : left + columns]
                _scaled(end, lines[channel], norm[channel, 0], norm[channel, 1])
            elif octets.size:
                _bytes(octets[channel, to, left : left + columns], lines[channel])
            else:
                end = pixels[to, left * channels : (left + columns) * channels]
                _rounded(end, lines[channel], channel, channels)


@njit
def _surround(plane: Any, place: Any, window: Any, fill: Any, pad: Any) -> None:
    """Fill what lies around a part of a plane, or of pixels, (rows, values).

    place: top, left, height and width of the part. window: height and width of the window around
    it, which gets `fill`; the rest gets `pad`.
    """
    top, left, rows, columns = place
    for y in range(plane.shape[0]):
        if y >= window[0]:
            plane[y] = pad
            continue
        if top <= y < top + rows:
            plane[y, :left] = fill
            plane[y, left + columns : window[1]] = fill
        else:
            plane[y, : window[1]] = fill
        plane[y, window[1] :] = pad


@njit
def _image(given: Any, shapes: Any, ins: Any) -> Any:
    """Return the first input, uint8 HWC."""
    dims = _words(_words(shapes, ins)[0], 3)
    return carray(_pointer(_words(given, ins)[0]), (dims[0], dims[1], dims[2]), np.uint8)


@_compiled(_RUN)
def resample(
    out: Any, sizes: Any, _o: Any, outs: Any, given: Any, shapes: Any, _i: Any, ins: Any
) -> None:
    """Turn one sample into a part of its output, and fill the rest."""
    places = _words(given, ins)
    image = _image(given, shapes, ins)
    channels = image.shape[2]
    start = carray(_pointer(places[1]), 2, np.float32)
    end = carray(_pointer(places[2]), 2, np.float32)
    region = np.empty(4)
    for k in range(2):
        region[k] = start[k]
        region[k + 2] = end[k] if end[k] > 0 else image.shape[k]
    numbers = carray(_pointer(places[3]), 10, np.int32)
    dims = _words(_words(shapes, ins)[_LIKE], 3)
    norm = carray(_pointer(places[5]), (channels + 1, 2), np.float32)
    height, width, kind = dims[0], dims[1], numbers[9]
    window = (numbers[7], numbers[8])
    flips = (numbers[1] != 0, numbers[2] != 0)
    place = (numbers[3], numbers[4], numbers[5], numbers[6])
    address = _pointer(_words(out, outs)[0])
    none = (0, 0, 0)
    planes = carray(address, (channels, height, width) if kind == PLANES else none, np.float32)
    octets = carray(address, (channels, height, width) if kind == OCTETS else none, np.uint8)
    pixels = carray(address, (height, width * channels) if kind == PIXELS else (0, 0), np.uint8)
    if place[2] > 0 and place[3] > 0:
        found = (planes, octets, pixels)
        _resample(image, region, numbers[0], flips, place, found, norm)
    if place[2] == height and place[3] == width:
        return
    fill, pad = norm[channels, 0], norm[channels, 1]
    for channel in range(planes.shape[0]):
        value = fill * norm[channel, 0] + norm[channel, 1]
        _surround(planes[channel], place, window, value, pad)
    for channel in range(octets.shape[0]):
        _surround(octets[channel], place, window, fill, pad)
    if pixels.size:
        wide = (place[0], place[1] * channels, place[2], place[3] * channels)
        _surround(pixels, wide, (window[0], window[1] * channels), fill, pad)


@njit
def _set_shapes(out_shapes: Any, in_shapes: Any, ins: Any, samples: Any, is_planes: Any) -> None:
    """Set the shape of each sample's output to height and width of its `like`, and the channels of
    its image."""
    shapes, given = _words(out_shapes, samples), _words(in_shapes, ins * samples)
    for i in range(samples):
        shape, like = _words(shapes[i], 3), _words(given[_LIKE * samples + i], 3)
        shape[0 if is_planes else 2] = _words(given[i], 3)[2]
        for k in range(2):
            shape[k + 1 if is_planes else k] = like[k]


@_compiled(_SETUP)
def shape_of_planes(
    out_shapes: Any, _o: Any, outs: Any, in_shapes: Any, _i: Any, ins: Any, samples: Any
) -> None:
    """Set the shapes of outputs in CHW."""
    _set_shapes(out_shapes, in_shapes, ins, samples, True)


@_compiled(_SETUP)
def shape_of_pixels(
    out_shapes: Any, _o: Any, outs: Any, in_shapes: Any, _i: Any, ins: Any, samples: Any
) -> None:
    """Set the shapes of outputs in HWC."""
    _set_shapes(out_shapes, in_shapes, ins, samples, False)


@_compiled(_SETUP)
def shape_of_image(
    out_shapes: Any, _o: Any, outs: Any, in_shapes: Any, _i: Any, ins: Any, samples: Any
) -> None:
    """Set the shape of each sample's output to that of its image, the only input."""
    shapes, given = _words(out_shapes, samples), _words(in_shapes, ins * samples)
    for i in range(samples):
        shape, like = _words(shapes[i], 3), _words(given[i], 3)
        for k in range(3):
            shape[k] = like[k]


@njit
def _equal_levels(counts: Any) -> Any:
    """Return the new level of each level, as Pillow equalizes a histogram, uint8, (256,)."""
    step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    levels, below = np.arange(256).astype(np.uint8), step // 2
    for level in range(256):
        if step > 0:
            levels[level] = min(below // step, 255)
        below += counts[level]
    return levels


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
        levels = _equal_levels(counts)
        for y in range(image.shape[0]):
            for x in range(image.shape[1]):
                equal[y, x, channel] = levels[image[y, x, channel]]
