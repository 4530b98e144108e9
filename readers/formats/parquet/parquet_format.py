"""Recognise and read datasets of Parquet files: a folder of them, or those that a URL names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from penstock.readers.formats.parquet.parquet_chunks import decode_chunk, read_notes
from penstock.readers.formats.tables import TableFormat, UnitReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader
    from penstock.readers.formats.tables import TableMetadata
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded


class ParquetReader(UnitReader):
    """Reads rows of a shard. Several threads may call it."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
        """Raises CorruptShardError."""
        self._notes = read_notes(shard)
        super().__init__(shard, self._notes.units)
        self._rows = {
            int(extent): int(rows)
            for chunks, rows in zip(self._notes.units.chunks, shard.units, strict=True)
            for extent in chunks
        }

    def decode(
        self, extent: int, type: FieldType, data: Encoded, dictionaries: Sequence[Encoded]
    ) -> Any:
        """Return a column chunk's table. Raises ValueError if its bytes are damaged."""
        del dictionaries
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


class ParquetFormat(TableFormat):
    """Parquet files."""

    name: ClassVar[str] = "parquet"
    kind: ClassVar[str] = "Parquet"
    extensions: ClassVar[frozenset[str]] = frozenset(("parquet", "parq", "pq"))

    def metadata(self, origin: Origin, files: Sequence[Entry], *, workers: int) -> TableMetadata:
        """Read the metadata of all files."""
        from penstock.readers.formats.parquet.parquet_listing import ParquetMetadata

        return ParquetMetadata(origin, files, workers=workers)

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard. Raises CorruptShardError."""
        return ParquetReader(shard)


FORMAT = ParquetFormat()
