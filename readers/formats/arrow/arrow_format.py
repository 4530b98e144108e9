"""Recognise and read datasets of Arrow IPC files: a folder of them, or those that a URL names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.readers.files import extension
from penstock.readers.formats.arrow.ipc_chunks import decode_chunk, read_notes
from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.tables import UnitReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.arrow.arrow_listing import ArrowListing
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader
    from penstock.readers.formats.format import Format, Indexing, Listing, Snapshot
    from penstock.readers.origin import Origin
    from penstock.readers.types import Encoded


class ArrowReader(UnitReader):
    """Makes arrays of buffers, without a copy where they aren't compressed."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
        """Raises CorruptShardError."""
        self._notes, self._forms = read_notes(shard)
        self._fields = np.asarray(shard.extents.fields).tolist()
        super().__init__(shard, self._notes.units)

    def is_plain(self, extent: int) -> bool:
        """Whether its buffers aren't compressed, and it has no dictionary."""
        chunk = self._notes.chunks[extent]
        return not chunk.codec and not chunk.dictionaries

    def beside(self, extent: int) -> Sequence[int]:
        """The extents of its dictionary's values."""
        return self._notes.chunks[extent].dictionaries

    def decode(self, extent: int, type: FieldType, data: Encoded, beside: Sequence[Encoded]) -> Any:
        """A column's table."""
        chunk, field = self._notes.chunks[extent], self._fields[extent]
        others = [self._notes.chunks[number] for number in chunk.dictionaries]
        return decode_chunk(
            data,
            chunk,
            self._forms[chunk.form],
            type,
            self._notes.parts[field],
            [
                (each, other, self._forms[other.form])
                for each, other in zip(beside, others, strict=True)
            ],
            self._notes.tensors.get(field),
        )


EXTENSIONS = frozenset(("arrow", "feather", "ipc", "arrows"))


@dataclass(frozen=True, slots=True)
class ArrowIndexing:
    """How Arrow files get an index: local ones are looked at each time (name, size, time)."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> ArrowListing:
        """List all files, of folders inside too; raises as `list_folder` does."""
        from penstock.readers.formats.arrow.arrow_listing import ArrowListing
        from penstock.readers.formats.folder import list_folder

        if origin.selection is not None:  # in the order in which they are named
            return ArrowListing(origin, origin.top(bool).entries, ())
        found = list_folder(origin)
        files = [entry for entry in found.files if extension(entry.name) in EXTENSIONS]
        return ArrowListing(origin, files, found.quarantined)

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very files that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


@dataclass(frozen=True, slots=True)
class ArrowFormat(ChunkFormat):
    """A folder of Arrow files, or those that are named."""

    name: ClassVar[str] = "arrow"
    least_sample_bytes: ClassVar[int] = 0
    indexing: ClassVar[Indexing | None] = ArrowIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Whether Arrow files lie at the root and neither pictures nor folders do."""
        from penstock.readers.formats.tables import are_tables

        return are_tables(origin, EXTENSIONS)

    def open_chunks(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard. Raises CorruptShardError."""

        return ArrowReader(shard)


FORMAT: Format = ArrowFormat()
"""Those of our own packs carry their index and are packs."""
