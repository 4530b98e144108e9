"""Make views of one decoded image: resize, change pixels and normalise each, compiled by numba.

A view that DALI's operators make takes a pass over memory for each of them, and 25 for a change of
hue. Here each view stays in the cache of a core while its operations are applied one after the
other: planes of float32, whose values are whole numbers from 0 to 255 between operations, as if
they were stored as bytes. DINO's ten views of a photograph take a fifth of DALI's time.

The function that DALI's threads call has the arguments that `resample_kernels` describes. Its
inputs in their order: image (uint8, HWC); numbers (float32, (views, numbers of a view)); programs
(float32, (views, passes)): the codes of the passes of each view, or NO_PASS; like: as for
`resample_kernels`. The numbers of a view are HEADER, and then for each pass 1 if it is applied and
the arguments that `PASSES` counts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit

from penstock.augment import resample_kernels as kernels

HEADER = 12
"""The numbers of a view in front of those of its passes: top, left, height and width of a window of
the image; low y, low x, high y and high x of the region of the window that is resized; its kind
of filter, as for `resample_kernels`; whether it is turned upside down, and mirrored left to right;
whether all views are bytes. Zeros stand for the full image and the full window."""

NO_PASS = -1

PASSES = {
    "jitter": (0, 4),
    "gray": (1, 0),
    "blur": (2, 3),
    "solarize": (3, 1),
    "posterize": (4, 1),
    "autocontrast": (5, 0),
    "equalize": (6, 0),
}
"""The code of each pass, and the number of its arguments."""

_WIDTHS = np.array([width for _, width in PASSES.values()])
_JITTER, _GRAY, _BLUR, _SOLARIZE, _POSTERIZE, _AUTOCONTRAST, _EQUALIZE = range(len(PASSES))
_MATH = {"contract", "nsz"}  # as in `resample_kernels`
# numba's cache compares only this file and the function's own variables: a change of the other one
# must be a change of these.
_RESAMPLING = int.from_bytes(
    hashlib.blake2b(Path(kernels.__file__).read_bytes(), digest_size=6).digest(), "little"
)
_words, _pointer, _image = kernels._words, kernels._pointer, kernels._image
_resample, _begin, _scaled = kernels._resample, kernels._begin, kernels._scaled


@njit(fastmath=_MATH)
def _clipped(value: Any) -> Any:
    return min(max(np.rint(value), np.float32(0)), np.float32(255))


@njit(fastmath=_MATH)
def _luma(red: Any, green: Any, blue: Any) -> Any:
    one, two, three = np.float32(0.299), np.float32(0.587), np.float32(0.114)
    return np.rint(one * red + two * green + three * blue)


@njit(fastmath=_MATH)
def _stretch(plane: Any, factor: Any, middle: Any) -> None:
    for i in range(plane.size):
        plane[i] = _clipped((plane[i] - middle) * factor + middle)


@njit(fastmath=_MATH)
def _mean(planes: Any) -> Any:
    """Return the mean of the luma, or of the only plane."""
    total, count = 0.0, planes.shape[1]
    for begin in range(0, count, 4096):  # sums of whole numbers, which the compiler vectorises
        part = np.int32(0)
        if planes.shape[0] == 3:
            red, green, blue = planes[0], planes[1], planes[2]
            for i in range(begin, min(begin + 4096, count)):
                part += np.int32(_luma(red[i], green[i], blue[i]))
        else:
            gray = planes[0]
            for i in range(begin, min(begin + 4096, count)):
                part += np.int32(gray[i])
        total += part
    return np.float32(total / count)


@njit(fastmath=_MATH)
def _saturate(red: Any, green: Any, blue: Any, factor: Any) -> None:
    rest = np.float32(1) - factor
    for i in range(red.size):
        gray = np.rint(rest * _luma(red[i], green[i], blue[i]))
        red[i] = _clipped(np.rint(red[i] * factor) + gray)
        green[i] = _clipped(np.rint(green[i] * factor) + gray)
        blue[i] = _clipped(np.rint(blue[i] * factor) + gray)


@njit(fastmath=_MATH)
def _shifted(hue: Any, high: Any, chroma: Any, turn: Any) -> Any:
    away = abs(abs(hue + np.rint(chroma * turn)) - np.float32(3) * chroma) - chroma
    return high - min(max(away, np.float32(0)), chroma)


@njit(fastmath=_MATH)
def _turn_hue(red: Any, green: Any, blue: Any, one: Any, two: Any, three: Any) -> None:
    """Shift the hue, as `pixel_operations.ColorJitter` describes. one, two, three: the turns of the
    channels."""
    for i in range(red.size):
        r, g, b = red[i], green[i], blue[i]
        high, low = max(max(r, g), b), min(min(r, g), b)
        chroma = high - low
        twice = chroma + chroma
        hue = r - g + twice
        hue = b - r if g == high else hue
        hue = g - b - twice if r == high else hue
        red[i] = _shifted(hue, high, chroma, one)
        green[i] = _shifted(hue, high, chroma, two)
        blue[i] = _shifted(hue, high, chroma, three)


@njit
def _turn(shift: Any, sextant: Any) -> Any:
    turn = np.float32(shift * np.float32(6) + np.float32(sextant))
    return np.float32(turn - np.float32(6) * np.floor(turn * np.float32(1 / 6) + np.float32(0.5)))


@njit(fastmath=_MATH)
def _jitter(planes: Any, brightness: Any, contrast: Any, saturation: Any, hue: Any) -> None:
    channels = planes.shape[0]
    if brightness != 1:
        for channel in range(channels):
            _stretch(planes[channel], brightness, np.float32(0))
    if contrast != 1:
        middle = _mean(planes)
        for channel in range(channels):
            _stretch(planes[channel], contrast, middle)
    if channels == 3 and saturation != 1:
        _saturate(planes[0], planes[1], planes[2], saturation)
    if channels == 3 and hue != 0:
        one, two, three = _turn(hue, 5.0), _turn(hue, 3.0), _turn(hue, 1.0)
        _turn_hue(planes[0], planes[1], planes[2], one, two, three)


@njit(fastmath=_MATH)
def _to_gray(red: Any, green: Any, blue: Any) -> None:
    for i in range(red.size):
        gray = _luma(red[i], green[i], blue[i])
        red[i] = gray
        green[i] = gray
        blue[i] = gray


@njit
def _weights(sigma: Any, window: Any) -> Any:
    """Return the weights of a Gaussian from its middle outwards."""
    reach = window // 2
    weights = np.empty(reach + 1)
    total = 0.0
    for k in range(reach + 1):
        weights[k] = np.exp(-0.5 * (k / sigma) ** 2)
        total += weights[k] if k == 0 else 2 * weights[k]
    return (weights / total).astype(np.float32)


@njit
def _inside(index: Any, size: Any) -> Any:
    """Return the index that is mirrored at the edge without repeating it."""
    index = -index if index < 0 else index
    return 2 * (size - 1) - index if index >= size else index


@njit(fastmath=_MATH)
def _add_pair(out: Any, before: Any, after: Any, weight: Any) -> None:
    for i in range(out.size):
        out[i] += (before[i] + after[i]) * weight


@njit(fastmath=_MATH)
def _add_pairs(out: Any, a: Any, b: Any, weight: Any, c: Any, d: Any, other: Any) -> None:
    for i in range(out.size):
        out[i] += (a[i] + b[i]) * weight + (c[i] + d[i]) * other


@njit(fastmath=_MATH)
def _blur(planes: Any, sigma: Any, rows: Any, columns: Any) -> None:
    """Blur planes (channels, height, width) by a Gaussian whose window is rows x columns."""
    channels, height, width = planes.shape
    down, across = _weights(sigma, rows), _weights(sigma, columns)
    reach = across.size - 1
    line = np.empty(width + 2 * reach, np.float32)
    out = np.empty(width, np.float32)
    for channel in range(channels):
        source = planes[channel].copy()
        for y in range(height):
            middle = line[reach : reach + width]
            _begin(middle, source[y], down[0])
            k = 1
            while k + 1 < down.size:
                _add_pairs(
                    middle,
                    source[_inside(y - k, height)],
                    source[_inside(y + k, height)],
                    down[k],
                    source[_inside(y - k - 1, height)],
                    source[_inside(y + k + 1, height)],
                    down[k + 1],
                )
                k += 2
            if k < down.size:
                before, after = source[_inside(y - k, height)], source[_inside(y + k, height)]
                _add_pair(middle, before, after, down[k])
            for i in range(reach):
                line[i] = line[reach + _inside(i - reach, width)]
                line[reach + width + i] = line[reach + _inside(width + i, width)]
            _begin(out, middle, across[0])
            k = 1
            while k + 1 < across.size:
                low, high, more = reach - k, reach + k, k + 1
                _add_pairs(
                    out,
                    line[low : low + width],
                    line[high : high + width],
                    across[k],
                    line[low - 1 : low - 1 + width],
                    line[high + 1 : high + 1 + width],
                    across[more],
                )
                k += 2
            if k < across.size:
                low, high = reach - k, reach + k
                _add_pair(out, line[low : low + width], line[high : high + width], across[k])
            _scaled(planes[channel, y], out, np.float32(1), np.float32(0))


@njit(fastmath=_MATH)
def _solarize(plane: Any, threshold: Any) -> None:
    for i in range(plane.size):
        value = plane[i]
        plane[i] = np.float32(255) - value if value >= threshold else value


@njit(fastmath=_MATH)
def _posterize(plane: Any, step: Any) -> None:
    for i in range(plane.size):
        plane[i] = np.floor(plane[i] / step) * step


@njit(fastmath=_MATH)
def _autocontrast(plane: Any) -> None:
    low, high = plane.min(), plane.max()
    if high > low:
        factor = np.float32(255) / (high - low)
        for i in range(plane.size):
            plane[i] = _clipped((plane[i] - low) * factor)


@njit
def _equalize(plane: Any) -> None:
    """Equalize the histogram."""
    counts = np.zeros(256, np.int64)
    for i in range(plane.size):
        counts[int(plane[i])] += 1
    levels = kernels._equal_levels(counts)
    for i in range(plane.size):
        plane[i] = levels[int(plane[i])]


@njit
def _apply(code: Any, planes: Any, given: Any) -> None:
    """Apply the pass of a code to planes (channels, height, width). given: its arguments."""
    channels = planes.shape[0]
    flat = planes.reshape(channels, planes.shape[1] * planes.shape[2])
    if code == _JITTER:
        _jitter(flat, given[0], given[1], given[2], given[3])
    elif code == _GRAY:
        _to_gray(flat[0], flat[1], flat[2])
    elif code == _BLUR:
        _blur(planes, given[0], int(given[1]), int(given[2]))
    else:
        for channel in range(channels):
            if code == _SOLARIZE:
                _solarize(flat[channel], given[0])
            elif code == _POSTERIZE:
                _posterize(flat[channel], given[0])
            elif code == _AUTOCONTRAST:
                _autocontrast(flat[channel])
            elif code == _EQUALIZE:
                _equalize(flat[channel])


@njit
def _copy(out: Any, values: Any) -> None:
    for i in range(out.size):
        out[i] = values[i]


@njit
def _window(image: Any, top: Any, left: Any, height: Any, width: Any) -> Any:
    """Return a contiguous copy of a window. numba's own copy takes ten times as long."""
    channels = image.shape[2]
    length, line = width * channels, image.shape[1] * channels
    source, window = image.reshape(image.size), np.empty(height * length, np.uint8)
    for y in range(height):
        begin = (top + y) * line + left * channels
        _copy(window[y * length : (y + 1) * length], source[begin : begin + length])
    return window.reshape((height, width, channels))


