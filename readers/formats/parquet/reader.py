"""Reads the rows of a shard of Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.readers.formats.arrow.unit_reader import UnitReader
from penstock.readers.formats.parquet.chunk import decode_chunk
from penstock.readers.formats.parquet.notes import read_notes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.chunked import ShardFacts
    from penstock.readers.types import Encoded

_MOST_BYTES = 2**31  # whatever a footer claims


class ParquetReader(UnitReader):
    """Decodes column chunks. Several threads may call it."""

    def __init__(self, shard: ShardFacts) -> None:
        """Raises CorruptShardError."""
        self._notes = read_notes(shard)
        super().__init__(shard, self._notes.units)
        # Which unit an extent is of tells its rows.
        self._rows = {
            int(extent): int(rows)
            for chunks, rows in zip(self._notes.units.chunks, shard.units, strict=True)
            for extent in chunks
        }

    def decode(self, extent: int, type: FieldType, data: Encoded, beside: Sequence[Encoded]) -> Any:
        """A column chunk's table."""
        del beside
        form, values, decoded, nulls = self._notes.chunks[extent].tolist()
        return decode_chunk(
            data,
            self._notes.forms[form],
            type,
            rows=self._rows[extent],
            values=values,
            decoded=decoded,
            nulls=nulls,
        )

    def decoded_bytes(self, extent: int) -> int:
        """As the footer says."""
        return int(min(self._notes.chunks[extent, 2], _MOST_BYTES))
