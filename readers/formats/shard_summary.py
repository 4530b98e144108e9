"""Define the facts about the samples of a shard, field by field, and their summary in a dataset's
manifest.

The facts come from a sidecar or from a pack's shard. They are checked here, and fill the table of
an open shard.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers.fieldtypes import CODEC_ITEMSIZES, as_bits
from penstock.readers.formats.open_shard import NO_SPAN, SampleLayout, SpanPlace, Storage
from penstock.readers.types import Bools, ImageRange, Ints, Numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import FieldType, Schema

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


def _nothing() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldNotes:
    """The recorded facts about one field of n samples, independent of its storage.

    storage: how the field is stored. crcs: CRC-32C of each sample's bytes, uint32, shape (n,); None
    for numbers in the table. shapes: int64, shape (n, dimensions): height, width and channels of
    images and masks, the shape of arrays, otherwise None. codecs: of each sample; empty if there
    are none. values: of a number, shape (n,). present: which samples have the field, bool, shape
    (n,); None for all. progressive: number of progressive JPEGs; None if they weren't counted.

    Of spans: starts, sizes: bytes in a file, int64, shape (n,), of any value if a sample lacks the
    field. files: the number of that file, MISSING if a sample lacks the field; None if a shard is
    one file. numbers: of each array's codec in `ARRAY_CODECS`, shape (n,), or the number of all.
    """

    storage: Storage
    crcs: NDArray[np.uint32] | None = None
    shapes: Ints | None = None
    codecs: Sequence[str] = ()
    values: Numbers | None = None
    present: Bools | None = None
    progressive: int | None = None
    starts: Ints = field(default_factory=_nothing)
    sizes: Ints = field(default_factory=_nothing)
    files: NDArray[np.int32] | None = None
    numbers: Ints | int = 0

    @property
    def missing(self) -> int:
        """Return the number of samples that lack the field."""
        return 0 if self.present is None else int((~self.present).sum())

    @property
    def values_present(self) -> Numbers | None:
        """Return the numbers of the samples that have the field; None if it isn't a number."""
        return None if self.values is None else self._of_present(self.values)

    def _of_present(self, column: Numbers) -> Numbers:
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
            images=ImageRange.of(*lengths[:2]) if is_image and lengths else None,
            channels=tuple(sorted(channels)),
            codecs=tuple(sorted(set(self.codecs) - {""})),
            lengths=() if is_image else lengths,
            bounds=bounds if bounds and all(map(math.isfinite, bounds)) else None,
            progressive=self.progressive,
        )

    def check(self, type: FieldType, file_sizes: Ints | None = None) -> None:
        """Check that spans of a type are possible, because the source of the file that records them
        isn't trusted. file_sizes: bytes of each of the shard's files; None if the spans are known
        to lie inside. Raises ValueError."""
        sizes = self._of_present(self.sizes)
        if not len(sizes):
            return
        if not (sizes.min() >= int(type.has_sides) and sizes.max() <= MAX_SHARD_BYTES):
            raise ValueError(f"a sample has {sizes.min():,} to {sizes.max():,} bytes")
        if self.files is not None and file_sizes is not None:
            files, starts = self._of_present(self.files), self._of_present(self.starts)
            if files.min() < 0 or files.max() >= len(file_sizes):
                raise ValueError("a sample lies in a file that isn't listed")
            # In this order, because a sum of two may exceed 2^63.
            is_near = starts.min() >= 0 and starts.max() <= MAX_SHARD_BYTES
            if not (is_near and (starts + sizes <= file_sizes[files]).all()):
                raise ValueError("a sample lies outside of its file")
        shapes = np.empty((len(sizes), 0), np.int64)
        if self.shapes is not None:
            shapes = self._of_present(self.shapes)
        if type.has_sides:
            if shapes.shape[1] != 3:
                raise ValueError("images without height, width and channels")
            sides = shapes[:, :2]
            if not (sides.min() >= 1 and sides.max() <= MAX_SIDE):
                raise ValueError(f"an image has {sides.min():,} to {sides.max():,} pixels a side")
        elif type.form is not None:
            numbers = self._of_present(np.broadcast_to(self.numbers, len(self.sizes)))
            _check_arrays(shapes, sizes, CODEC_ITEMSIZES[numbers], type.form.shape)

    def fill(self, table: Ints, place: SpanPlace, begins: Ints | None) -> None:
        """Write the spans into the table of an open shard. begins: of each file in the shard's flat
        data."""
        has = np.True_ if self.present is None else self.present
        starts = self.starts
        if self.files is not None and begins is not None:
            starts = starts + begins[self.files]
        table[:, place.start] = np.where(has, starts, NO_SPAN)
        table[:, place.end] = np.where(has, starts + self.sizes, NO_SPAN)
        assert self.crcs is not None
        table[:, place.crc] = self.crcs
        if place.codec is not None:
            table[:, place.codec] = self.numbers
        if self.shapes is None:
            return
        if place.height is not None:
            table[:, place.height : place.height + 2] = self.shapes[:, :2]
        if place.lengths is not None:
            # A missing array has length 0 whatever the file records, so that it shifts no others.
            shapes = np.where(np.reshape(has, (-1, 1)), self.shapes, 0)
            table[:, place.lengths : place.lengths + shapes.shape[1]] = shapes


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


