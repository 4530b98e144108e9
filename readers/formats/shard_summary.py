"""Summarise the facts about a shard's samples, field by field, for a dataset's manifest."""

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

    @classmethod
    def of(cls, notes: FieldNotes, *, is_image: bool) -> FieldSummary:
        """Summarise one field of a shard. is_image: True if its shapes are height, width,
        channels."""
        present: Any = slice(None) if notes.present is None else notes.present
        values = None if notes.values is None else notes.values[present]
        lengths: tuple[tuple[int, int], ...] = ()
        channels: list[int] = []
        if notes.shapes is not None and len(shapes := notes.shapes[present]):
            least, most = shapes.min(axis=0).tolist(), shapes.max(axis=0).tolist()
            lengths = tuple(zip(least, most, strict=True))
            channels = shapes[:, 2].tolist() if is_image and lengths else []
        return cls(
            storage=notes.storage,
            missing=notes.missing,
            images=_image_range(lengths) if is_image and lengths else None,
            channels=tuple(sorted(set(channels))),
            codecs=tuple(sorted(set(notes.codecs) - {""})),
            lengths=() if is_image else lengths,
            bounds=_bounds(values),
            progressive=notes.progressive,
        )


def _image_range(lengths: Sequence[tuple[int, int]]) -> ImageRange:
    (min_height, max_height), (min_width, max_width), *_ = lengths
    return ImageRange(
        min_height=min_height, max_height=max_height, min_width=min_width, max_width=max_width
    )


def _bounds(values: NDArray[Any] | None) -> tuple[float, float] | None:
    if values is None or not len(values) or values.dtype.kind == "c":
        return None
    least, most = values.min().item(), values.max().item()
    return (least, most) if math.isfinite(least) and math.isfinite(most) else None


def join_ranges(ranges: Sequence[ImageRange]) -> ImageRange:
    """Return the bounds over at least one range."""
    return ImageRange(
        min_height=min(d.min_height for d in ranges),
        max_height=max(d.max_height for d in ranges),
        min_width=min(d.min_width for d in ranges),
        max_width=max(d.max_width for d in ranges),
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


def summarise(
    schema: Schema,
    notes: Mapping[str, FieldNotes],
    *,
    samples: int,
    size_bytes: int,
    files: int = 1,
    overhead_bytes: int | None = None,
) -> ShardSummary:
    """Summarise one shard of at least one sample. notes: of each field."""
    ordered = {name: notes[name] for name in schema}
    return ShardSummary(
        samples=samples,
        size_bytes=size_bytes,
        sums=Sums.of(ordered),
        labels=_labels(schema, ordered),
        fields={
            name: FieldSummary.of(each, is_image=schema[name].has_sides)
            for name, each in ordered.items()
        },
        files=files,
        overhead_bytes=overhead_bytes,
    )


def _labels(schema: Schema, notes: Mapping[str, FieldNotes]) -> Mapping[int, int] | None:
    for name in (name for name, type in schema.items() if type.is_class):
        each = notes[name]
        if each.values is not None:
            values = each.values if each.present is None else each.values[each.present]
            return dict(Counter(values.tolist()))
    return None
