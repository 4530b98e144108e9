"""Summarise what is noted of a shard's samples, field by field, for a dataset's manifest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers.fields import ClassLabel, has_sides
from penstock.readers.types import ImageRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Schema
    from penstock.readers.formats.open_shard import Storage

VERSION = 2
"""Of manifest, sidecar and shard. A reader refuses any other."""

MAX_SHARD_SAMPLES = 2**24
"""Samples of one shard: 16.8 million, of which the order of a window takes 0.4 GB."""

MAX_SAMPLES = 2**36
"""Samples of one dataset: 69 billion."""

MAX_SHARD_BYTES, MAX_BYTES = 2**50, 2**60
"""Bytes of one shard and of one dataset."""

MAX_SIDE = 2**27
"""Pixels of an image's longer side; it is that of the largest image that is ever decoded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldNotes:
    """What is noted of one field of n samples, however it is stored.

    storage: how. crcs: CRC-32C of each sample's bytes, uint32, shape (n,); None of numbers in the
    table. shapes: int64, shape (n, dimensions): height, width, channels of images and masks, the
    shape of arrays, else None. codecs: of each sample, empty where there is none. values: of a
    number, shape (n,). present: which samples have the field, bool, shape (n,); None for all.
    progressive: JPEGs of that kind, None where nobody counted.
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
        """How many samples lack it."""
        return 0 if self.present is None else int((~self.present).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSummary:
    """What a manifest says of one field, over all samples that have it.

    storage: how it is stored. missing: samples that lack it. images: bounds of oriented heights and
    widths, channels: of images and masks; None and empty of others, and where no sample has it.
    lengths: least and largest of each dimension of arrays. bounds: least and largest of numbers,
    None where one isn't finite. codecs: of all. progressive: JPEGs of that kind, None where nobody
    counted.
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
        """Sum up one field of a shard. is_image: its shapes are height, width, channels."""
        there: Any = slice(None) if notes.present is None else notes.present
        shapes = None if notes.shapes is None else notes.shapes[there]
        values = None if notes.values is None else notes.values[there]
        has_shapes = shapes is not None and len(shapes) > 0
        lengths: tuple[tuple[int, int], ...] = ()
        if has_shapes and shapes is not None:
            least, most = shapes.min(axis=0).tolist(), shapes.max(axis=0).tolist()
            lengths = tuple(zip(least, most, strict=True))
        is_seen = is_image and bool(lengths)
        channels = shapes[:, 2].tolist() if is_seen and shapes is not None else []
        return cls(
            storage=notes.storage,
            missing=notes.missing,
            images=_image_range(lengths) if is_seen else None,
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


def join_summaries(parts: Sequence[FieldSummary]) -> FieldSummary:
    """One field over several shards, at least one. Raises ValueError where they store it in
    different ways."""
    first = parts[0]
    if any(part.storage != first.storage for part in parts):
        raise ValueError("shards store one field in different ways")
    ranges = [part.images for part in parts if part.images is not None]
    lengths = [part.lengths for part in parts if part.lengths]
    bounds = [part.bounds for part in parts if part.bounds is not None]
    counted = [part.progressive for part in parts if part.progressive is not None]
    return FieldSummary(
        storage=first.storage,
        missing=sum(part.missing for part in parts),
        images=join_ranges(ranges) if ranges else None,
        channels=tuple(sorted({c for part in parts for c in part.channels})),
        codecs=tuple(sorted({c for part in parts for c in part.codecs})),
        lengths=tuple(
            (min(low for low, _ in one), max(high for _, high in one))
            for one in zip(*lengths, strict=True)
        ),
        bounds=(
            (min(low for low, _ in bounds), max(high for _, high in bounds))
            if len(bounds) == len(parts)
            else None
        ),
        progressive=sum(counted) if len(counted) == len(parts) else None,
    )


def join_ranges(ranges: Sequence[ImageRange]) -> ImageRange:
    """The bounds over all of at least one range."""
    return ImageRange(
        min_height=min(d.min_height for d in ranges),
        max_height=max(d.max_height for d in ranges),
        min_width=min(d.min_width for d in ranges),
        max_width=max(d.max_width for d in ranges),
    )


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums (CRC-32C) of what is noted of a shard's samples, which don't depend on how it is
    stored.

    samples: of the CRCs of the samples' bytes, field by field, as little-endian uint32; columns: of
    each field's shapes as little-endian int64, its numbers in their own dtype, little-endian, and,
    where some lack it, who has it, as bytes of 0 and 1.
    """

    samples: int
    columns: int

    @classmethod
    def of(cls, notes: Mapping[str, FieldNotes]) -> Sums:
        """Sums over fields, in the order of their schema."""
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

    size_bytes: to read it; files: that it lies in, how many. labels: samples by class of the first
    field of classes, None without. fields: of each field; overhead_bytes: of a pack's shard beside
    the bytes of its samples; units: rows of each decode unit, empty where a sample can be had
    alone. field_bytes: to read each field of a shard of chunks, else empty.
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
    """Sum up one shard of at least one sample. notes: of each field."""
    ordered = {name: notes[name] for name in schema}
    return ShardSummary(
        samples=samples,
        size_bytes=size_bytes,
        sums=Sums.of(ordered),
        labels=_labels(schema, ordered),
        fields={
            name: FieldSummary.of(each, is_image=has_sides(schema[name]))
            for name, each in ordered.items()
        },
        files=files,
        overhead_bytes=overhead_bytes,
    )


def _labels(schema: Schema, notes: Mapping[str, FieldNotes]) -> Mapping[int, int] | None:
    for name in schema.of_type(ClassLabel):
        each = notes[name]
        if each.values is not None:
            values = each.values if each.present is None else each.values[each.present]
            return dict(Counter(values.tolist()))
    return None
