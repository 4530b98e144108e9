"""Segmentations for tests, and slow ways to draw them that share nothing with the product."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[np.uint8]


def payload(values: Any) -> NDArray[np.uint8]:
    """Return the segmentations of a sample as they are stored."""
    return np.frombuffer(json.dumps(values).encode(), np.uint8)


def runs_of(bits: Bits) -> list[int]:
    """Return the lengths of runs of 0, 1, 0, …, column by column."""
    found, value = [0], 0
    for bit in bits.T.reshape(-1).tolist():
        if bit != value:
            value = bit
            found.append(0)
        found[-1] += 1
    return found


def compressed(runs: list[int]) -> str:
    """Return the lengths of runs as COCO's text, which has five bits a character."""
    text = ""
    for place, length in enumerate(runs):
        left = length - (runs[place - 2] if place > 2 else 0)
        while True:
            digit, left = left & 31, left >> 5
            is_last = left == (-1 if digit & 16 else 0)
            text += chr(48 + digit + (0 if is_last else 32))
            if is_last:
                break
    return text


def drawn(polygon: list[float], height: int, width: int) -> Bits:
    """Draw a polygon as COCO does: list all points of its boundary on a grid of fifths of a pixel,
    and flip each column below the points where it crosses the column's middle."""
    corners = [int(5 * each + 0.5) for each in polygon]
    places = list(zip(corners[::2], corners[1::2], strict=True))
    points = []
    for (x, y), (to_x, to_y) in zip(places, [*places[1:], places[0]], strict=True):
        dx, dy = abs(to_x - x), abs(to_y - y)
        is_backward = x > to_x if dx >= dy else y > to_y
        begin, end = ((to_x, to_y), (x, y)) if is_backward else ((x, y), (to_x, to_y))
        line = [begin]
        for step in range(1, max(dx, dy) + 1):
            if dx >= dy:
                slope = (end[1] - begin[1]) / dx
                line.append((begin[0] + step, int(begin[1] + slope * step + 0.5)))
            else:
                slope = (end[0] - begin[0]) / dy
                line.append((int(begin[0] + slope * step + 0.5), begin[1] + step))
        points += line[::-1] if is_backward else line
    bits = np.zeros((height, width), np.uint8)
    for (x, y), (to_x, to_y) in pairwise(points):
        column = (min(x, to_x) + 0.5) / 5 - 0.5
        if x != to_x and column == math.floor(column) and 0 <= column < width:
            row = math.ceil((min(y, to_y) + 0.5) / 5 - 0.5)
            bits[max(row, 0) :, int(column)] ^= 1
    return bits


def decoded(value: Any, height: int, width: int) -> Bits:
    """Return the full mask of one segmentation: polygons, runs that aren't compressed, or None."""
    bits = np.zeros((height, width), np.uint8)
    if isinstance(value, list):
        for polygon in value:
            bits |= drawn(polygon, height, width)
    elif value is not None:
        flat = np.repeat(np.arange(len(value["counts"])) % 2, value["counts"])
        bits[:] = flat.reshape(width, height).T
    return bits


@st.composite
def polygons(draw: Any, side: int = 24) -> list[float]:
    """Polygons of any form, partly outside, on whole pixels, between them, or with equal points."""
    number = draw(
        st.sampled_from(
            [
                st.integers(-4, side + 4),
                st.floats(-4, side + 4, allow_nan=False),
                st.integers(-20, 5 * side + 20).map(lambda n: n / 5),
                st.sampled_from([0, 1.5, 2.4, 2.5, side - 1, side]),
            ]
        )
    )
    points: list[float] = draw(st.lists(number, min_size=6, max_size=16))
    return points[: len(points) // 2 * 2]


@st.composite
def samples(draw: Any) -> tuple[tuple[int, int], list[Any]]:
    """A size, and the segmentations of some boxes in it."""
    height, width = draw(st.integers(1, 26)), draw(st.integers(1, 26))
    values: list[Any] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["polygons", "polygons", "runs", "none"]))
        if kind == "polygons":
            values.append(draw(st.lists(polygons(), min_size=1, max_size=3)))
        elif kind == "runs":
            seed, share = draw(st.integers(0, 99)), draw(st.sampled_from([0, 0.1, 0.5, 0.9, 1]))
            bits = np.random.default_rng(seed).random((height, width)) < share
            values.append({"size": [height, width], "counts": runs_of(bits.astype(np.uint8))})
        else:
            values.append(None)
    return (height, width), values
