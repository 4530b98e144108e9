"""Files of a folder on their way to the verifier: read ahead on threads, in bounded chunks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.threads import ordered
from penstock.readers.fields.sniff import HEAD_BYTES, sniff
from penstock.readers.formats.local_files import changed, read_file, unreadable
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.formats.folder.listing import Listing
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Encoded

# Enough images for every core of a large machine to have some, and little enough that a few chunks
# in flight are tens of megabytes.
CHUNK_BYTES = 32 * 2**20
CHUNK_FILES = 256
_AHEAD = 3
# Of a remote file up to this size looking at its head first costs more than it saves.
_SMALL_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some candidates. positions: in the listing, int64, shape (n,); samples: bytes or a reason."""

    shard: int
    positions: NDArray[np.int64]
    samples: list[Encoded | Rejection]


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
) -> Iterator[Chunk]:
    """Chunks of the shards' candidates, in order; a chunk is of one shard. Remote files are kept
    nowhere: where they lie in a shard isn't known before they are judged.

    shards: (number, positions in the listing). Raises IndexChangedError for a file that changed or
    vanished since it was listed, DatasetError, FetchError.
    """

    def jobs() -> Iterator[tuple[int, NDArray[np.int64]]]:
        for shard, positions in shards:
            for part in cut(listing.sizes[positions]):
                yield shard, positions[part]

    def read(job: tuple[int, NDArray[np.int64]]) -> Chunk:
        shard, positions = job
        files = [listing.files[i] for i in positions.tolist()]
        return Chunk(shard=shard, positions=positions, samples=_read(origin, files))

    yield from ordered(read, jobs(), workers=workers, ahead=_AHEAD + workers, name="intake")


def _read(origin: Origin, files: Sequence[Entry]) -> list[Encoded | Rejection]:
    if isinstance(origin, RemoteFolder):
        return _read_remote(origin, files)
    if isinstance(origin, LocalFolder):
        return [read_candidate(origin, file) for file in files]
    raise TypeError(f"unknown origin {origin!r}")


def _read_remote(origin: RemoteFolder, files: Sequence[Entry]) -> list[Encoded | Rejection]:
    """As read_candidate, over many files at once: of large ones the head is looked at first."""
    first = [f.size_bytes if f.size_bytes <= _SMALL_BYTES else HEAD_BYTES for f in files]
    samples: list[Encoded | Rejection] = []
    for data in origin.read(list(zip(files, first, strict=True))):
        codec = sniff(data[:HEAD_BYTES].tobytes())
        samples.append(codec if isinstance(codec, Rejection) else data)
    large = [
        i
        for i, sample in enumerate(samples)
        if not isinstance(sample, Rejection) and first[i] < files[i].size_bytes
    ]
    whole = origin.read([(files[i], files[i].size_bytes) for i in large]) if large else []
    for i, data in zip(large, whole, strict=True):
        samples[i] = data
    return samples


def read_candidate(origin: LocalFolder, file: Entry) -> Encoded | Rejection:
    """A file's bytes, or why it can't be an image; a large file of another kind isn't read
    whole."""
    path = os.path.join(origin.root, file.name)
    try:
        with open(path, "rb", buffering=0) as opened:
            head = opened.read(HEAD_BYTES)
    except FileNotFoundError:
        raise changed(file.name, "it is gone") from None
    except PermissionError as error:
        return Rejection(f"can't be read ({error.strerror})")
    except OSError as error:
        raise unreadable(file.name, error) from error
    if len(head) != min(HEAD_BYTES, file.size_bytes):
        raise changed(file.name, f"it had {file.size_bytes} bytes and has another number")
    codec = sniff(head)
    if isinstance(codec, Rejection):
        return codec
    data = read_file(path, name=file.name, size_bytes=file.size_bytes)
    if file.mtime_ns and os.stat(path).st_mtime_ns != file.mtime_ns:
        raise changed(file.name, "it was written to in the meantime")
    return data
