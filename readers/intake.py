"""Files of a folder on their way to the verifier: read ahead on threads, in bounded chunks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.threads import ordered
from readers.folder_shard import changed, read_file, unreadable
from readers.sniff import HEAD_BYTES, sniff
from readers.types import Rejected

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from readers.folder import File, Listing
    from readers.origin import Origin
    from readers.types import Encoded

# Enough images for every core of a large machine to have some, and little enough that a few chunks
# in flight are tens of megabytes.
CHUNK_BYTES = 32 * 2**20
CHUNK_FILES = 256
_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some candidates. positions: in the listing, int64, shape (n,); samples: bytes or a reason."""

    shard: int
    positions: NDArray[np.int64]
    samples: list[Encoded | Rejected]


def cut(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Slices of at most CHUNK_FILES files and CHUNK_BYTES (or one file). sizes: bytes, shape
    (n,)."""
    start, held = 0, 0
    for i, size_bytes in enumerate(sizes.tolist()):
        if i > start and (held + size_bytes > CHUNK_BYTES or i - start == CHUNK_FILES):
            yield slice(start, i)
            start, held = i, 0
        held += size_bytes
    if start < len(sizes):
        yield slice(start, len(sizes))


def read_chunks(
    origin: Origin,
    listing: Listing,
    shards: Iterator[tuple[int, NDArray[np.int64]]],
    *,
    workers: int,
    keep_copies: bool = True,
) -> Iterator[Chunk]:
    """Chunks of the shards' candidates, in order; a chunk is of one shard.

    shards: (number, positions in the listing). keep_copies: leave downloads where they are; else
    each goes when it is read. Raises IndexChangedError for a file that changed or
    vanished since it was listed, DatasetError, FetchError.
    """

    def jobs() -> Iterator[tuple[int, NDArray[np.int64]]]:
        for shard, positions in shards:
            for part in cut(listing.sizes[positions]):
                yield shard, positions[part]

    def read(job: tuple[int, NDArray[np.int64]]) -> Chunk:
        shard, positions = job
        samples = []
        for file in map(listing.files.__getitem__, positions.tolist()):
            samples.append(read_candidate(origin, file))
            if not keep_copies:
                origin.drop(file.name, size_bytes=file.size_bytes, version=file.version)
        return Chunk(shard=shard, positions=positions, samples=samples)

    yield from ordered(read, jobs(), workers=workers, ahead=_AHEAD + workers, name="intake")


def read_candidate(origin: Origin, file: File) -> Encoded | Rejected:
    """A file's bytes, or why it can't be an image; a large file of another kind isn't read
    whole."""
    path = origin.file(file.name, size_bytes=file.size_bytes, version=file.version)
    try:
        with open(path, "rb", buffering=0) as opened:
            head = opened.read(HEAD_BYTES)
    except FileNotFoundError:
        raise changed(file.name, "it is gone") from None
    except PermissionError as error:
        return Rejected(f"can't be read ({error.strerror})")
    except OSError as error:
        raise unreadable(file.name, error) from error
    if len(head) != min(HEAD_BYTES, file.size_bytes):
        raise changed(file.name, f"it had {file.size_bytes} bytes and has another number")
    codec = sniff(head)
    if isinstance(codec, Rejected):
        return codec
    data = read_file(path, name=file.name, size_bytes=file.size_bytes)
    if file.mtime_ns and os.stat(path).st_mtime_ns != file.mtime_ns:
        raise changed(file.name, "it was written to in the meantime")
    return data
