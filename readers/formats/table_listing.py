"""The files of a table, by name: what Parquet's and Arrow's listings have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from penstock.readers.formats.format import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.origin.quarantine import QuarantineEntry


class TableListing(ABC):
    """The files of a table, in the order of its rows; nothing of them was read."""

    def __init__(
        self, origin: Origin, files: Sequence[Entry], quarantined: Sequence[QuarantineEntry]
    ) -> None:
        self._origin, self._files, self._quarantined = origin, files, quarantined

    def snapshot(self) -> Snapshot:
        """What an index notes of the files."""
        return Snapshot.of(self._files, {})

    def candidates(self, *, workers: int) -> Candidates:
        """Read all footers. Raises DatasetError with the file's name."""
        return self._candidates(workers=workers, warns=True)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The same shard, made anew."""
        del name
        found = self._candidates(workers=workers, warns=False)
        if len(found.chunked) == total:
            yield found, number

    @abstractmethod
    def _candidates(self, *, workers: int, warns: bool) -> Candidates:
        """The shards, as the footers tell them. warns: of columns that are left out."""
