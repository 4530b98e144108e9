"""The index of a set of tar files: still true or not, and building it.

Local archives are looked at each time (name, size, time); where any differs, the whole set is
indexed anew, since a label more or less may concern every sample. Remote ones aren't listed again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import IndexChangedError
from penstock.readers.fields.verify import find_verify
from penstock.readers.files.atomic import locked
from penstock.readers.files.names import printable
from penstock.readers.formats.tar.building import build_tar_index
from penstock.readers.formats.tar.listing import fingerprint, list_archives, list_samples
from penstock.readers.index.places import read_own

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.places import Places
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Progress, Verify

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class TarOpener:
    """The steps of `Opener` for tar files; each returns the manifest and the folder it is in."""

    places: Places
    origin: Origin
    verify: Verify | None
    workers: int
    progress: Progress | None

    def open(self) -> tuple[Manifest, bytes]:
        """The index, built if there is none or it isn't true any more. Raises as open_index."""
        if not self.origin.is_local:
            return self._open_remote()
        archives = list_archives(self.origin)
        for place in self.places.candidates():
            manifest = self._read(place, archives)
            if manifest is not None:
                return manifest, place
        return self._make(archives)

    def _make(self, archives: Sequence[Entry]) -> tuple[Manifest, bytes]:
        place = self.places.make()
        with locked(place):
            # Who held the lock before may have built it.
            return self._read(place, archives) or self._build(place, archives), place

    def rebuild(self) -> tuple[Manifest, bytes]:
        """Build it anew, whatever is there. Raises as build_index."""
        archives = list_archives(self.origin)
        place = self.places.make()
        with locked(place):
            return self._build(place, archives), place

    def _open_remote(self) -> tuple[Manifest, bytes]:
        home = self.places.home()
        for place in self.places.candidates():
            # In the user's cache directory nobody said that the index shall stand.
            manifest = _read_tar(place)
            if manifest is not None and place != home:
                return manifest, place
        archives = list_archives(self.origin)
        if home is not None and home in self.places.candidates():
            manifest = self._read(home, archives)
            if manifest is not None:
                return manifest, home
        place = self.places.make()
        with locked(place):
            # Who held the lock before may have built it.
            manifest = self._read(place, archives) if place == home else _read_tar(place)
            return manifest or self._build(place, archives), place

    def _read(self, place: bytes, archives: Sequence[Entry]) -> Manifest | None:
        """The index in `place` if it is of these very archives."""
        manifest = _read_tar(place)
        if manifest is None:
            return None
        if manifest.about.listing == fingerprint(archives):
            return manifest
        if self.places.index is not None and manifest.about.source != self.origin.url:
            raise IndexChangedError(
                f"{printable(place)}: this index is of {manifest.about.source}, and doesn't fit "
                f"{self.origin.url}. Give that dataset's own folder as index=, or an empty one."
            )
        return None

    def _build(self, place: bytes, archives: Sequence[Entry]) -> Manifest:
        listing = list_samples(self.origin, archives, workers=self.workers)
        _log.info(
            "Indexing %s: each of %d images is decoded once", self.origin.url, len(listing.names)
        )
        return build_tar_index(
            self.origin,
            listing,
            place,
            verify=self.verify or find_verify(workers=self.workers),
            workers=self.workers,
            progress=self.progress,
        )


def _read_tar(place: bytes) -> Manifest | None:
    """The index of tar files in `place`; see read_own."""
    manifest = read_own(place)
    return manifest if manifest is None or manifest.about.kind == "tar" else None
