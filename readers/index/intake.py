"""Candidates on their way to the verifier: read ahead on threads, in bounded chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.threads import ordered

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.formats.format import Candidates
    from penstock.readers.types import Encoded, Rejection

# Enough images for every core of a large machine to have some, and little enough that a few chunks
# in flight are tens of megabytes.
_CHUNK_BYTES = 32 * 2**20
_CHUNK_SAMPLES = 256
_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some candidates of one shard. positions: int64, shape (n,); samples: bytes or a reason."""

    shard: int
    positions: NDArray[np.int64]
    samples: list[Encoded | Rejection]


def cut(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Cut a list into slices of at most 256 samples and 32 MiB (or one sample). sizes: bytes, shape
    (n,)."""
    start, slice_bytes = 0, 0
    for i, size_bytes in enumerate(sizes.tolist()):
        if i > start and (slice_bytes + size_bytes > _CHUNK_BYTES or i - start == _CHUNK_SAMPLES):
            yield slice(start, i)
            start, slice_bytes = i, 0
        slice_bytes += size_bytes
    if start < len(sizes):
        yield slice(start, len(sizes))


def read_chunks(
    candidates: Candidates, shards: Iterator[tuple[int, NDArray[np.int64]]], *, workers: int
) -> Iterator[Chunk]:
    """Read the chunks of shards' candidates, in order.

    shards: (number, positions). Raises what `Candidates.read` raises.
    """

    def pieces() -> Iterator[tuple[int, NDArray[np.int64]]]:
        for shard, positions in shards:
            for some in cut(candidates.sizes[positions]):
                yield shard, positions[some]

    def read(piece: tuple[int, NDArray[np.int64]]) -> Chunk:
        shard, positions = piece
        return Chunk(shard=shard, positions=positions, samples=candidates.read(positions))

    yield from ordered(read, pieces(), workers=workers, ahead=_AHEAD + workers, name="intake")