@njit
def _make(image: Any, numbers: Any, program: Any, planes: Any) -> None:
    """Write one view into planes (float32, channels, height, width), as levels from 0 to 255."""
    top, left, height, width = numbers[:4].astype(np.int64)
    if height == 0:
        height, width = image.shape[:2]
    window = _window(image, top, left, height, width)
    region = numbers[4:8].astype(np.float64)
    if region[2] == 0:
        region[2], region[3] = height, width
    out = planes, np.empty((0, 0, 0), np.uint8), np.empty((0, 0), np.uint8)
    norm = np.zeros((planes.shape[0], 2), np.float32)
    for channel in range(planes.shape[0]):
        norm[channel, 0] = 1
    flips, place = (numbers[9] != 0, numbers[10] != 0), (0, 0, planes.shape[1], planes.shape[2])
    _resample(window, region, int(numbers[8]), flips, place, out, norm)
    at = HEADER
    for code in program:
        if code == NO_PASS:
            break
        width = _WIDTHS[int(code)]
        if numbers[at] != 0:
            _apply(int(code), planes, numbers[at + 1 : at + 1 + width])
        at += 1 + width


@njit(fastmath=_MATH)
def _normalize(plane: Any, factor: Any, summand: Any) -> None:
    for i in range(plane.size):
        plane[i] = plane[i] * factor + summand


