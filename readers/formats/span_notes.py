"""What is noted of a span field: where the samples' payloads lie, and what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.arrays import CODEC_ITEMSIZES, array_form, codec_number, has_sides
from penstock.readers.files.ipc import LazyColumn
from penstock.readers.formats.candidates import MISSING
from penstock.readers.formats.layout import NOWHERE
from penstock.readers.formats.limits import MAX_SHARD_BYTES, MAX_SIDE
from penstock.readers.formats.sidecar_lists import SPAN
from penstock.readers.formats.summary import FieldNotes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.arrays import ArrayForm
    from penstock.readers.fields.facts import Facts
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.layout import SpanPlace
    from penstock.readers.formats.sidecar_lists import Lists


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanNotes:
    """Of one field of n samples, each of shape (n,).

    files: number of the shard's file, int32, MISSING where a sample lacks it; starts, sizes: bytes
    of the payload there, int64; crcs: CRC-32C of it, uint32. shapes: int64, shape (n, dimensions),
    None where there are none. codecs: as facts have them, "" where a sample lacks it.
    """

    files: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    shapes: NDArray[np.int64] | None
    codecs: Sequence[str]

    @classmethod
    def of(
        cls,
        files: NDArray[np.int64],
        starts: NDArray[np.int64],
        facts: Sequence[Facts | None],
    ) -> SpanNotes:
        """Of samples that were examined. files: as above; starts: of what was examined there."""
        dimensions = max((len(each.shape) for each in facts if each is not None), default=0)
        nothing = (0,) * dimensions
        begun = np.array([0 if each is None else each.start for each in facts], np.int64)
        lengths = [nothing if each is None else each.shape for each in facts]
        shapes = np.array(lengths, np.int64).reshape(len(facts), dimensions)
        return cls(
            files=files.astype(np.int32),
            starts=np.where(files == MISSING, 0, starts + begun),
            sizes=np.array([0 if each is None else each.size for each in facts], np.int64),
            crcs=np.array([0 if each is None else each.crc32c for each in facts], np.uint32),
            shapes=shapes if dimensions else None,
            codecs=["" if each is None else each.codec for each in facts],
        )

    @classmethod
    def read(cls, lists: Lists, name: str, *, samples: int) -> SpanNotes:
        """What a sidecar says of a field. Raises ValueError."""
        shapes = lists.numbers(f"{name}/shape")
        if len(shapes) % samples:
            raise ValueError(f"{name} has {len(shapes):,} lengths for {samples:,} samples")
        files, starts, sizes, crcs = (
            lists.numbers(f"{name}/{what}", length=samples)
            for what in ("file", "start", "bytes", "crc32c")
        )
        return cls(
            files=files,
            starts=starts,
            sizes=sizes,
            crcs=crcs,
            shapes=shapes.reshape(samples, -1) if len(shapes) else None,
            codecs=LazyColumn(lists.arrow(f"{name}/codec", length=samples)),
        )

    def lists(self) -> dict[str, Any]:
        """What goes into a sidecar, in the order of `SPAN`."""
        shapes = np.empty(0, np.int64) if self.shapes is None else self.shapes.reshape(-1)
        lists = (self.files, self.starts, self.sizes, self.crcs, shapes, list(self.codecs))
        return dict(zip(SPAN, lists, strict=True))

    @property
    def present(self) -> NDArray[np.bool_]:
        """Which samples have the field."""
        there: NDArray[np.bool_] = self.files != MISSING
        return there

    def notes(self, *, progressive: int | None) -> FieldNotes:
        """What goes into a manifest."""
        return FieldNotes(
            storage="span",
            crcs=self.crcs,
            shapes=self.shapes,
            codecs=self.codecs,
            present=None if self.present.all() else self.present,
            progressive=progressive,
        )

    def check(self, file_sizes: NDArray[np.int64], type: FieldType) -> None:
        """Whether samples can be so, as a sidecar may come from anybody. Raises ValueError."""
        there = self.present
        files, starts, sizes = self.files[there], self.starts[there], self.sizes[there]
        if len(self.files) and (self.files.min() < MISSING or self.files.max() >= len(file_sizes)):
            raise ValueError("a sample lies in a file that isn't there")
        if not len(files):
            return
        least = 1 if has_sides(type) else 0
        if not (sizes.min() >= least and sizes.max() <= MAX_SHARD_BYTES):
            raise ValueError(f"a sample has {sizes.min():,} to {sizes.max():,} bytes")
        # In this order: a sum of two may pass 2^63.
        if not (
            starts.min() >= 0
            and starts.max() <= MAX_SHARD_BYTES
            and (starts + sizes <= file_sizes[files]).all()
        ):
            raise ValueError("its offsets lead out of the file")
        if has_sides(type):
            self._check_sides(there)
        form = array_form(type)
        if form is not None:
            self._check_arrays(form, there)

    def _check_sides(self, there: NDArray[np.bool_]) -> None:
        if self.shapes is None or self.shapes.shape[1] != 3:
            raise ValueError("images without height, width and channels")
        sides = self.shapes[there, :2]
        if not (sides.min() >= 1 and sides.max() <= MAX_SIDE):
            raise ValueError(f"an image has {sides.min():,} to {sides.max():,} pixels a side")

    def _check_arrays(self, form: ArrayForm, there: NDArray[np.bool_]) -> None:
        """Whether each array has the bytes that its shape takes."""
        count = int(there.sum())
        shapes = np.empty((count, 0), np.int64) if self.shapes is None else self.shapes[there]
        if shapes.shape[1] != len(form.shape):
            raise ValueError(f"arrays of {shapes.shape[1]} dimensions, wanted {len(form.shape)}")
        for lengths, wanted in zip(shapes.T, form.shape, strict=True):
            if lengths.min() < 0 or (wanted is not None and (lengths != wanted).any()):
                raise ValueError(f"an array has a length of {lengths.min():,}, wanted {wanted}")
        itemsizes = CODEC_ITEMSIZES[self._codec_numbers()[there]]
        # As floats: products of lengths may pass 2^63, and sizes that can be are exact.
        if (shapes.prod(axis=1, dtype=np.float64) * itemsizes != self.sizes[there]).any():
            raise ValueError("an array hasn't the bytes that its shape takes")
        # Beside a length of 0 the others are held by no bytes, and numpy makes no such array.
        most = np.where(shapes == 0, 1, shapes).prod(axis=1, dtype=np.float64)
        if most.max() > MAX_SHARD_BYTES:
            raise ValueError("an array has a length that can't be")

    def fill(self, table: NDArray[np.int64], place: SpanPlace, begins: NDArray[np.int64]) -> None:
        """Fill a table's columns. begins: of each file in the shard's flat data."""
        there = self.present
        starts = begins[self.files] + self.starts
        table[:, place.start] = np.where(there, starts, NOWHERE)
        table[:, place.end] = np.where(there, starts + self.sizes, NOWHERE)
        table[:, place.crc] = self.crcs
        if place.height is not None and self.shapes is not None:
            table[:, place.height : place.height + 2] = self.shapes[:, :2]
        if place.codec is not None:
            table[:, place.codec] = self._codec_numbers()
        if place.lengths is not None and self.shapes is not None:
            # What a sample lacks has no length, whatever a sidecar says: others would shift by it.
            shapes = np.where(there[:, None], self.shapes, 0)
            table[:, place.lengths : place.lengths + shapes.shape[1]] = shapes

    def _codec_numbers(self) -> NDArray[np.int64]:
        numbers: dict[str, int] = {"": 0}
        for codec in set(self.codecs) - {""}:
            numbers[codec] = codec_number(codec)
        return np.array([numbers[codec] for codec in self.codecs], np.int64)
