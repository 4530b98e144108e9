"""Read rows of a shard whose units (row groups, record batches) hold each field as one chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields import (
    PRESENT,
    ArrayForm,
    DenseColumn,
    EncodedColumn,
    array_form,
    has_sides,
    number_dtype,
    upright_sizes,
)
from penstock.readers.formats.tables.column_values import collector, dense_values, is_there, reasons
from penstock.readers.types import UNFIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Column, ColumnCrop, FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts, ShardData
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

NOT_THERE = -1
"""In a chunk's place: the file has no such column."""

_NULL = (
    "it is null, and the file's statistics don't say so: write it with statistics, and parts of "
    "structs not as dictionaries"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardUnits:
    """What a shard's units are.

    names: of its files, for people. files: number among them, of each unit; firsts: its first row
    in its file. chunks: the extent of each field in each unit, NOT_THERE where there is none,
    int64, shape (units, fields of the schema). lacking: fields that some samples of it lack.
    """

    names: Sequence[str]
    files: Ints
    firsts: Ints
    chunks: Ints
    lacking: frozenset[str]


class UnitReader(ABC):
    """The base of such readers; how a chunk is decoded isn't common."""

    def __init__(self, shard: ChunkedShardFacts, units: ShardUnits) -> None:
        self._schema, self._units = shard.schema, units
        self._numbers = {name: number for number, name in enumerate(shard.schema)}
        self._bounds = np.concatenate(([0], np.cumsum(shard.units))).astype(np.int64)

    @abstractmethod
    def decode(self, extent: int, type: FieldType, data: Encoded, beside: Sequence[Encoded]) -> Any:
        """A chunk's table (`values.values_table`). beside: of the extents that it needs too. Raises
        ValueError for damage."""

    def is_plain(self, extent: int) -> bool:
        """Whether a chunk's table looks into its bytes, where these are mapped."""
        del extent
        return False

    def beside(self, extent: int) -> Sequence[int]:
        """Extents that a chunk is decoded with, such as those of dictionaries."""
        del extent
        return ()

    def decoded_bytes(self, extent: int) -> int:
        """What a chunk takes decoded, about; 0 where nobody knows."""
        del extent
        return 0

    def needs(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> list[int]:
        """The chunks of these rows, in the order of the file."""
        del crops
        units = np.unique(self._unit_of(rows))
        columns = [self._numbers[name] for name in fields]
        chunks = self._units.chunks[units][:, columns]
        found = set(chunks[chunks != NOT_THERE].tolist())
        return sorted(found.union(*map(self.beside, found)))

    def name(self, row: int) -> str:
        """The file, and the row in it."""
        unit = int(self._unit_of(np.array([row], np.int64))[0])
        units = self._units
        at = int(units.firsts[unit]) + row - int(self._bounds[unit])
        return f"{units.names[int(units.files[unit])]}, row {at}"

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None = None,
    ) -> None:
        """Rows of a field of numbers, each in its place."""
        assert corners is None, "a table's rows have no windows"
        self._fill(field, rows, out, places, data=data, wrong=wrong)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Rows of other fields, and who has them."""
        found: dict[str, Column] = {}
        for field in fields:
            form = self._dense_form(field)
            if form is not None:
                out = np.empty((len(rows), *form.fixed_shape), form.dtype)
                here = self._fill(field, rows, out, slice(0, len(rows)), data=data, wrong=wrong)
                found[field] = DenseColumn(out)
            else:
                found[field], here = self._collect(field, rows, data, wrong)
            if field in self._units.lacking:
                found[field + PRESENT] = DenseColumn(here)
        return found

    def _dense_form(self, field: str) -> ArrayForm | None:
        type = self._schema[field]
        dtype, form = number_dtype(type), array_form(type)
        if dtype is not None:
            return ArrayForm(dtype, ())
        return form if form is not None and not form.is_ragged else None

    def _fill(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
    ) -> NDArray[np.bool_]:
        """Rows of a dense field; returns which are there."""
        form = self._dense_form(field)
        assert form is not None
        there = np.ones(len(rows), np.bool_)
        slots = np.arange(len(out))[places] if isinstance(places, slice) else np.asarray(places)
        for here, local, table in self._tables(field, rows, data, wrong, there):
            if table is None:
                out[slots[here]] = 0
                continue
            values = dense_values(table, form)
            if isinstance(places, slice) and len(here) == len(rows) and places.step in (None, 1):
                np.take(values, local, axis=0, out=out[places])
            else:
                out[slots[here]] = values[local]
            gone = here[~there[here]]
            if len(gone):
                out[slots[gone]] = 0
        return there

    def _collect(
        self, field: str, rows: Ints, data: ShardData, wrong: dict[int, str]
    ) -> tuple[Column, NDArray[np.bool_]]:
        type = self._schema[field]
        there = np.ones(len(rows), np.bool_)
        samples = collector(type, len(rows))
        for here, local, table in self._tables(field, rows, data, wrong, there):
            if table is None:
                continue
            try:
                samples.add(table, local, here.tolist())
            except ValueError as error:
                _mark(wrong, here.tolist(), f"{field}: {error}")
        column = samples.column()
        if has_sides(type):
            assert isinstance(column, EncodedColumn)
            dims = upright_sizes(column.samples)
            for row in np.flatnonzero((dims[:, 0] == 0) & there).tolist():
                _mark(wrong, [row], f"{field}: its first bytes are those of no image that is read")
            column = EncodedColumn(column.samples, dims)
        return column, there

    def _tables(
        self,
        field: str,
        rows: Ints,
        data: ShardData,
        wrong: dict[int, str],
        there: NDArray[np.bool_],
    ) -> Iterator[tuple[Ints, Ints, Any]]:
        """Of each unit: which of the rows lie in it, their places there, and its table; None where
        there is none. there: is told which samples lack the field."""
        units, number = self._unit_of(rows), self._numbers[field]
        may_lack = field in self._units.lacking
        chunks = {unit: int(self._units.chunks[unit, number]) for unit in np.unique(units).tolist()}
        unit_of = {chunk: unit for unit, chunk in chunks.items() if chunk != NOT_THERE}
        order = [unit for unit, chunk in chunks.items() if chunk == NOT_THERE]
        for unit in chain(order, (unit_of[chunk] for chunk in data.in_order([*unit_of]))):
            here = np.flatnonzero(units == unit)
            local = rows[here] - self._bounds[unit]
            chunk = chunks[unit]
            if chunk == NOT_THERE:
                there[here] = False
                yield here, local, None
                continue
            table = self._table(chunk, field, data, unit, len(here))
            if isinstance(table, str):
                _mark(wrong, here.tolist(), f"{field}: {table}")
                yield here, local, None
                continue
            for place, reason in reasons(table, local):
                _mark(wrong, [int(here[place])], f"{field}: {reason}. {UNFIT}")
            some = is_there(table, local)
            if some is not None:
                gone = here[~some]
                there[gone] = False
                if not may_lack:
                    _mark(wrong, gone.tolist(), f"{field}: {_NULL}")
            yield here, local, table

    def _in_order(self, units: Ints, number: int, data: ShardData) -> list[int]:
        """ShardUnits in the order in which to take their chunks of a field."""
        if len(units) < 2:
            return [int(unit) for unit in units]
        of = {int(self._units.chunks[unit, number]): int(unit) for unit in units.tolist()}
        there = [chunk for chunk in of if chunk != NOT_THERE]
        is_there = self._units.chunks[units, number] != NOT_THERE
        lacking: list[int] = units[~is_there].tolist()
        return lacking + [of[chunk] for chunk in data.in_order(there)]

    def _table(self, chunk: int, field: str, data: ShardData, unit: int, taken: int) -> Any:
        """A chunk's table, or why it can't be had."""
        type, count = self._schema[field], int(self._bounds[unit + 1] - self._bounds[unit])

        def decode() -> Any:
            seen, beside = data.view(chunk), self.beside(chunk)
            read = data.read([*beside] if seen is not None else [chunk, *beside])
            seen = read.pop(0) if seen is None else seen
            table = self.decode(chunk, type, seen, read)
            if len(table) != count:
                raise ValueError(f"it has {len(table):,} rows where {count:,} were told")
            return table

        try:
            return data.decoded(
                chunk,
                decode,
                uses=count,
                taken=taken,
                is_view=self.is_plain(chunk) and data.view(chunk, size_bytes=0) is not None,
            )
        except ValueError as error:
            from penstock.cache import PenstockError

            if isinstance(error, PenstockError):
                raise
            return str(error)

    def _unit_of(self, rows: Ints) -> Ints:
        found: Ints = np.searchsorted(self._bounds, rows, side="right") - 1
        return found


def _mark(wrong: dict[int, str], places: Sequence[int], reason: str) -> None:
    for place in places:
        wrong.setdefault(place, reason)