@njit
def _inputs(given: Any, shapes: Any, ins: Any) -> Any:
    """Return the image, the numbers and the programs of its views, the shape of a view, and how its
    channels are normalised."""
    places, dims = _words(given, ins), _words(shapes, ins)
    views, each = _words(dims[1], 2)
    passes = _words(dims[2], 2)[1]
    channels, height, width = _words(dims[3], 3)
    numbers = carray(_pointer(places[1]), (views, each), np.float32)
    programs = carray(_pointer(places[2]), (views, passes), np.float32)
    norm = carray(_pointer(places[3]), (channels, 2), np.float32)
    return _image(given, shapes, ins), numbers, programs, (channels, height, width), norm


def _compile(resampling: int) -> Any:
    """Return the function that DALI calls. resampling: of the other module, see `_RESAMPLING`."""

    @kernels._compiled(kernels._RUN)
    def views(
        out: Any, sizes: Any, _o: Any, outs: Any, given: Any, shapes: Any, _i: Any, ins: Any
    ) -> None:
        if resampling < 0:
            return
        image, numbers, programs, shape, norm = _inputs(given, shapes, ins)
        count, size = numbers.shape[0], shape[0] * shape[1] * shape[2]
        is_bytes = numbers[0, HEADER - 1] != 0
        address = _pointer(_words(out, outs)[0])
        floats = carray(address, (1 if is_bytes else count, size), np.float32)
        levels = carray(address, (count, size), np.uint8)
        spare = np.empty(size if is_bytes else 0, np.float32)
        for view in range(count):
            flat = spare if is_bytes else floats[view]
            _make(image, numbers[view], programs[view], flat.reshape(shape))
            if is_bytes:
                kernels._bytes(levels[view], flat)
                continue
            planes = flat.reshape((shape[0], shape[1] * shape[2]))
            for channel in range(shape[0]):
                _normalize(planes[channel], norm[channel, 0], norm[channel, 1])

    return views


make_views = _compile(_RESAMPLING)
"""Make all views of one image, (views, channels, height, width): float32, normalised, or uint8."""


@kernels._compiled(kernels._SETUP)
def shape_views(
    out_shapes: Any, _o: Any, outs: Any, in_shapes: Any, _i: Any, ins: Any, samples: Any
) -> None:
    """Set the shape of each image's views."""
    shapes, given = _words(out_shapes, samples), _words(in_shapes, ins * samples)
    for i in range(samples):
        shape = _words(shapes[i], 4)
        like = _words(given[(ins - 1) * samples + i], 3)
        shape[0] = _words(given[samples + i], 2)[0]
        for k in range(3):
            shape[k + 1] = like[k]
