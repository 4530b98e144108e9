"""The samples of tar files as candidates: an archive is a shard, its members are read in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.readers.formats.data_file import drop_copy
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.tar.samples import list_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.origin.origin import Entry, Origin


class TarListing:
    """The tar files of a dataset, in order; nothing of them was read."""

    def __init__(self, origin: Origin, archives: Sequence[Entry]) -> None:
        self._origin, self._archives = origin, archives

    def snapshot(self) -> Snapshot:
        """What an index notes of the archives."""
        return Snapshot.of(self._archives, {})

    def candidates(self, *, workers: int) -> Candidates:
        """Read all headers and labels; remote archives are fetched whole for that."""
        return self._candidates(self._archives, workers=workers)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The archive by itself first, then without the cache's copy; then with all others, where
        what they hold says what is a sample here. See `Listing`."""
        del number, total
        ending = b"-%s.arrow"
        here = [e for e in self._archives if name.endswith(ending % e.identity.encode())]
        if not here:
            return
        entry = here[0]
        yield self._candidates([entry], workers=workers, warns=False), 0
        drop_copy(self._origin, entry)
        yield self._candidates([entry], workers=workers, warns=False), 0
        together = self._candidates(self._archives, workers=workers, warns=False)
        yield together, self._archives.index(entry)

    def _candidates(
        self, archives: Sequence[Entry], *, workers: int, warns: bool = True
    ) -> Candidates:
        return list_samples(self._origin, archives, workers=workers, warns=warns)
