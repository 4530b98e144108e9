"""Define blobs, the unit of the cache: one object of a store, or several objects or ranges joined.

A blob's bytes come from its segments. Its key is a hash that identifies the bytes, never a name
from a remote.
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
"""How samples of a mapped file are read: "copy" copies the map, "pread" reads the file instead, and
"mmap" returns views of the map, whose bytes change with the file."""

READ_MODE: ReadMode = "copy"
"""The default. Copying before the check costs 1.5 to 3 us for 60 KB, 0.4 % of what decoding such
an image takes (benchmarks/results/reading.json)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An object of a store, or a range of one. A blob has one or more segments.

    path: the object's path in its store. size_bytes: the size of the segment. version: the version
    that the object must have; None for the version that it has when its first byte is fetched.
    start: the segment's first byte in the object. object_bytes: the object's size if the segment is
    a range, parts of which may be fetched separately; None if the segment is the entire object,
    which in a blob of several segments is fetched by one request.
    """

    path: str
    size_bytes: int
    version: str | None
    start: int = 0
    object_bytes: int | None = None

    @property
    def whole_bytes(self) -> int:
        """The size of the segment's object."""
        return self.size_bytes if self.object_bytes is None else self.object_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSource:
    """The identity of a blob and the location of its bytes.

    key: 40 hex digits. uri: the blob's name in messages, without credentials. segments: the parts
    of the blob in their order, at least one. size_bytes: the size of all segments.
    """

    key: str
    uri: str
    segments: Sequence[Segment]
    size_bytes: int


def blob_key(*, scope: str, uri: str, version: str) -> str:
    """Hash a blob's store scope, URI and version to a key of 40 hex digits.

    Keys are uniformly distributed, so a share of a dataset is "all keys below a threshold".
    """
    text = "\0".join((scope, uri, version))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]


class Blob(Protocol):
    """An open blob, which is either cached (complete or being filled) or read without the cache.

    source: its identity and the location of its bytes. is_cached: True if its bytes are kept on the
    local disk.
    """

    source: BlobSource
    is_cached: bool

    @property
    def is_whole(self) -> bool:
        """True if all bytes are cached, so that reading never waits for the remote."""

    def buffer(self, spans: Sequence[tuple[int, int]]) -> Any:
        """Return a read-only pyarrow buffer of the blob's size that holds at least these spans
        [start, end), after fetching missing ones. For parsing headers, footers and columns.
        Raises FetchError."""

    def address(self) -> int | None:
        """Return the address of the blob's map, for madvise; None if the blob isn't cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSpans:
    """The byte ranges of one blob that a reader requests.

    starts, ends: positions in the blob, with exclusive ends, of equal length. touched_bytes: the
    number of bytes that the reader will access in a view; None for all.
    """

    blob: Blob
    starts: Sequence[int]
    ends: Sequence[int]
    touched_bytes: int | None = None
