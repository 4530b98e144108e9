"""Arrow IPC files as a format, Feather's too: a folder of them, or those that a URL names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats.arrow.listing import ArrowListing
    from penstock.readers.formats.chunked import ChunkReader, ShardFacts
    from penstock.readers.formats.format import Format, Indexing, Listing, Snapshot
    from penstock.readers.origin.origin import Origin

EXTENSIONS = frozenset(("arrow", "feather", "ipc", "arrows"))


@dataclass(frozen=True, slots=True)
class ArrowIndexing:
    """How Arrow files get an index: local ones are looked at each time (name, size, time)."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> ArrowListing:
        """List all files, of folders inside too; raises as `list_folder` does."""
        from penstock.readers.formats.arrow.listing import ArrowListing
        from penstock.readers.formats.folder.listing import list_folder

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
        from penstock.readers.formats.table_files import are_tables

        return are_tables(origin, EXTENSIONS)

    def open_chunks(self, shard: ShardFacts) -> ChunkReader:
        """Open a shard. Raises CorruptShardError."""
        from penstock.readers.formats.arrow.reader import ArrowReader

        return ArrowReader(shard)


FORMAT: Format = ArrowFormat()
"""Those of our own packs carry their index and are packs."""
