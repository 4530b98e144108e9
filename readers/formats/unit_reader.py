"""Read rows of a shard whose samples lie in units that are decoded as a whole: the blocks of a
file, or the row groups and record batches of a table, of which each field is a chunk of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import PenstockError
from penstock.readers.fieldtypes import PRESENT, DenseColumn, EncodedColumn, upright_sizes
from penstock.readers.formats.array_windows import mark, place_numbers
from penstock.readers.formats.candidates import PART_BYTES
from penstock.readers.formats.chunked import ChunkReader
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES
from penstock.readers.types import UNFIT, Bools, Ints, Numbers, offsets_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.readers.fieldtypes import ArrayForm, Column
    from penstock.readers.formats.chunk_data import ShardData
    from penstock.readers.formats.chunked import ChunkedShardFacts, Crops
    from penstock.readers.formats.open_shard import Places


NO_CHUNK = -1
"""The number of the chunk if a unit lacks the field."""

ROW_BYTES = PART_BYTES // (MAX_SHARD_SAMPLES // 2)
"""The least size that counts for a row when units are grouped into shards, because units of few
bytes may have many rows."""

_MISSING = "it is null or is missing, which the index doesn't record"


class UnitValues(ABC):
    """The decoded values of a field in one unit."""

    @abstractmethod
    def dense(self, form: ArrayForm) -> Numbers:
        """Return all samples, of a form of one shape, as one array."""

    @abstractmethod
    def put(self, samples: list[Numbers], here: Ints, rows: Ints, form: ArrayForm | None) -> None:
        """Put the samples of some rows into a list; those without a value may be left out.

        here: their places in the list. form: None if they are encoded.
        """

    @abstractmethod
    def present(self, rows: Ints) -> Bools | None:
        """Return which of some rows have the field; None if all have it."""

    def reasons(self, rows: Ints) -> Iterable[tuple[int, str]]:
        """Return the places among rows of bad samples, and the reasons."""
        return ()


class UnitReader(ChunkReader):
    """The base of readers of units. Several threads may call it."""

    def __init__(self, shard: ChunkedShardFacts, *, lacking: Collection[str]) -> None:
        """lacking: the fields that some samples lack. Raises ValueError if the facts contradict
        each other."""
        self._schema, self._lacking = shard.schema, frozenset(lacking)
        self._forms = {name: type.stored for name, type in shard.schema.items()}
        self._counts: list[int] = shard.units.tolist()
        self._bounds = offsets_of(shard.units)
        if not len(shard.units) or int(self._bounds[-1]) != shard.samples:
            raise ValueError("the numbers of its units disagree")
        self._last: tuple[bytes, Mapping[int, tuple[Ints, Ints]]] = (b"", {})

    @abstractmethod
    def decoded(self, chunk: int, unit: int, field: str, data: ShardData) -> Any:
        """Decode the chunk of a unit. Raises ValueError for damage."""

    @abstractmethod
    def values(self, decoded: Any, field: str) -> UnitValues:
        """Return the values of a field from its decoded chunk."""

    def uses(self, unit: int) -> int:
        """Return how often rows are taken of a unit's chunk, by default once for each row."""
        return self._counts[unit]

    def is_view(self, chunk: int, data: ShardData) -> bool:
        """Return True if a decoded chunk is a view of a mapped file, by default False."""
        return False

    def chunks(self, units: list[int], field: str) -> list[int]:
        """Return the numbers of the chunks that hold a field of some units, by default the units';
        NO_CHUNK for units that lack the field."""
        return units

    def dictionaries(self, chunk: int) -> Sequence[int]:
        """Return the other chunks that a chunk is decoded with, by default none."""
        return ()

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the chunks that these rows need, in order."""
        units = np.unique(self.units_of(rows)).tolist()
        found = set[int]().union(*(self.chunks(units, field) for field in fields)) - {NO_CHUNK}
        return sorted(found.union(*map(self.dictionaries, found)))

    def units_of(self, rows: Ints) -> Ints:
        """Return the unit of each row."""
        return np.searchsorted(self._bounds, rows, side="right") - 1

    def place_of(self, row: int) -> tuple[int, int]:
        """Return a row's unit, and its number in the unit."""
        unit = int(self.units_of(np.array([row], np.int64))[0])
        return unit, row - int(self._bounds[unit])

    def gather(
        self,
        field: str,
        rows: Ints,
        out: Numbers,
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None = None,
        present: Bools | None = None,
    ) -> None:
        """Read rows of a dense field into their places. present: becomes False for rows that lack
        it."""
        assert corners is None, "rows of units have no windows"
        form, slots = self._forms[field], None
        assert form is not None
        present = np.ones(len(rows), np.bool_) if present is None else present
        for here, local, values in self._read(field, rows, data, wrong, present):
            if values is not None and isinstance(places, slice) and len(here) == len(rows):
                np.take(values.dense(form), local, axis=0, out=out[places])
                continue
            slots = place_numbers(places, len(rows)) if slots is None else slots
            out[slots[here]] = 0 if values is None else values.dense(form)[local]
        if not present.all():
            out[place_numbers(places, len(rows))[~present]] = 0

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read rows of other fields, and `<name>.present` of those that some samples lack."""
        found: dict[str, Column] = {}
        for field in fields:
            form, count = self._forms[field], len(rows)
            present = np.ones(count, np.bool_)
            if form is not None and not form.is_ragged:
                out = np.empty((count, *form.fixed_shape), form.dtype)
                places = slice(0, count)
                self.gather(field, rows, out, places, data=data, wrong=wrong, present=present)
                found[field] = DenseColumn(out)
            else:
                samples = [np.empty(0, np.uint8) if form is None else form.empty] * count
                for here, local, values in self._read(field, rows, data, wrong, present):
                    if values is not None:
                        values.put(samples, here, local, form)
                found[field] = self._column(field, samples, present, wrong)
            if field in self._lacking:
                found[field + PRESENT] = DenseColumn(present)
        return found

    def _column(
        self, field: str, samples: list[Numbers], present: Bools, wrong: dict[int, str]
    ) -> Column:
        """Join samples that are ragged or encoded."""
        if (form := self._forms[field]) is not None:
            return form.column(samples)
        if not self._schema[field].has_sides:
            return EncodedColumn(samples)
        dims = upright_sizes(samples)
        unknown = np.flatnonzero((dims[:, 0] == 0) & present)
        mark(wrong, unknown, f"{field}: it doesn't begin as an image of a known format")
        return EncodedColumn(samples, dims)

    def _read(
        self, field: str, rows: Ints, data: ShardData, wrong: dict[int, str], present: Bools
    ) -> Iterator[tuple[Ints, Ints, UnitValues | None]]:
        """Yield for each unit: the places of its rows among `rows`, their numbers in the unit, and
        the unit's values; None if the unit is damaged or lacks the field. Rows without the field
        become False in `present`."""
        groups = self._groups_of(rows)
        units = dict(zip(self.chunks([*groups], field), groups, strict=True))
        if NO_CHUNK in units:
            del units[NO_CHUNK]
            for unit in groups.keys() - units.values():
                here, local = groups[unit]
                present[here] = False
                yield here, local, None

        def decode(some: list[int]) -> list[Any]:
            return [self._decode(chunk, units[chunk], field, data) for chunk in some]

        every = data.decode_all(
            [*units],
            decode,
            uses=[self.uses(unit) for unit in units.values()],
            taken=[len(groups[unit][0]) for unit in units.values()],
            is_view=lambda chunk: self.is_view(chunk, data),
        )
        for chunk, found in every:
            here, local = groups[units[chunk]]
            if isinstance(found, ValueError):
                mark(wrong, here, f"{field}: {found}")
                yield here, local, None
                continue
            values = self.values(found, field)
            for place, reason in values.reasons(local):
                mark(wrong, here[place : place + 1], f"{field}: {reason}. {UNFIT}")
            has_field = values.present(local)
            if has_field is not None:
                lacking = here[~has_field]
                present[lacking] = False
                if field not in self._lacking:
                    mark(wrong, lacking, f"{field}: {_MISSING}")
            yield here, local, values

    def _decode(self, chunk: int, unit: int, field: str, data: ShardData) -> Any:
        """Decode a chunk; return the error if it is damaged."""
        try:
            return self.decoded(chunk, unit, field, data)
        except ValueError as error:
            if isinstance(error, PenstockError):
                raise
            return error

    def _groups_of(self, rows: Ints) -> Mapping[int, tuple[Ints, Ints]]:
        """Return the units of rows, each with the places of its rows among them, and these rows'
        numbers in the unit. A batch reads the same rows of several fields one after the other."""
        key, (known, groups) = rows.tobytes(), self._last
        if known != key:
            units, groups = self.units_of(rows), {}
            for unit in np.unique(units).tolist():
                here = np.flatnonzero(units == unit)
                groups[unit] = here, rows[here] - self._bounds[unit]
            self._last = key, groups
        return groups
