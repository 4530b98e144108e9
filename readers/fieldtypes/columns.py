"""Hold the samples of a batch as columns, one per field, before they are decoded.

`ColumnCrop` describes which part of each sample of an array field a batch needs; `cropped` extracts
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from penstock.readers.types import Bools, EncodedBatch, Floats, Ints, Numbers, offsets_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Rows = Sequence[int] | Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Samples in a list. A sample that is missing or bad is empty. dims: of images and masks,
    upright height and width, int32, shape (n, 2); None for others."""

    samples: list[Any]
    dims: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def size_bytes(self) -> int:
        return sum(len(each) for each in self.samples if hasattr(each, "__len__"))

    def sample(self, row: int) -> Any:
        """Return the value of one sample."""
        return self.samples[row]

    def take(self, rows: Rows | slice) -> Self:
        """Return these rows, in this order."""
        samples = self.samples
        picked = samples[rows] if isinstance(rows, slice) else [samples[row] for row in rows]
        return type(self)(picked, None if self.dims is None else self.dims[rows])


class EncodedColumn(_Samples):
    """Encoded samples: n views of uint8, shape (bytes,) each, which keep their mapped file
    alive."""

    __slots__ = ()


class ListColumn(_Samples):
    """Decoded samples in a list: str for texts, bytes for bytes, arrays for masks, what `decode`
    returns for types of other packages."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class DenseColumn:
    """Samples of one shape. values: shape (n, *shape)."""

    values: Numbers

    def __len__(self) -> int:
        return len(self.values)

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes

    def sample(self, row: int) -> Numbers:
        """Return the value of one sample."""
        value: Numbers = self.values[row]
        return value

    def take(self, rows: Rows | slice) -> DenseColumn:
        """Return these rows, in this order."""
        return DenseColumn(self.values[rows])


@dataclass(frozen=True, slots=True, eq=False)
class RaggedColumn:
    """Samples whose shapes differ, end to end.

    values: shape (total, *rest) if only the first length differs, else flat, (total,). offsets: of
    the samples in values, int64, shape (n + 1,). shapes: of each sample, int64, shape (n,
    dimensions); None if offsets and rest determine them.
    """

    values: Numbers
    offsets: Ints
    shapes: Ints | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes

    def sample(self, row: int) -> Numbers:
        """Return one sample in its shape, as a view."""
        flat = self.values[self.offsets[row] : self.offsets[row + 1]]
        return flat if self.shapes is None else flat.reshape(self.shapes[row])

    @property
    def first_lengths(self) -> Ints:
        """The first length of each sample, int64, shape (n,)."""
        return np.diff(self.offsets) if self.shapes is None else self.shapes[:, 0]

    @property
    def nothing(self) -> Numbers:
        """An empty sample, for rows without a value."""
        empty = self.values[:0]
        return empty if self.shapes is None else empty.reshape((0,) * self.shapes.shape[1])

    def emptied(self, rows: Rows) -> RaggedColumn:
        """Return a copy whose samples in some rows are empty."""
        emptied = {*map(int, rows)}
        samples = [self.nothing if i in emptied else self.sample(i) for i in range(len(self))]
        return RaggedColumn.of(samples, like=self)

    @classmethod
    def of(cls, samples: Sequence[Numbers], *, like: RaggedColumn) -> RaggedColumn:
        """Join samples in the layout of another column."""
        flat = [each.reshape(-1) if like.shapes is not None else each for each in samples]
        offsets = offsets_of([len(each) for each in flat])
        shapes = None
        if like.shapes is not None:
            shapes = np.array([each.shape for each in samples], np.int64)
            shapes = shapes.reshape(len(samples), like.shapes.shape[1])
        return cls(np.concatenate(flat) if flat else like.values[:0], offsets, shapes)

    def take(self, rows: Rows | slice) -> RaggedColumn:
        """Return these rows, in this order."""
        if not isinstance(rows, slice):
            return RaggedColumn.of([self.sample(row) for row in rows], like=self)
        offsets = self.offsets[rows.start : rows.stop + 1]
        values = self.values[offsets[0] : offsets[-1]]
        shapes = None if self.shapes is None else self.shapes[rows]
        return RaggedColumn(values, offsets - offsets[0], shapes)


ArrayColumn = DenseColumn | RaggedColumn
Column = EncodedColumn | ArrayColumn | ListColumn


def joined_columns(columns: Sequence[Any]) -> Column:
    """Join several columns of one field, at least one, end to end."""
    first: Column = columns[0]
    if len(columns) == 1:
        return first
    if isinstance(first, ListColumn | EncodedColumn):
        samples = [each for column in columns for each in column.samples]
        dims = [column.dims for column in columns if column.dims is not None]
        return type(first)(samples, np.concatenate(dims) if len(dims) == len(columns) else None)
    if isinstance(first, DenseColumn):
        return DenseColumn(np.concatenate([column.values for column in columns]))
    counts = np.concatenate([np.diff(column.offsets) for column in columns])
    shapes = [column.shapes for column in columns if column.shapes is not None]
    values = [column.values[column.offsets[0] : column.offsets[-1]] for column in columns]
    return RaggedColumn(
        np.concatenate(values), offsets_of(counts), np.concatenate(shapes) if shapes else None
    )


def patched_column(column: Column, rows: Rows, others: Column) -> Column:
    """Return a copy of a column with other samples in some rows."""
    return joined_columns([column, others]).take(_places(len(column), rows))


def _places(count: int, rows: Rows) -> Ints:
    """Return where `count` samples lie, if those of some rows follow behind the others."""
    places = np.arange(count)
    places[rows] = np.arange(count, count + len(rows))
    return places


class PartLoads(NamedTuple):
    """Reads of samples of the parts of a mixture or concatenation. parts: their numbers, int64,
    shape (reads,). amounts: of each read the samples, the bytes and the seconds of wall-clock time,
    waits for a store included, float64, shape (reads, 3). share: of the amounts, those of a batch
    that was read together with others."""

    parts: Ints
    amounts: Floats
    share: float = 1.0

    @classmethod
    def of(cls, counts: Ints) -> PartLoads:
        """Return a read of several parts at once, without its bytes and its time, which are added
        when they are known. counts: the samples of each part, int64, shape (parts,)."""
        parts = np.flatnonzero(counts)
        amounts = np.zeros((len(parts), 3))
        amounts[:, 0] = counts[parts]
        return cls(parts, amounts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleBatch:
    """The samples of one batch, in the requested order.

    ids: sample ids, int64, shape (n,). columns: by field. present: for fields that some samples of
    the dataset lack, bool, shape (n,); the column is empty or 0 if it is False. bytes_read: of
    spans and of the rows of packs; values that a sidecar holds aren't counted. loads: of the parts
    of a mixture or concatenation; None for other sources.
    """

    ids: Ints
    columns: Mapping[str, Column]
    present: Mapping[str, Bools] = field(default_factory=dict)
    bytes_read: int = 0
    loads: PartLoads | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def has(self, name: str) -> Bools:
        """Return which samples have a field, bool, shape (n,): all if `present` doesn't list it, as
        for a part of a concatenation whose dataset has it everywhere."""
        present = self.present.get(name)
        return np.ones(len(self), np.bool_) if present is None else present

    def encoded(self, name: str) -> EncodedBatch:
        """Return the encoded images of one field."""
        column = self.columns[name]
        assert isinstance(column, EncodedColumn), name
        assert column.dims is not None, name
        return EncodedBatch(ids=self.ids, encoded=column.samples, dims=column.dims)

    def with_columns(self, columns: Mapping[str, Column]) -> SampleBatch:
        """Return the same samples with these columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def without(self, names: Collection[str]) -> SampleBatch:
        """Return the same samples without these columns."""
        columns = {name: each for name, each in self.columns.items() if name not in names}
        return replace(self, columns=columns)

    def take(
        self, rows: Rows | slice, *, bytes_read: int | None = None, share: float = 1.0
    ) -> SampleBatch:
        """Return these rows, in this order. bytes_read: of them; None means of all rows. share: of
        the loads."""
        return SampleBatch(
            ids=self.ids[rows],
            columns={name: column.take(rows) for name, column in self.columns.items()},
            present={name: values[rows] for name, values in self.present.items()},
            bytes_read=self.bytes_read if bytes_read is None else bytes_read,
            loads=self.loads and PartLoads(*self.loads[:2], self.loads.share * share),
        )

    def parts(self, bounds: Sequence[int]) -> list[SampleBatch]:
        """Return the samples between bounds, as views that share the memory of this batch. Bytes
        that were read, and loads, are divided by number of samples."""
        count = max(1, len(self))
        before = [self.bytes_read * bound // count for bound in bounds]
        return [
            self.take(slice(a, b), bytes_read=size_bytes, share=(b - a) / count)
            for (a, b), size_bytes in zip(pairwise(bounds), np.diff(before).tolist(), strict=True)
        ]

    def patched(self, rows: Rows, others: SampleBatch) -> SampleBatch:
        """Return a copy with other samples in some rows."""
        return joined_batches([self, others]).take(_places(len(self), rows))


def joined_batches(batches: Sequence[SampleBatch]) -> SampleBatch:
    """Join several batches of the same fields, at least one, end to end."""
    first, names = batches[0], dict.fromkeys(name for batch in batches for name in batch.present)
    if len(batches) == 1:
        return first
    return SampleBatch(
        ids=np.concatenate([batch.ids for batch in batches]),
        columns={n: joined_columns([each.columns[n] for each in batches]) for n in first.columns},
        present={n: np.concatenate([each.has(n) for each in batches]) for n in names},
        bytes_read=sum(batch.bytes_read for batch in batches),
        loads=_joined_loads([batch.loads for batch in batches if batch.loads is not None]),
    )


def interleaved(batches: Sequence[SampleBatch], places: Sequence[Ints]) -> SampleBatch:
    """Join batches of the same fields, at least one, into one batch in another order.

    places: the positions of each batch's samples in the result, ascending; together all positions.
    """
    if len(batches) == 1:
        return batches[0]
    order = np.concatenate(places)
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return joined_batches(batches).take(back)


def _joined_loads(loads: Sequence[PartLoads]) -> PartLoads | None:
    if not loads:
        return None
    return PartLoads(
        np.concatenate([each.parts for each in loads]),
        np.concatenate([each.amounts * each.share for each in loads]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ColumnCrop:
    """The part of each sample of one array field that a batch needs.

    corners: the part's first index along each axis, int64, shape (n, dimensions). shape: of the
    part, the same for all samples.
    """

    corners: Ints
    shape: tuple[int, ...]

    def take(self, rows: Ints | slice) -> ColumnCrop:
        """Return the parts of some samples."""
        return ColumnCrop(self.corners[rows], self.shape)


def put_parts(
    samples: Iterable[Numbers], corners: Ints, out: Numbers, places: Sequence[int] | Ints | slice
) -> None:
    """Copy the part of each sample to out[place]. corners: as of `ColumnCrop`. places: in out, one
    per sample."""
    if isinstance(places, slice):
        places = range(*places.indices(len(out)))
    lengths = out.shape[1:]
    for sample, corner, place in zip(samples, corners.tolist(), places, strict=True):
        out[place] = sample[
            tuple(slice(at, at + length) for at, length in zip(corner, lengths, strict=True))
        ]


def cropped(column: Column, crop: ColumnCrop, *, rows: Ints | None = None) -> DenseColumn:
    """Return the parts of a column's samples as one array, with zeros for samples that aren't in
    rows. rows: samples that contain their part; None means all that aren't empty."""
    assert isinstance(column, ArrayColumn), type(column)
    if rows is None:
        rows = np.arange(len(column))
        if isinstance(column, RaggedColumn):
            rows = np.flatnonzero(np.diff(column.offsets))
    out = np.zeros((len(column), *crop.shape), column.values.dtype)
    put_parts(map(column.sample, rows.tolist()), crop.corners[rows], out, rows)
    return DenseColumn(out)
