"""Images of tar files on their way to the verifier: read ahead on threads, in bounded chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.threads import ordered
from penstock.readers.formats.folder.intake import cut
from penstock.readers.formats.tar.remote import open_tar
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.formats.tar.listing import TarListing
    from penstock.readers.origin.origin import Origin
    from penstock.readers.types import Encoded

_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TarChunk:
    """Some candidates. positions: in the listing, int64, shape (n,); samples: bytes or a reason."""

    shard: int
    positions: NDArray[np.int64]
    samples: list[Encoded | Rejection]


def read_tar_chunks(
    origin: Origin,
    listing: TarListing,
    shards: Iterator[tuple[int, NDArray[np.int64]]],
    *,
    workers: int,
) -> Iterator[TarChunk]:
    """Chunks of the shards' candidates, in order; a chunk is of one shard.

    shards: (number, positions in the listing). Raises IndexChangedError for an archive that
    changed since it was listed, DatasetError, FetchError.
    """

    def jobs() -> Iterator[tuple[int, NDArray[np.int64]]]:
        for shard, positions in shards:
            for part in cut(listing.sizes[positions]):
                yield shard, positions[part]

    def read(job: tuple[int, NDArray[np.int64]]) -> TarChunk:
        shard, positions = job
        samples = _read(origin, listing, positions)
        return TarChunk(shard=shard, positions=positions, samples=samples)

    yield from ordered(read, jobs(), workers=workers, ahead=_AHEAD + workers, name="intake")


def _read(
    origin: Origin, listing: TarListing, positions: NDArray[np.int64]
) -> list[Encoded | Rejection]:
    """Each archive is opened once, its images read in their order there."""
    archives = np.searchsorted(listing.bounds, positions, side="right") - 1
    samples: list[Encoded | Rejection] = [Rejection("")] * len(positions)
    for number in np.unique(archives).tolist():
        places = np.flatnonzero(archives == number)
        places = places[np.argsort(listing.starts[positions[places]])]
        starts, sizes = listing.starts[positions[places]], listing.sizes[positions[places]]
        with open_tar(origin, listing.archives[number]) as opened:
            found = opened.images(starts.tolist(), sizes.tolist())
        for place, sample in zip(places.tolist(), found, strict=True):
            samples[place] = sample
    return samples
