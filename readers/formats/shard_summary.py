"""Define the facts about the samples of a shard, field by field, and their summary in a dataset's
manifest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers.types import ImageRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats.open_shard import Storage

    Bounds = tuple[Any, Any]

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

    @property
    def values_present(self) -> NDArray[Any] | None:
        """Return the numbers of the samples that have the field; None if it isn't a number."""
        return None if self.values is None else self._of_present(self.values)

    def _of_present(self, column: NDArray[Any]) -> NDArray[Any]:
        return column if self.present is None else column[self.present]

    def summary(self, *, is_image: bool) -> FieldSummary:
        """Summarise the field. is_image: True if its shapes are height, width, channels."""
        values, bounds = self.values_present, None
        if values is not None and len(values) and values.dtype.kind != "c":
            bounds = values.min().item(), values.max().item()
        lengths: tuple[Bounds, ...] = ()
        channels: set[int] = set()
        if self.shapes is not None and len(shapes := self._of_present(self.shapes)):
            least, most = shapes.min(axis=0).tolist(), shapes.max(axis=0).tolist()
            lengths = tuple(zip(least, most, strict=True))
            channels = set(shapes[:, 2].tolist()) if is_image else set()
        return FieldSummary(
            storage=self.storage,
            missing=self.missing,
            images=_image_range(*lengths[:2]) if is_image and lengths else None,
            channels=tuple(sorted(channels)),
            codecs=tuple(sorted(set(self.codecs) - {""})),
            lengths=() if is_image else lengths,
            bounds=bounds if bounds and all(map(math.isfinite, bounds)) else None,
            progressive=self.progressive,
        )


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

    @classmethod
    def joined(cls, parts: Sequence[FieldSummary]) -> FieldSummary:
        """Combine the summaries of one field over several shards, at least one. Raises ValueError
        if they store it in different ways."""
        storage = parts[0].storage
        if any(part.storage != storage for part in parts):
            raise ValueError("shards store one field in different ways")
        ranges = [part.images for part in parts if part.images is not None]
        lengths = [part.lengths for part in parts if part.lengths]
        bounds = [part.bounds for part in parts]
        counts = [part.progressive for part in parts if part.progressive is not None]
        return cls(
            storage=storage,
            missing=sum(part.missing for part in parts),
            images=join_ranges(ranges) if ranges else None,
            channels=tuple(sorted({each for part in parts for each in part.channels})),
            codecs=tuple(sorted({each for part in parts for each in part.codecs})),
            lengths=tuple(_joined(axis) for axis in zip(*lengths, strict=True)),
            bounds=None if None in bounds else _joined(bounds),
            progressive=sum(counts) if len(counts) == len(parts) else None,
        )


def _joined(bounds: Sequence[Any]) -> Bounds:
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def _image_range(heights: Bounds, widths: Bounds) -> ImageRange:
    return ImageRange(
        min_height=heights[0], max_height=heights[1], min_width=widths[0], max_width=widths[1]
    )


def join_ranges(ranges: Sequence[ImageRange]) -> ImageRange:
    """Return the bounds over at least one range."""
    return _image_range(
        _joined([(each.min_height, each.max_height) for each in ranges]),
        _joined([(each.min_width, each.max_width) for each in ranges]),
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """One shard's contribution to a manifest.

    size_bytes: bytes to read. files: number of files that it lies in. labels: samples by class of
    the first field of classes, None without such a field. fields: summary of each field.
    overhead_bytes: of a pack's shard, the bytes that aren't its samples'. units: rows of each
    decode unit; empty if samples can be read singly. field_bytes: bytes to read of each field of a
    shard of chunks, otherwise empty.
    """

    samples: int
    size_bytes: int
    sums: Sums
    labels: Mapping[int, int] | None
    fields: Mapping[str, FieldSummary]
    files: int = 1
    overhead_bytes: int | None = None
    units: tuple[int, ...] = ()
    field_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, schema: Schema, notes: Mapping[str, FieldNotes], **facts: Any) -> ShardSummary:
        """Summarise one shard of at least one sample. notes: of each field. facts: as above."""
        ordered = {name: notes[name] for name in schema}
        classes = [ordered[name].values_present for name, type in schema.items() if type.is_class]
        labels = next((each for each in classes if each is not None), None)
        return cls(
            sums=Sums.of(ordered),
            labels=None if labels is None else dict(Counter(labels.tolist())),
            fields={
                name: each.summary(is_image=schema[name].has_sides)
                for name, each in ordered.items()
            },
            **facts,
        )
