"""Where the crops of arrays begin: keyed draws, made before anything is read.

The same numbers as those of images: an array beside an image of the same height and width has the
image's window, where one operation of a list, or of a tuple's entry, crops both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment.keyed import draw_base, keyed_draws
from penstock.readers.fields.columns import DenseColumn, RaggedColumn
from penstock.readers.fields.crops import Crop, put_parts, samples_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.augment.array_crop import ArrayCrop
    from penstock.readers.fields.columns import Column, SampleBatch

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDraws:
    """Draws the parts of arrays: pure functions of (seed, epoch, sample id), on any thread."""

    crops: Mapping[str, ArrayCrop]
    seed: int

    @property
    def is_random(self) -> bool:
        """Whether a sample's part is another one in another epoch."""
        return any(crop.is_random for crop in self.crops.values())

    def before(self, ids: Ints, epoch: int) -> dict[str, Crop]:
        """The parts of fields whose samples have one shape: no more needs to be read of them."""
        return {
            name: Crop(self._corners(crop, ids, epoch, crop.sides), crop.shape)
            for name, crop in self.crops.items()
            if None not in crop.sides
        }

    def after(self, content: SampleBatch, epoch: int, bad: dict[int, str]) -> SampleBatch:
        """The batch with the parts of fields whose samples differ in shape, which is known once
        they are read. bad: rows that are known to be; those of samples that are smaller than their
        part are added, with reasons."""
        columns: dict[str, Column] = {}
        for name, crop in self.crops.items():
            if None in crop.sides:
                columns[name] = self._cropped(name, content, crop, epoch, bad)
        return content.with_columns(columns) if columns else content

    def _cropped(
        self, name: str, content: SampleBatch, crop: ArrayCrop, epoch: int, bad: dict[int, str]
    ) -> DenseColumn:
        column = content.columns[name]
        assert isinstance(column, DenseColumn | RaggedColumn)
        shapes = _shapes(column, len(crop.shape))
        is_small = (shapes < crop.shape).any(axis=1)
        present = content.present.get(name)
        for row in np.flatnonzero(is_small).tolist():
            if row not in bad and (present is None or present[row]):
                bad[row] = (
                    f'"{name}" has the shape {tuple(shapes[row].tolist())}, and the recipe crops '
                    f"parts of shape {crop.shape}"
                )
        corners = self._corners(crop, content.ids, epoch, shapes)
        out = np.zeros((len(content), *crop.shape), column.values.dtype)
        there = np.flatnonzero(~is_small)
        put_parts(samples_of(column, there), corners[there], out, there)
        return DenseColumn(out)

    def _corners(
        self, crop: ArrayCrop, ids: Ints, epoch: int, sides: Ints | Sequence[int | None]
    ) -> Ints:
        """The first index along each axis, int64, shape (n, dimensions)."""
        lengths = np.array(crop.shape, np.int64)
        room = np.broadcast_to(np.asarray(sides, np.int64) - lengths, (len(ids), len(lengths)))
        found = np.zeros((len(ids), len(lengths)), np.int64)
        if not crop.is_random:
            found[:] = np.rint(np.maximum(room, 0) / 2)
            return found
        axes = crop.axes
        base = draw_base(self.seed, epoch, ids, salt=crop.salt)
        places = keyed_draws(base, crop.index, list(range(len(axes))))
        for number, axis in enumerate(axes):
            found[:, axis] = places[number] * (np.maximum(room[:, axis], 0) + 1)
        return found


def _shapes(column: DenseColumn | RaggedColumn, dimensions: int) -> Ints:
    if isinstance(column, RaggedColumn) and column.shapes is not None:
        return column.shapes
    samples = samples_of(column, np.arange(len(column)))
    return np.array([each.shape for each in samples], np.int64).reshape(-1, dimensions)
