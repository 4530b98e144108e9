"""What a dataset says of what it has open, and lets go of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.counters import Traffic
from penstock.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.readers.reading.reader import SampleReader


class OpenSource(Source):
    """A source that reads by a reader of its own, once it is open."""

    _reader: SampleReader | None

    @property
    def bytes_fetched(self) -> int:
        """Bytes downloaded so far; 0 for a local dataset."""
        return self.traffic().bytes_remote

    def traffic(self) -> Traffic:
        """What was read so far, by tier; of a local dataset bytes_disk alone."""
        return self._reader.traffic() if self._reader is not None else Traffic()

    def release(self, shards: Iterable[int]) -> None:
        """Forget open shards, so that the cache may drop their blobs; batches that were handed out
        keep theirs."""
        if self._reader is not None:
            self._reader.shards.release(shards)

    def give_back(self) -> None:
        """Forget those open shards that the cache needn't keep for this dataset's loaders."""
        if self._reader is not None:
            self._reader.shards.give_back()
