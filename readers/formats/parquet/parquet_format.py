"""Recognise and read datasets of Parquet files: a folder of them, or those that a URL names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.readers.files import extension
from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.parquet.parquet_chunks import decode_chunk, read_notes
from penstock.readers.formats.tables import UnitReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader
    from penstock.readers.formats.format import Format, Indexing, Listing, Snapshot
    from penstock.readers.formats.parquet.parquet_listing import ParquetListing
    from penstock.readers.origin import Origin
    from penstock.readers.types import Encoded

_MOST_BYTES = 2**31  # whatever a footer claims


class ParquetReader(UnitReader):
    """Decodes column chunks. Several threads may call it."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
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


EXTENSIONS = frozenset(("parquet", "parq", "pq"))


@dataclass(frozen=True, slots=True)
class ParquetIndexing:
    """How Parquet files get an index: local ones are looked at each time (name, size, time)."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> ParquetListing:
        """List all files, of folders inside too; raises as `list_folder` does."""
        from penstock.readers.formats.folder import list_folder
        from penstock.readers.formats.parquet.parquet_listing import ParquetListing

        if origin.selection is not None:  # in the order in which they are named
            return ParquetListing(origin, origin.top(bool).entries, ())
        found = list_folder(origin)
        files = [entry for entry in found.files if extension(entry.name) in EXTENSIONS]
        return ParquetListing(origin, files, found.quarantined)

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very files that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


@dataclass(frozen=True, slots=True)
class ParquetFormat(ChunkFormat):
    """A folder of Parquet files, or those that are named."""

    name: ClassVar[str] = "parquet"
    least_sample_bytes: ClassVar[int] = 0
    indexing: ClassVar[Indexing | None] = ParquetIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Whether Parquet files lie at the root and neither pictures nor folders do."""
        from penstock.readers.formats.tables import are_tables

        return are_tables(origin, EXTENSIONS)

    def open_chunks(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard. Raises CorruptShardError."""

        return ParquetReader(shard)


FORMAT: Format = ParquetFormat()
