"""Define blobs, the unit of the cache: one object of a store, or several objects or ranges joined.

A blob's bytes come from its segments. Its key hashes what the bytes are; it is never a name that a
remote gave.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

ReadMode = Literal["copy", "pread", "mmap"]
"""How samples of a mapped file come: as copies of the map, as copies by reading the file past it,
or as views of the map, whose bytes change with the file."""

READ_MODE: ReadMode = "copy"
"""The default. Copying before the check costs 1.5 to 3 us for 60 KB, 0.4 % of what decoding such
an image takes (benchmarks/results/reading.json)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A segment is an object or a range of one, which is a blob or one of those that make it up.

    path: as the store calls it; version: what the object must be, None for whatever is there when
    its first byte is fetched. start: its first byte in the object. object_bytes: the object's size,
    where the segment is a range, parts of which may be fetched alone; None: it is the whole object,
    and beside other segments it is fetched as a whole. may_lack: an object that isn't there is no
    error: its bytes are then those of `absent_bytes`.
    """

    path: str
    size_bytes: int
    version: str | None
    start: int = 0
    object_bytes: int | None = None
    may_lack: bool = False

    @property
    def whole_bytes(self) -> int:
        """The size of the object that it is of."""
        return self.size_bytes if self.object_bytes is None else self.object_bytes


_ABSENT = bytes.fromhex("9c41f7d20be86a3315c0d95e7ba28f64")
LEAST_ABSENT_BYTES = len(_ABSENT)
"""So many of its first bytes tell whether the object that a range is of isn't there."""


def absent_bytes(start: int, end: int) -> bytes:
    """What stands in bytes [start, end) of a blob whose object isn't there. It says so itself, so a
    cache needs no note of it; by chance 16 bytes are these once in 10^38."""
    first = start % len(_ABSENT)
    return (_ABSENT * ((end - start + first) // len(_ABSENT) + 1))[first : first + end - start]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSource:
    """A blob source says what a blob is, and where its bytes are.

    key: 40 hex digits; uri: for people, without credentials; segments: at least one, end to end in
    this order; size_bytes: of all of them.
    """

    key: str
    uri: str
    segments: Sequence[Segment]
    size_bytes: int


def blob_key(*, scope: str, uri: str, version: str) -> str:
    """Hash what a blob is, its store's scope, its URI and its version, to 40 hex digits.

    Uniform over all keys, so a share of a dataset is "all keys below a threshold".
    """
    text = "\0".join((scope, uri, version))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]


class Blob(Protocol):
    """A blob that is open is cached (whole, or being filled), or passes (is kept nowhere)."""

    @property
    def source(self) -> BlobSource:
        """What the blob is, and where its bytes are."""

    @property
    def is_cached(self) -> bool:
        """Whether its bytes stay on the local disk."""

    @property
    def path(self) -> bytes | None:
        """The path of the local file; None if passing."""

    @property
    def is_whole(self) -> bool:
        """Whether every byte is here: reading it can't wait for the remote any more."""

    def buffer(self, spans: Sequence[tuple[int, int]]) -> Any:
        """A read-only pyarrow buffer of the blob's size, in which at least these spans [start, end)
        hold its bytes; fetches what is missing. For parsing headers, footers and columns.
        Raises FetchError."""

    def address(self) -> int | None:
        """Where the blob is mapped, for madvise; None if passing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSpans:
    """Blob spans are what a reader wants of one blob.

    starts, ends: bytes in the blob, end exclusive, of equal length. touched_bytes: that will be
    looked at of a view; None: all.
    """

    blob: Blob
    starts: Sequence[int]
    ends: Sequence[int]
    touched_bytes: int | None = None
