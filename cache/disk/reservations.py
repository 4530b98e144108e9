"""Room for a fill, entered into the books before a byte of it is fetched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cache.base.blob import BlobSource
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.evictor import Evictor

_FULL_S = 1.0  # the search for room isn't free


class Reservations:
    """Reservations reserves room, and doesn't look for any for a while when there was none."""

    def __init__(self, catalogue: Catalogue, evictor: Evictor) -> None:
        self._catalogue, self._evictor = catalogue, evictor
        self._full_until_s = 0.0

    def reserve(
        self, source: BlobSource, *, group: str, disk_bytes: int, insist: bool, kept: bool = False
    ) -> bool:
        """Enter a fill into the books if there is room, or room can be made. insist: look for it
        even if there was none a moment ago."""
        if not insist and time.monotonic() < self._full_until_s:
            return False
        blobs = self._catalogue.blobs
        with self._catalogue.writing():
            row = blobs.row(source.key)
            need = disk_bytes - (row.disk_bytes if row is not None else 0)
            if not self._evictor.make_room(need, group=group if insist else None):
                self._full_until_s = time.monotonic() + _FULL_S
                return False
            blobs.add(
                source.key,
                group=group,
                uri=source.uri,
                size_bytes=source.size_bytes,
                disk_bytes=disk_bytes,
                state="fill",
                kept=kept,
            )
        return True
