"""Read rows of a shard whose units (row groups, record batches) hold each field as one chunk.

The index notes where the units' chunks are and how each is decoded, so opening a shard needs no
metadata of its files.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.formats.tables.column_values import TableValues
from penstock.readers.formats.unit_reader import NO_CHUNK, UnitReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts, ShardData
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]


class TableReader(UnitReader):
    """The base of readers of tables; a subclass decodes its format's chunks."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
        """Read the notes of a shard. Raises ValueError, TypeError, LookupError or OverflowError if
        they are invalid."""
        notes = shard.note
        super().__init__(shard, lacking=notes["lacking"])
        self._numbers = {name: number for number, name in enumerate(shard.schema)}
        # The shard's files, for messages; of each unit, the number of its file and the unit's first
        # row in that file; and the extent of each field in each unit.
        self._names = [str(name) for name in notes["names"]]
        self._files, self._firsts = (np.array(notes[key], np.int64) for key in ("files", "firsts"))
        self._chunks = np.array(notes["extents"], np.int64).reshape(-1, len(shard.schema))
        counts = {len(shard.units), len(self._files), len(self._firsts), len(self._chunks)}
        if len(counts) > 1 or len(notes["chunks"]) != len(shard.extents):
            raise ValueError("the numbers of its units or chunks disagree")
        for numbers, least, end in (
            (self._chunks, NO_CHUNK, len(shard.extents)),
            (self._files, 0, len(self._names)),
            (self._firsts, 0, 2**63),
        ):
            if not least <= int(numbers.min()) <= int(numbers.max()) < end:
                raise ValueError("its units have chunks, files or rows that don't exist")
        self.read_notes(notes, shard, self._chunks)

    @abstractmethod
    def read_notes(self, notes: Any, shard: ChunkedShardFacts, chunks: Ints) -> None:
        """Read and check the notes on forms and chunks. chunks: the extent of each field in each
        unit, or NO_CHUNK, int64, shape (units, fields). Raises ValueError, TypeError, KeyError."""

    @abstractmethod
    def decode(
        self, extent: int, type: FieldType, data: Encoded, dictionaries: Sequence[Encoded]
    ) -> Any:
        """Return a chunk's values, as `values_table` does. dictionaries: the bytes of the extents
        that `dictionaries` names. Raises ValueError if the bytes are damaged."""

    def is_plain(self, extent: int) -> bool:
        """Return True if a chunk's table consists of views of its bytes when these are mapped."""
        del extent
        return False

    def chunks(self, units: list[int], field: str) -> list[int]:
        """Return the extents of a field of some units."""
        number = self._numbers[field]
        return [int(self._chunks[unit, number]) for unit in units]

    def name(self, row: int) -> str:
        """Return a row's file and its number in that file."""
        unit, at = self.place_of(row)
        return f"{self._names[self._files[unit]]}, row {self._firsts[unit] + at}"

    def values(self, chunk: int, unit: int, field: str, data: ShardData, taken: int) -> TableValues:
        """Return the values of a chunk. Raises ValueError if it can't be decoded."""
        count = self._counts[unit]

        def decode() -> Any:
            view, dictionaries = data.view(chunk), self.dictionaries(chunk)
            read = data.read([*dictionaries] if view is not None else [chunk, *dictionaries])
            view = read.pop(0) if view is None else view
            table = self.decode(chunk, self._schema[field], view, read)
            if len(table) != count:
                raise ValueError(f"it has {len(table):,} rows, and the index has {count:,}")
            return table

        is_view = self.is_plain(chunk) and data.view(chunk, size_bytes=0) is not None
        found = data.decoded(chunk, decode, uses=count, taken=taken, is_view=is_view)
        return TableValues(found)
