"""Summarise the facts about a shard's samples, field by field, for a dataset's manifest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.readers.formats.shard_summary import FieldSummary, Sums
from penstock.readers.types import ImageRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats.shard_summary import FieldNotes


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
            name: _summarise_field(each, is_image=schema[name].has_sides)
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


def _summarise_field(notes: FieldNotes, *, is_image: bool) -> FieldSummary:
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
    return FieldSummary(
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
