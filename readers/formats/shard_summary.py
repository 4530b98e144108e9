"""Define the facts about the samples of a shard, field by field, and of a dataset's manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.open_shard import Storage
    from penstock.readers.types import ImageRange

VERSION = 2
"""The version of manifests, sidecars and shards. A reader rejects any other."""

MAX_SHARD_SAMPLES = 2**24
"""The most samples of one shard: 16.8 million, of which the order of a window takes 0.4 GB."""

MAX_SAMPLES = 2**36
"""The most samples of one dataset: 69 billion."""

MAX_SHARD_BYTES, MAX_BYTES = 2**50, 2**60
"""The most bytes of one shard and of one dataset."""

MAX_SIDE = 2**27
"""The most pixels of an image's longer side, equal to the largest image that is ever decoded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldNotes:
    """The recorded facts about one field of n samples, independent of its storage.

    storage: how the field is stored. crcs: CRC-32C of each sample's bytes, uint32, shape (n,); None
    for numbers in the table. shapes: int64, shape (n, dimensions): height, width and channels of
    images and masks, the shape of arrays, otherwise None. codecs: of each sample; empty if there
    are none. values: of a number, shape (n,). present: which samples have the field, bool, shape
    (n,); None for all. progressive: number of progressive JPEGs; None if they weren't counted.
    """

    storage: Storage
    crcs: NDArray[np.uint32] | None = None
    shapes: NDArray[np.int64] | None = None
    codecs: Sequence[str] = ()
    values: NDArray[Any] | None = None
    present: NDArray[np.bool_] | None = None
    progressive: int | None = None

    @property
    def missing(self) -> int:
        """Return the number of samples that lack the field."""
        return 0 if self.present is None else int((~self.present).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSummary:
    """The facts about one field in a manifest, over all samples that have it.

    storage: how it is stored. missing: samples that lack it. images: bounds of oriented heights and
    widths; channels: numbers of channels; both of images and masks, None and empty for other fields
    and if no sample has the field. lengths: smallest and largest length of each dimension of
    arrays. bounds: smallest and largest number, None if one isn't finite. codecs: of all samples.
    progressive: number of progressive JPEGs; None if they weren't counted.
    """

    storage: Storage
    missing: int = 0
    images: ImageRange | None = None
    channels: tuple[int, ...] = ()
    codecs: tuple[str, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    bounds: tuple[float, float] | None = None
    progressive: int | None = None


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums (CRC-32C) of the facts about a shard's samples, independent of their storage.

    samples: of the CRCs of the samples' bytes, field by field, as little-endian uint32. columns: of
    each field's shapes as little-endian int64, its numbers in their own dtype, little-endian, and,
    if some samples lack the field, which samples have it, as bytes of 0 and 1.
    """

    samples: int
    columns: int

    @classmethod
    def of(cls, notes: Mapping[str, FieldNotes]) -> Sums:
        """Compute the sums over fields, in the order of their schema."""
        samples = columns = 0
        for each in notes.values():
            if each.crcs is not None:
                samples = crc32c(np.ascontiguousarray(each.crcs, "<u4"), samples)
            if each.shapes is not None:
                columns = crc32c(np.ascontiguousarray(each.shapes, "<i8"), columns)
            if each.values is not None:
                little = each.values.dtype.newbyteorder("<")
                flat = np.ascontiguousarray(each.values, little).view(np.uint8)
                columns = crc32c(flat, columns)
            if each.missing:
                columns = crc32c(np.ascontiguousarray(each.present).view(np.uint8), columns)
        return cls(samples=samples, columns=columns)
