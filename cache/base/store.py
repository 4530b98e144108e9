"""Define what every remote store can do, what a request brings, and how it can fail.

A store makes one request and reports its result; `cache.fetch` retries, hedges and counts. Of
`cache.stores`, `http_store` serves http(s), `obstore_store` s3, gs and az, `fsspec_store` every
other URL and whatever file system object a user passes. An `ObjectRange` is what one request for
data asks a store for.
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
"""transient: network, 5xx, a cut or wrong answer, a stall: try again. unreachable: nobody listens
there, or the name isn't known: it may be starting, or misspelt. throttled: 429 or 503, try again
later. missing: no such object. denied: 401 or 403. changed: not the version that was asked for.
refused: anything that trying again won't mend."""


class RequestError(Exception):
    """One request failed. Never leaves the package `cache`: `Fetcher` makes a FetchError of it.

    message: for people, without credentials. retry_after_s: what the server asked for, if it did.
    remedy: what to do, where more is known than the kind. code: the store's own, if it told one.
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
    """Object info is what a store says of an object.

    path: below the store's root, names joined by "/" (surrogate escapes for what isn't UTF-8);
    version: its etag without quotes, else size and time; "" where neither is told.
    """

    path: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer is the bytes that one request brought.

    data: a buffer (bytes, or what memoryview() takes) of exactly the bytes asked for; version: of
    the object that they are from; object_bytes: the object's size.
    """

    data: Any
    version: str
    object_bytes: int

    @property
    def size_bytes(self) -> int:
        """How many bytes came."""
        return memoryview(self.data).nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedAnswer(Answer):
    """The answer where whoever asked has taken the bytes as they came: data is empty."""


ABSENT = Answer(data=b"", version="", object_bytes=-1)
"""The answer for an object that isn't there, where that is no error."""


class Store(Protocol):
    """A store serves the objects below one root. Safe for several threads; not across fork.

    url: of the root, for people, without credentials. scope: hex that tells two stores of one URL
    apart (an endpoint, an account). secrets: texts that must not be shown.

    Every method makes its requests once and raises RequestError; a forked child that uses a store
    of its parent's gets RequestError("refused") with the remedy, never a hang.
    """

    url: str
    scope: str
    secrets: tuple[str, ...]

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose path begins with the folder `prefix` ("" or "a/b"), in any order."""

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Objects directly in a folder, and names (last part) of its folders; empty if it isn't
        there."""

    def info(self, path: str) -> ObjectInfo | None:
        """What is known of an object; None if it isn't there (a folder is none)."""

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Bytes [start, end) of an object, or all of it without span, which is refused if it has
        more than `most_bytes`.

        version: the request is conditional (If-Match) where the store can do that, and the
        answer's version is compared in any case: RequestError("changed"). An answer that is
        shorter or from elsewhere than asked for is RequestError("transient"), one that is longer
        "refused": where the store can, no more than is wanted and one byte is ever read.
        """

    def put(self, local: str, path: str) -> None:
        """Upload a local file."""

    def close(self) -> None:
        """Let connections go. Safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRange:
    """An object range is bytes [start, end) of an object.

    version: what the object must be; None for whatever is there. may_lack: where the object isn't
    there, the answer is `ABSENT`.
    """

    path: str
    start: int
    end: int
    version: str | None
    may_lack: bool = False

    def read(self, store: Store) -> Answer:
        """Ask a store for it once. Raises RequestError."""
        return store.read(self.path, (self.start, self.end), version=self.version)
