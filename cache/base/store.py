"""Define the interface of all remote stores, the answers to requests, and the kinds of failures.

A store makes one request and reports its result; `cache.fetch` retries, hedges and counts. In
`cache.stores`, `http_store` serves http(s), `obstore_store` s3, gs and az, and `fsspec_store` every
other URL and the file system objects that users pass. An `ObjectRange` is what one request for data
asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

Failure = Literal[
    "transient", "unreachable", "throttled", "missing", "denied", "changed", "refused"
]
"""transient: the network failed, 5xx, a cut or wrong answer, or a stall: try again. unreachable:
the host refuses connections or its name is unknown, because it is starting or misspelt. throttled:
429 or 503, try again later. missing: no such object. denied: 401 or 403. changed: not the requested
version. refused: any failure that another attempt can't repair."""


FORKED = (
    "its connections belong to the process that opened them, and this is a forked child. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and create the dataset inside the worker'
)
"""The reason for which a store refuses requests in a forked child."""


class RequestError(Exception):
    """One request failed. It never leaves the package `cache`: `Fetcher` raises a FetchError.

    message: without credentials. retry_after_s: the pause that the server requested, or None.
    remedy: more specific advice than the kind's, or None. code: the store's own error code, or "".
    """

    def __init__(
        self,
        kind: Failure,
        message: str,
        *,
        retry_after_s: float | None = None,
        remedy: str | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code
        self.retry_after_s = retry_after_s
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """Object info describes an object of a store.

    path: below the store's root, names joined by "/" (surrogate escapes for bytes that aren't
    UTF-8); version: its etag without quotes, else its size and time; "" if the store has neither.
    """

    path: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer holds the bytes that one request returned.

    data: a buffer (an argument of memoryview()) of exactly the requested bytes; version: of their
    object; object_bytes: the object's size.
    """

    data: Any
    version: str
    object_bytes: int

    @property
    def size_bytes(self) -> int:
        """The number of bytes in the answer."""
        return memoryview(self.data).nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedAnswer(Answer):
    """The answer whose bytes the caller has already read from a stream: data is empty."""


ABSENT = Answer(data=b"", version="", object_bytes=-1)
"""The answer for a missing object if that is no error."""


class Store(Protocol):
    """A store serves the objects below one root. Safe for several threads; not across fork.

    url: of the root, for messages, without credentials. scope: hex digits that distinguish stores
    of one URL (an endpoint, an account). secrets: texts that must not be shown.

    Every method makes its requests once and raises RequestError. In a forked child the parent's
    store never hangs; it raises RequestError("refused") with the remedy.
    """

    url: str
    scope: str
    secrets: tuple[str, ...]

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below the folder `prefix` ("" or "a/b"), in any order."""

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects directly in a folder, and the names (last parts) of its subfolders;
        both are empty if the folder is missing."""

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size and version of an object; None if it is missing or a folder."""

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Return bytes [start, end) of an object, or, without span, all of it if it has at most
        `most_bytes`.

        version: makes the request conditional (If-Match) if the store supports that, and is always
        compared with the answer's version; a difference raises RequestError("changed"). An answer
        that is too short or of another range raises "transient", one that is too long "refused". If
        possible, the store reads at most one byte more than requested.
        """

    def put(self, local: str, path: str) -> None:
        """Upload a local file."""

    def close(self) -> None:
        """Close the connections. Safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRange:
    """An object range is bytes [start, end) of an object.

    version: the version that the object must have; None for any. may_lack: a missing object is
    answered by `ABSENT` instead of an error.
    """

    path: str
    start: int
    end: int
    version: str | None
    may_lack: bool = False

    def read(self, store: Store) -> Answer:
        """Request the range from a store once. Raises RequestError."""
        return store.read(self.path, (self.start, self.end), version=self.version)
