"""Boxes and points in images: their forms in storage, and which of them can't be.

All arithmetic is float32, as what is handed out is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import BoxFormat


def to_xyxy(boxes: NDArray[Any], format: BoxFormat) -> NDArray[np.float32]:
    """Boxes as x1, y1, x2, y2: float32, shape (k, 4), a copy. boxes: shape (k, 4)."""
    found = np.array(boxes, np.float32).reshape(-1, 4)
    if format == "xywh":
        found[:, 2:] += found[:, :2]
    elif format == "cxcywh":
        half = found[:, 2:] / 2
        found[:, 2:] = found[:, :2] + half
        found[:, :2] -= half
    return found


def check_boxes(
    boxes: NDArray[Any], format: BoxFormat, *, size: tuple[int, int] | None = None
) -> Rejection | None:
    """Why a sample's boxes can't be, or None: an odd shape, not finite, inverted, or, where the
    image's height and width are known, wholly outside. One that lies partly outside is normal.
    boxes: as stored."""
    if (refusal := _check_rows(boxes, 4, f"{format} boxes")) is not None:
        return refusal
    with np.errstate(over="ignore", invalid="ignore"):  # what that gives isn't finite
        corners = to_xyxy(boxes, format)
    if len(bad := np.flatnonzero(~np.isfinite(corners).all(axis=1))):
        return Rejection(f"box {bad[0]} isn't finite: {_numbers(boxes, bad[0])}")
    # By what is stored: x + w may round to x.
    stored = np.asarray(boxes).reshape(-1, 4)
    sides = corners[:, 2:] - corners[:, :2] if format == "xyxy" else stored[:, 2:]
    if len(bad := np.flatnonzero((sides < 0).any(axis=1))):
        wanted = "x1 <= x2 and y1 <= y2" if format == "xyxy" else "a width and height of 0 or more"
        return Rejection(
            f"box {bad[0]} is inverted: {_numbers(boxes, bad[0])}; {format} wants {wanted}"
        )
    if size is not None:
        height, width = size
        far = (corners[:, 2:] < 0) | (corners[:, :2] > (width, height))
        if len(bad := np.flatnonzero(far.any(axis=1))):
            return Rejection(
                f"box {bad[0]} lies outside of its image: {_numbers(boxes, bad[0])} ({format}), "
                f"and the image is {width} wide and {height} high"
            )
    return None


def check_keypoints(points: NDArray[Any]) -> Rejection | None:
    """Why a sample's points can't be, or None. points: as stored. Points outside of the image are
    normal: what is hidden is often written as 0, 0 or -1, -1."""
    if (refusal := _check_rows(points, 2, "points")) is not None:
        return refusal
    with np.errstate(over="ignore"):
        found = np.asarray(points).astype(np.float32).reshape(-1, 2)
    if len(bad := np.flatnonzero(~np.isfinite(found).all(axis=1))):
        return Rejection(f"point {bad[0]} isn't finite: {_numbers(points, bad[0], 2)}")
    return None


def _check_rows(values: NDArray[Any], columns: int, what: str) -> Rejection | None:
    """None where the shape is (k, columns), or (0,) as numpy has it for an empty list."""
    if values.dtype.kind not in "iuf":
        return Rejection(f"{what} are numbers, and these are {values.dtype.name}")
    if values.shape == (0,) or (values.ndim == 2 and values.shape[1] == columns):
        return None
    return Rejection(f"{what} have the shape (k, {columns}), and these have {values.shape}")


def _numbers(values: NDArray[Any], row: int, columns: int = 4) -> str:
    shown = ", ".join(f"{value:.6g}" for value in np.asarray(values).reshape(-1, columns)[row])
    return f"({shown})"
