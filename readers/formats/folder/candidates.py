"""A folder's files as candidates: grouped into virtual shards, read, and noted in sidecars."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields.verify import SampleFacts
from penstock.readers.formats.folder.files import read_files
from penstock.readers.formats.folder.listing import (
    VIRTUAL_SHARD_BYTES,
    FolderListing,
    virtual_shards,
)
from penstock.readers.formats.folder.sidecar import FolderSidecar
from penstock.readers.formats.format import PriorFacts, Snapshot
from penstock.readers.formats.image_columns import ImageColumns
from penstock.readers.origin.origin import Entry
from penstock.readers.types import ImageFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.format import Sidecar
    from penstock.readers.formats.grouping import Grouping
    from penstock.readers.origin.origin import Origin
    from penstock.readers.types import Encoded, Rejection


class FolderCandidates:
    """All files of a folder. A listing alone tells them, so this is a `Listing` too."""

    shard_bytes: int | None = VIRTUAL_SHARD_BYTES

    def __init__(self, origin: Origin, listing: FolderListing) -> None:
        self._origin, self._listing = origin, listing
        self.sizes, self.labels = listing.sizes, listing.labels
        self.classes = listing.classes
        self.quarantined, self.passed_over = listing.quarantined, listing.passed_over

    @cached_property
    def shards(self) -> Grouping:
        """The virtual shards, grouped by a hash of the names."""
        return virtual_shards(self._listing)

    def snapshot(self) -> Snapshot:
        """What an index notes of the files and of the folders' times."""
        return Snapshot.of(self._listing.files, self._listing.directories)

    def candidates(self, *, workers: int) -> FolderCandidates:
        """This very object: nothing has to be read."""
        del workers
        return self

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[FolderCandidates, int]]:
        """The shard of that number, and those that it can be instead: virtual shards of which no
        file decodes aren't in the index."""
        del name, workers
        without_samples = self.shards.shards - total
        for here in range(number, number + without_samples + 1):
            yield self, here

    def name(self, position: int) -> bytes:
        """The name of a file below the dataset's root."""
        return self._listing.files[position].name

    def read(self, positions: NDArray[np.int64]) -> list[Encoded | Rejection]:
        """Read whole files, or say why one can't be an image."""
        return read_files(self._origin, self._files(positions))

    def _files(self, positions: NDArray[np.int64]) -> list[Entry]:
        return [self._listing.files[i] for i in positions.tolist()]

    def sidecar(
        self, shard: int, positions: NDArray[np.int64], facts: Sequence[SampleFacts]
    ) -> FolderSidecar:
        """The sidecar of a virtual shard's good files."""
        del shard
        files, labels = self._files(positions), self.labels
        return FolderSidecar(
            names=[file.name for file in files],
            sizes=self.sizes[positions],
            mtimes_ns=np.array([file.mtime_ns for file in files], np.int64),
            versions=[file.version for file in files],
            images=ImageColumns.of(facts, None if labels is None else labels[positions]),
        )

    def prior(self, sidecars: Iterable[Sidecar]) -> PriorFacts:
        """What earlier sidecars say of the files that still have their names."""
        earlier: dict[bytes, tuple[Entry, SampleFacts]] = {}
        for sidecar in sidecars:
            if not isinstance(sidecar, FolderSidecar):
                raise TypeError(f"{sidecar!r} is not a folder's")
            earlier |= ((file.name, (file, facts)) for file, facts in _rows(sidecar))
        same: dict[int, SampleFacts] = {}
        before: dict[int, SampleFacts] = {}
        shared = 0
        for position, file in enumerate(self._listing.files):
            if file.name not in earlier:
                continue
            shared += 1
            entry, facts = earlier[file.name]
            if entry.size_bytes == file.size_bytes:
                before[position] = facts
            if entry == file:
                same[position] = facts
        return PriorFacts(same=same, before=before, shared=shared, gone=len(earlier) - shared)


def _rows(sidecar: FolderSidecar) -> Iterator[tuple[Entry, SampleFacts]]:
    images = sidecar.images
    columns = zip(
        sidecar.names,
        sidecar.sizes.tolist(),
        sidecar.mtimes_ns.tolist(),
        sidecar.versions,
        images.crcs.tolist(),
        images.heights.tolist(),
        images.widths.tolist(),
        images.channels.tolist(),
        images.codecs,
        strict=True,
    )
    for name, size_bytes, mtime_ns, version, crc, height, width, channels, codec in columns:
        image = ImageFacts(height=height, width=width, channels=channels, codec=codec)
        yield (
            Entry(name=name, size_bytes=size_bytes, mtime_ns=mtime_ns, version=version),
            SampleFacts(crc32c=crc, image=image),
        )
