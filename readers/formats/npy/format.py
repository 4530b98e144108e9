"""NumPy's files as a format: .npy whose first axis is samples, .npz, and a file a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.root_files import are_files
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.chunked import ChunkReader, ShardFacts
    from penstock.readers.formats.format import Format, Indexing, Listing
    from penstock.readers.origin.origin import Entry, Origin


class NpyListing:
    """Files of arrays, by name; nothing of them was read."""

    def __init__(self, origin: Origin, entries: list[Entry]) -> None:
        self._origin, self._entries = origin, entries

    def snapshot(self) -> Snapshot:
        """What an index notes of the files."""
        return Snapshot.of(self._entries, {})

    def candidates(self, *, workers: int) -> Candidates:
        """The shards, as the headers of the files tell them."""
        from penstock.readers.formats.candidates import Candidates
        from penstock.readers.formats.npy.fields import choose
        from penstock.readers.formats.npy.groups import read_groups
        from penstock.readers.formats.npy.shards import cut_shards

        groups = read_groups(self._origin, self._entries, workers=workers)
        chosen = choose(self._origin, groups)
        return Candidates.of_chunks(
            chosen.schema,
            list(cut_shards(chosen)),
            left_out=groups[0].left_out,
            unnamed=chosen.too_short,
        )

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The shard of the same number, if there are as many."""
        del name
        candidates = self.candidates(workers=workers)
        if len(candidates.chunked) == total:
            yield candidates, number


@dataclass(frozen=True, slots=True)
class NpyIndexing:
    """How arrays get an index: the files are looked at each time (name, size, time), and where any
    differs all headers are read anew."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> NpyListing:
        """List the files. Raises DatasetNotFoundError, ConfigError, DatasetError, FetchError."""
        from penstock.readers.formats.npy.groups import list_entries

        return NpyListing(origin, list_entries(origin))

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very files that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


@dataclass(frozen=True, slots=True)
class NpyFormat(ChunkFormat):
    """Files called *.npy or *.npz."""

    name: ClassVar[str] = "npy"
    least_sample_bytes: ClassVar[int] = 0
    indexing: ClassVar[Indexing | None] = NpyIndexing()
    takes_corners: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Whether such files were named, or lie in a folder with nothing that they may belong to.
        A folder of .npy files alone is one of samples, unless it is said what of them is one."""
        if not are_files(origin, ("npy", "npz")):
            return False
        if origin.selection is not None or origin.arrangement.sampling:
            return True
        return not any(extension(name) == "npy" for name in origin.names().files)

    def open_chunks(self, shard: ShardFacts) -> ChunkReader:
        """Open a shard."""
        from penstock.readers.formats.npy.reader import NpyReader

        return NpyReader(shard)


FORMAT: Format = NpyFormat()
