"""What a source of samples holds, as the plan and the feed have to know it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.types import MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.schema import Schema
    from penstock.readers.types import ImageRange

    Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """What a source holds, as far as its index tells.

    schema: all fields, whether selected or not. sizes: samples of each shard; shard_bytes: to read
    it whole; both int64, shape (shards,), no shard empty. id_end: above every sample's id.
    fingerprint: of the content and of what was selected, as hex. icc: label correlation inside a
    shard (`index.totals.label_correlation`), None where it isn't known. shuffled: whether the
    samples lie in random order. images: bounds of the oriented sizes, by field. files: that
    the samples lie in; is_file_per_sample: in one each. units: rows of each decode unit, by shard;
    None where a sample can be had alone. unit_bytes: of all fields of one, decoded, on average and
    as far as metadata tell. longest: largest first length of fields whose samples differ in it, as
    far as known. is_encoded: numbers are decoded when they are read. max_pixels: of an
    image or a mask that is decoded.
    """

    schema: Schema
    sizes: Ints
    shard_bytes: Ints
    id_end: int
    fingerprint: str
    icc: float | None
    shuffled: bool
    images: Mapping[str, ImageRange]
    files: int
    is_file_per_sample: bool
    units: Sequence[Ints] | None = None
    unit_bytes: float = 0.0
    longest: Mapping[str, int] = field(default_factory=dict)
    is_encoded: bool = False
    max_pixels: int = MAX_PIXELS

    @cached_property
    def samples(self) -> int:
        """How many samples there are."""
        return int(self.sizes.sum())

    @cached_property
    def starts(self) -> Ints:
        """Samples before each shard, int64, shape (shards,)."""
        starts: Ints = np.cumsum(self.sizes) - self.sizes
        return starts

    def places(self, rows: Ints) -> Ints:
        """Where samples stand among all, by (shard, row): int64, shape (n,)."""
        places: Ints = self.starts[rows[:, 0]] + rows[:, 1]
        return places

    def rows(self, places: Ints) -> Ints:
        """(shard, row) of samples by where they stand among all: int64, shape (n, 2)."""
        shards = np.searchsorted(self.starts, places, side="right") - 1
        return np.stack([shards, places - self.starts[shards]], axis=1)


def selected(base: Contents, places: Ints, shards: Ints) -> Contents:
    """What a selection holds. places: of the samples among all, ascending; shards: that hold any of
    them. How alike samples of a shard are, and the sizes of images, are taken to be as in all."""
    digest = hashlib.sha256(f"selection {base.fingerprint} {len(places)} ".encode())
    digest.update(places.astype("<i8", copy=False).data)
    borders = np.searchsorted(places, [*base.starts[shards].tolist(), base.samples])
    units = base.units
    if units is not None:
        units = [
            _of_units(places[begin:end] - base.starts[shard], units[shard])
            for shard, begin, end in zip(shards.tolist(), borders[:-1], borders[1:], strict=True)
        ]
    return replace(
        base,
        sizes=np.diff(borders),
        shard_bytes=base.shard_bytes[shards],
        fingerprint=digest.hexdigest(),
        files=len(places) if base.is_file_per_sample else len(shards),
        units=units,
    )


def _of_units(rows: Ints, units: Ints) -> Ints:
    """Rows of each unit that are among some rows of their shard, without those that have none."""
    counts = np.bincount(np.searchsorted(np.cumsum(units), rows, side="right"))
    kept: Ints = counts[counts > 0].astype(np.int64)
    return kept