def join_ranges(ranges: Sequence[ImageRange]) -> ImageRange:
    """Return the bounds over at least one range."""
    heights = [side for each in ranges for side in (each.min_height, each.max_height)]
    widths = [side for each in ranges for side in (each.min_width, each.max_width)]
    return ImageRange.of(heights, widths)


def _check_arrays(shapes: Ints, sizes: Ints, itemsizes: Ints, wanted: Sequence[int | None]) -> None:
    """Check that each array has as many bytes as its shape requires. wanted: the lengths of all, by
    dimension; None for one that differs. Raises ValueError."""
    if shapes.shape[1] != len(wanted):
        raise ValueError(f"arrays of {shapes.shape[1]} dimensions, wanted {len(wanted)}")
    for lengths, length in zip(shapes.T, wanted, strict=True):
        if lengths.min() < 0 or (length is not None and (lengths != length).any()):
            raise ValueError(
                f"arrays have lengths {lengths.min():,} to {lengths.max():,}, wanted {length}"
            )
    # As floats, because products of lengths may exceed 2^63; possible sizes are exact.
    if (shapes.prod(axis=1, dtype=np.float64) * itemsizes != sizes).any():
        raise ValueError("an array doesn't have as many bytes as its shape requires")
    # If one length is 0, the bytes don't bound the others, and numpy can't make such an array.
    most = np.where(shapes == 0, 1, shapes).prod(axis=1, dtype=np.float64)
    if most.max() > MAX_SHARD_BYTES:
        raise ValueError("an array has an impossible length")


def sample_table(
    layout: SampleLayout, notes: Mapping[str, FieldNotes], samples: int, begins: Ints | None = None
) -> Ints:
    """Return the table of an open shard. notes: of all fields, spans checked. begins: see
    `FieldNotes.fill`."""
    columns = layout.table
    table = np.zeros((samples, columns.count), np.int64)
    for name, place in columns.spans.items():
        notes[name].fill(table, place, begins)
    for name, at in columns.values.items():
        values = notes[name].values
        assert values is not None
        table[:, at] = as_bits(values)
    for name, at in columns.present.items():
        present = notes[name].present
        table[:, at] = 1 if present is None else present
    return table


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
                columns = crc32c(np.ascontiguousarray(each.values, little).view(np.uint8), columns)
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
            fields={n: each.summary(is_image=schema[n].has_sides) for n, each in ordered.items()},
            **facts,
        )
