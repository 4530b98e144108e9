"""Tar files as a format: WebDataset's samples, read where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.formats.span_format import SpanFormat
from penstock.readers.formats.tar.archives import holds_tars, list_archives

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats.format import Format, Indexing, Listing, Snapshot
    from penstock.readers.formats.tar.candidates import TarListing
    from penstock.readers.origin.origin import Origin


@dataclass(frozen=True, slots=True)
class TarIndexing:
    """How tar files get an index: local ones are looked at each time (name, size, time), and where
    any differs the whole set is indexed anew, since a label more or less may concern every
    sample."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> TarListing:
        """List all archives; raises as `list_archives` does."""
        from penstock.readers.formats.tar.candidates import TarListing  # others are only asked

        return TarListing(origin, list_archives(origin))

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very archives that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


@dataclass(frozen=True, slots=True)
class TarFormat(SpanFormat):
    """A folder of tar files, or those that a URL names."""

    name: ClassVar[str] = "tar"
    least_sample_bytes: ClassVar[int] = 1024  # its header and a block
    indexing: ClassVar[Indexing | None] = TarIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Whether tar files were named, or the root holds some; see `holds_tars`."""
        return holds_tars(origin)


FORMAT: Format = TarFormat()
