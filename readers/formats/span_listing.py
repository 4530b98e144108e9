"""List the files of a dataset whose samples are spans, and turn them into candidates.

A format defines a `SpanListing`: which files there are, and the samples that some of them hold. The
files are shards, or, if they are small, their samples are grouped into virtual shards. The rest is
common code: snapshots, reports, a second try without a damaged copy in the cache, and the
candidates from which a single shard of an earlier index is rebuilt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from penstock.cache import DatasetError, ordered
from penstock.readers.formats.format import DatasetFiles, Snapshot, identity_of
from penstock.readers.formats.unindexed_files import DataFile, open_data_file
from penstock.readers.origin import Entry, Origin, RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.candidates import Candidates


Part = TypeVar("Part")


class SpanListing(ABC):
    """The files of a dataset whose samples are spans of files; a `Listing`.

    listed: all files that the samples depend on, by default the dataset's.
    """

    def __init__(
        self, origin: Origin, found: DatasetFiles, *, listed: Sequence[Entry] | None = None
    ) -> None:
        self.origin, self.files, self._found = origin, found.entries, found
        self._all = self.files if listed is None else listed
        self._candidates: Candidates | None = None

    @abstractmethod
    def samples(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        """Return the listed samples of some files, which are read on `workers` threads. Raises
        DatasetError, ConfigError, IndexChangedError, FetchError."""

    @property
    def given(self) -> dict[str, FieldType]:
        """Return the types from the user's schema."""
        return dict(self.origin.arrangement.schema)

    def snapshot(self) -> Snapshot:
        """Return the names, sizes and times of all files, for the index."""
        return Snapshot.of(self._all, self._found.directories)

    def candidates(self, *, workers: int) -> Candidates:
        """Return what may be samples, and warn once of what is left out. Raises as `samples`
        does."""
        if self._candidates is None:
            self._candidates = self._of(self.files, workers=workers, is_reported=True)
        return self._candidates

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """Yield candidates for a shard of an earlier index; see `Listing`.

        If the shard is a file: that file by itself, then the same without the cache's copy. Then
        all files together, because they may decide which samples of a file are good. An index
        omits shards without a good sample, so its numbers may be smaller.
        """
        identity = identity_of(name)
        own = [entry for entry in self.files if identity and entry.identity == identity]
        for entry in own:
            yield self._of([entry], workers=workers), 0
            _drop_cached_copy(self.origin, entry)
            yield self._of([entry], workers=workers), 0
        if identity and not own:
            return
        together = self.candidates(workers=workers)
        more = len(together.shards) - total
        numbers = map(self.files.index, own) if identity else range(number, number + more + 1)
        for each in numbers:
            yield together, each

    def _of(self, files: Sequence[Entry], *, workers: int, is_reported: bool = False) -> Candidates:
        found = self.samples(files, workers=workers).without_rejected()
        most = self.origin.arrangement.max_pixels
        found = replace(
            found,
            quarantined=[*self._found.quarantined, *found.quarantined],
            max_pixels=found.max_pixels if most is None else most,
        )
        if is_reported:
            found.report(self.origin.url)
        return found.grouped(self.given, url=self.origin.url)

    def read_each(
        self,
        files: Sequence[Entry],
        read: Callable[[DataFile, Entry], Part],
        *,
        workers: int,
        whole: bool = True,
    ) -> list[Part]:
        """Return read(open file, entry) of each file. whole: as in `open_data_file`.

        If an object's copy in the cache can't be read, it was damaged before it was complete, when
        it had no checksums yet; it is fetched again.
        """

        def once(entry: Entry) -> Part:
            with open_data_file(self.origin, entry, whole=whole) as opened:
                return read(opened, entry)

        def twice(entry: Entry) -> Part:
            origin = self.origin
            is_cached = isinstance(origin, RemoteFolder) and origin.remote.is_whole(
                origin.archive(entry)
            )
            try:
                return once(entry)
            except DatasetError:
                if not is_cached:
                    raise
            _drop_cached_copy(origin, entry)
            return once(entry)

        return list(ordered(twice, files, workers=workers, ahead=workers + 2, name="list"))


def _drop_cached_copy(origin: Origin, entry: Entry) -> None:
    if isinstance(origin, RemoteFolder):
        origin.remote.drop(origin.archive(entry))
