"""The samples of tar files as candidates: an archive is a shard, its images are read in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.grouping import Grouping
from penstock.readers.formats.image_columns import ImageColumns
from penstock.readers.formats.tar.archive import drop_copy, open_archive
from penstock.readers.formats.tar.samples import list_samples
from penstock.readers.formats.tar.sidecar import TarSidecar
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.verify import SampleFacts
    from penstock.readers.formats.format import PriorFacts, Sidecar
    from penstock.readers.formats.tar.samples import TarSamples
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Encoded


class TarListing:
    """The tar files of a dataset, in order; nothing of them was read."""

    def __init__(self, origin: Origin, archives: Sequence[Entry]) -> None:
        self._origin, self._archives = origin, archives

    def snapshot(self) -> Snapshot:
        """What an index notes of the archives."""
        return Snapshot.of(self._archives, {})

    def candidates(self, *, workers: int) -> TarCandidates:
        """Read all headers and labels; remote archives are fetched whole for that."""
        return self._candidates(self._archives, workers=workers)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[TarCandidates, int]]:
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
    ) -> TarCandidates:
        samples = list_samples(self._origin, archives, workers=workers, warns=warns)
        return TarCandidates(self._origin, samples)


class TarCandidates:
    """All samples of some archives, in the order of their images there."""

    classes: tuple[str, ...] = ()
    shard_bytes: int | None = None

    def __init__(self, origin: Origin, samples: TarSamples) -> None:
        self._origin, self._samples = origin, samples
        self.sizes, self.labels = samples.sizes, samples.labels
        self.quarantined, self.passed_over = samples.quarantined, samples.passed_over

    @property
    def shards(self) -> Grouping:
        """One shard an archive, also where it holds no sample."""
        order = np.arange(len(self.sizes), dtype=np.int64)
        return Grouping(order=order, bounds=self._samples.bounds)

    def name(self, position: int) -> bytes:
        """A sample's name, such as "train-000.tar/dog.jpg"."""
        return self._samples.shown(position)

    def read(self, positions: NDArray[np.int64]) -> list[Encoded | Rejection]:
        """Read images: each archive is opened once, its images come in their order there."""
        listed = self._samples
        numbers = np.searchsorted(listed.bounds, positions, side="right") - 1
        samples: list[Encoded | Rejection] = [Rejection("")] * len(positions)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            places = places[np.argsort(listed.starts[positions[places]])]
            starts, sizes = listed.starts[positions[places]], listed.sizes[positions[places]]
            with open_archive(self._origin, listed.archives[number]) as opened:
                found = opened.images(starts.tolist(), sizes.tolist())
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample
        return samples

    def sidecar(
        self, shard: int, positions: NDArray[np.int64], facts: Sequence[SampleFacts]
    ) -> TarSidecar:
        """The sidecar of an archive's good samples."""
        listed, labels = self._samples, self.labels
        return TarSidecar(
            archive=listed.archives[shard],
            names=[listed.names[i] for i in positions.tolist()],
            keys=[listed.keys[i] for i in positions.tolist()],
            starts=listed.starts[positions],
            sizes=listed.sizes[positions],
            images=ImageColumns.of(facts, None if labels is None else labels[positions]),
        )

    def prior(self, sidecars: Iterable[Sidecar]) -> PriorFacts:
        """Raise TypeError: nobody asks, as one label more or less may concern every sample."""
        del sidecars
        raise TypeError("tar files are indexed anew as a whole")
