"""Parts of arrays: which part of each sample of a batch is wanted, and how it is taken out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.columns import DenseColumn, RaggedColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Crop:
    """The part of each sample of one array field that is wanted.

    corners: its first index along each axis, int64, shape (n, dimensions). shape: of the part, the
    same for all samples.
    """

    corners: Ints
    shape: tuple[int, ...]

    def taken(self, rows: Ints | slice) -> Crop:
        """Those of some samples."""
        return Crop(self.corners[rows], self.shape)


def put_parts(
    samples: Iterable[NDArray[Any]],
    corners: Ints,
    out: NDArray[Any],
    places: Sequence[int] | Ints | slice,
) -> None:
    """out[place] = the part of each sample. corners: as of `Crop`; places: in out, of each."""
    if isinstance(places, slice):
        places = range(*places.indices(len(out)))
    lengths = out.shape[1:]
    for sample, corner, place in zip(samples, corners.tolist(), places, strict=True):
        out[place] = sample[
            tuple(slice(at, at + length) for at, length in zip(corner, lengths, strict=True))
        ]


def samples_of(column: DenseColumn | RaggedColumn, rows: Ints) -> Iterator[NDArray[Any]]:
    """Views of some samples of a column."""
    if isinstance(column, DenseColumn):
        yield from (column.values[row] for row in rows.tolist())
    else:
        yield from map(column.sample, rows.tolist())


def cropped(column: Column, crop: Crop) -> DenseColumn:
    """The parts of a column's samples, as one array; zeros of a sample that has nothing.

    Every other sample must hold its part.
    """
    assert isinstance(column, DenseColumn | RaggedColumn), type(column)
    rows = np.arange(len(column))
    there = rows
    if isinstance(column, RaggedColumn):
        there = rows[np.diff(column.offsets) > 0]
    out = np.zeros((len(column), *crop.shape), column.values.dtype)
    put_parts(samples_of(column, there), crop.corners[there], out, there)
    return DenseColumn(out)
