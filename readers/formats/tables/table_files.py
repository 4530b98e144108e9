"""Recognise and list the files of a table, and cut their units into shards.

A shard is contiguous units of a large file (row groups, record batches), or a group of small files.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.fields import array_form
from penstock.readers.files import extension, is_passed_over
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.origin import Entry, Origin, QuarantineEntry

    Ints = NDArray[np.int64]


def are_tables(origin: Origin, extensions: Collection[str]) -> bool:
    """Whether files with these extensions lie at the root, and neither pictures, of which they may
    be the table, nor folders; or whether all files that were named have them. Raises DatasetError
    for a table whose folder holds files of older versions too."""
    from penstock.readers.formats.folder import IMAGES

    top = origin.top(lambda name: extension(name) in extensions and not is_passed_over(name))
    if origin.selection is not None:
        return bool(top.entries) and not top.others
    if b".hoodie" in top.folders:
        raise DatasetError(
            f"{origin.url}: this is a Hudi table (.hoodie), whose folder holds files of older "
            "versions too. Give the Parquet files of its current version as a list."
        )
    folders = [name for name in top.folders if not is_passed_over(name)]
    pictures = [name for name in top.others if extension(name) in IMAGES]
    return bool(top.entries) and not folders and not pictures


class TableListing(ABC):
    """The files of a table, in the order of its rows; nothing of them was read."""

    def __init__(
        self, origin: Origin, files: Sequence[Entry], quarantined: Sequence[QuarantineEntry]
    ) -> None:
        self._origin, self._files, self._quarantined = origin, files, quarantined

    def snapshot(self) -> Snapshot:
        """What an index notes of the files."""
        return Snapshot.of(self._files, {})

    def candidates(self, *, workers: int) -> Candidates:
        """Read all footers. Raises DatasetError with the file's name."""
        return self._candidates(workers=workers, warns=True)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The same shard, made anew."""
        del name
        found = self._candidates(workers=workers, warns=False)
        if len(found.chunked) == total:
            yield found, number

    @abstractmethod
    def _candidates(self, *, workers: int, warns: bool) -> Candidates:
        """The shards, as the footers tell them. warns: of columns that are left out."""


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
        yield from ([(number, a, b)] for a, b in pairwise(part_bounds(share).tolist()))
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
    for a, b in pairwise(part_bounds([totals[number] for number in files]).tolist()):
        yield [(number, 0, len(rows[number])) for number in files[a:b]]
