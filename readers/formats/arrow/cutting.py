"""Cutting files of units into shards: contiguous units of large ones, groups of small files."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields.arrays import array_form
from penstock.readers.formats.limits import MAX_SHARD_SAMPLES
from penstock.readers.formats.parts import PART_BYTES, parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import FieldType

    Ints = NDArray[np.int64]

FileUnits = tuple[int, int, int]
"""A file's number, and its units [begin, end)."""

_FREE_BYTES, _MOST_TIMES = 2**28, 1000
_ROW_BYTES = PART_BYTES // (MAX_SHARD_SAMPLES // 2)
"""A row counts as so many bytes at least: units that take few bytes may have many rows."""


def cut_units(rows: Sequence[Ints], sizes: Sequence[Ints]) -> Iterator[list[FileUnits]]:
    """The units of each shard, in the order of the files. rows, sizes: of each unit of each file,
    its samples and bytes."""
    shares = [np.maximum(each, _ROW_BYTES * own) for each, own in zip(sizes, rows, strict=True)]
    totals = [int(each.sum()) for each in shares]
    small: list[int] = []
    for number, share in enumerate(shares):
        if totals[number] <= PART_BYTES:
            small.append(number)
            continue
        yield from _grouped(small, totals, rows)
        small = []
        yield from ([(number, a, b)] for a, b in pairwise(parts(share).tolist()))
    yield from _grouped(small, totals, rows)


def check_claim(type: FieldType, *, rows: int, size_bytes: int) -> None:
    """Raise ValueError for samples of one shape that would take far more memory than their unit's
    bytes can be. size_bytes: of the chunk."""
    form = array_form(type)
    if form is None or form.is_ragged:
        return
    claimed = math.prod(form.fixed_shape) * form.dtype.itemsize * rows
    if claimed > max(_FREE_BYTES, _MOST_TIMES * size_bytes):
        raise ValueError(
            f"its {rows:,} rows of {form.dtype} of shape {form.shape} would take {claimed:,} "
            f"bytes, and lie in {size_bytes:,}"
        )


def _grouped(
    files: list[int], totals: Sequence[int], rows: Sequence[Ints]
) -> Iterator[list[FileUnits]]:
    for a, b in pairwise(parts([totals[number] for number in files]).tolist()):
        yield [(number, 0, len(rows[number])) for number in files[a:b]]
