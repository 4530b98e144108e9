"""The index of a set of tar files: still true or not, and building it.

Local archives are looked at each time (name, size, time); where any differs, the whole set is
indexed anew, since a label more or less may concern every sample. Remote ones aren't listed again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.errors import IndexChangedError
from readers.atomic import locked, make_folder
from readers.names import printable
from readers.places import read_own
from readers.tar_build import build_tar_index
from readers.tar_listing import fingerprint, list_archives, list_samples
from readers.verify import find_verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from readers.manifest import Manifest
    from readers.origin import Entry, Origin
    from readers.places import Places
    from readers.types import Progress, Verify

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
        place = self.places.make()
        with locked(place):
            # Who held the lock before may have built it.
            return self._read(place, archives) or self._build(place, archives), place

    def rebuild(self) -> tuple[Manifest, bytes]:
        """Build it anew, whatever is there. Raises as build_index."""
        archives = list_archives(self.origin)
        if self.origin.is_local:
            place = self.places.make()
        else:
            place = self.places.candidates()[0]
            make_folder(place)
        with locked(place):
            return self._build(place, archives), place

    def _open_remote(self) -> tuple[Manifest, bytes]:
        place = self.places.candidates()[0]
        make_folder(place)
        with locked(place):
            manifest = read_own(place)
            if manifest is None or manifest.about.kind != "tar":
                manifest = self._build(place, list_archives(self.origin))
        return manifest, place

    def _read(self, place: bytes, archives: Sequence[Entry]) -> Manifest | None:
        """The index in `place` if it is of these very archives."""
        manifest = read_own(place)
        if manifest is None or manifest.about.kind != "tar":
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
