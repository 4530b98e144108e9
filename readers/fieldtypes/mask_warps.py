"""Rotate and warp the masks of an image, compiled by numba.

All masks of an image need one computation of the places of its pixels. 8 masks of 640 x 640 take
6.5 ms; numpy needs 16, of which 12 are for the places. This is a module of its own, because only
jobs with such a recipe have to compile it (some seconds, once a machine).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.readers.fieldtypes.mask_kernels import compiled


@compiled(
    "void(uint8[:, :, :], float64[:, ::1], uint8[:, :, ::1])",
    "void(int32[:, :, :], float64[:, ::1], int32[:, :, ::1])",
)
def warp_masks(masks: Any, matrix: Any, out: Any) -> None:
    """Write the nearest pixels of several masks of one image into zeros, (masks, height, width).

    matrix: (3, 3), from a point (x, y, 1) of the result to that of the masks. It computes what
    `WarpMove` does with numpy, in the same order, without arrays of coordinates.
    """
    count, height, width = out.shape
    rows, columns = np.empty(width, np.int64), np.empty(width, np.int64)
    for y in range(height):
        below = y + 0.5
        begin, end = width, 0
        for x in range(width):
            right = x + 0.5
            column = matrix[0, 0] * right + matrix[0, 2] + matrix[0, 1] * below
            row = matrix[1, 0] * right + matrix[1, 2] + matrix[1, 1] * below
            if matrix[2, 0] != 0 or matrix[2, 1] != 0 or matrix[2, 2] != 1:
                depth = matrix[2, 0] * right + matrix[2, 2] + matrix[2, 1] * below
                column, row = column / depth, row / depth
            rows[x] = -1
            if 0 <= column < width and 0 <= row < height:
                rows[x], columns[x] = int(row), int(column)
                begin, end = min(begin, x), x + 1
        for k in range(count):
            for x in range(begin, end):
                if rows[x] >= 0:
                    out[k, y, x] = masks[k, rows[x], columns[x]]
