"""Define the interface of all remote stores, the answers and limits of requests, and the failures.

A store makes one request and reports its result; `cache.fetch` retries, hedges and counts. In
`cache.stores`, `http_store` serves http(s), `obstore_store` s3, gs and az, and `fsspec_store` every
other URL and the file system objects that users pass. One request for data fetches an
`ObjectRange`. Stores use the timeouts of a `FetchPolicy`; `cache.fetch` uses its other limits.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

Failure = Literal[
    "transient", "unreachable", "throttled", "missing", "denied", "changed", "refused"
]
"""transient: the network failed, the answer was 5xx, incomplete or wrong, or nothing arrived; try
again. unreachable: the host refuses connections or its name is unknown, because it is starting or
misspelt. throttled: 429 or 503; try again later. missing: the object doesn't exist. denied: 401 or
403. changed: the object has another version than the requested one. refused: any failure that
another attempt can't repair."""


FORKED = (
    "its connections belong to the process that opened them, and this is a forked child. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and create the dataset inside the worker'
)
"""The reason for which a store refuses requests in a forked child."""


@dataclass(eq=False)
class RequestError(Exception):
    """One request failed. It never leaves the package `cache`: `Fetcher` raises a FetchError.

    message: without credentials. retry_after_s: the pause that the server requested, or None.
    remedy: more specific advice than the kind's, or None. code: the store's own error code, or "".
    """

    kind: Failure
    message: str
    _: KW_ONLY
    retry_after_s: float | None = None
    remedy: str | None = None
    code: str = ""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """The path, size and version of an object.

    path: below the store's root, with names joined by "/" (surrogate escapes for bytes that aren't
    UTF-8). version: the etag without quotes, else size and time; "" if the store reports neither.
    """

    path: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The bytes that one request returned.

    data: a buffer (an argument of memoryview()) of exactly the requested bytes. version,
    object_bytes: the version and the size of the object. passed_bytes: the number of bytes that
    were already passed on from a stream; data is then empty.
    """

    data: Any
    version: str
    object_bytes: int
    passed_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """The number of bytes in the answer."""
        return self.passed_bytes or memoryview(self.data).nbytes


Deliver = Callable[[int, Answer], None]
"""A function that receives the answers of several requests, each with the request's number."""


class Store(ABC):
    """The objects below one root of a remote store. Safe for several threads; not across fork: a
    `Fetcher` refuses requests in a forked child.

    url: the root's URL in messages, without credentials. scope: hex digits that distinguish stores
    of one URL (an endpoint, an account). secrets: texts that must not be shown.

    Every method makes its requests once and raises RequestError. A subclass makes the requests, and
    this class compares the answers with them.
    """

    def __init__(self, *, url: str, scope: str = "", secrets: tuple[str, ...] = ()) -> None:
        self.url, self.scope, self.secrets = url, scope, secrets

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below the folder `prefix` ("" or "a/b"), in any order."""
        waiting = [prefix]
        while waiting:
            folder = waiting.pop()
            objects, folders = self.list_folder(folder)
            yield from objects
            waiting += [f"{folder}/{name}" if folder else name for name in folders]

    @abstractmethod
    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects directly in a folder, and the names (last parts) of its subfolders;
        both are empty if the folder is missing."""

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size and version of an object; None if it is missing or a folder."""
        try:
            return self._info(path)
        except RequestError as error:
            if error.kind == "missing":
                return None
            raise

    @abstractmethod
    def _info(self, path: str) -> ObjectInfo:
        """Return the size and version of an object. Raises RequestError, also if it is missing."""

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        size_bytes: int | None = None,
    ) -> Answer:
        """Return the bytes span = [start, end) of an object, or without span all of it.

        size_bytes: without span, the size that the object must have; None for any. version: makes
        the request conditional (If-Match) if the store supports that, and is always compared with
        the answer's version; a difference raises RequestError("changed"). An answer that is too
        short or of another range raises "transient", one that is too long "refused". If possible,
        the store reads at most one byte more than requested.
        """
        if span is not None and span[0] >= span[1]:
            raise RequestError("refused", f"an empty range {span}")
        answer = self._read(path, span, version, size_bytes)
        self._check_version(answer.version, version)
        start, end = span or (0, answer.object_bytes)
        if end > answer.object_bytes or size_bytes not in (None, end):
            wanted = f"{start}-{end}" if size_bytes is None else size_bytes
            raise RequestError("changed", f"it has {answer.object_bytes} bytes, wanted {wanted}")
        if answer.size_bytes != end - start:
            raise RequestError("transient", f"{answer.size_bytes} bytes came, wanted {start}-{end}")
        return answer

    @abstractmethod
    def _read(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        """Return what is there of the span, and the object's size and version. most_bytes: refuse a
        larger object without reading all of it."""

    @staticmethod
    def _check_version(version: str, wanted: str | None) -> None:
        """Raise RequestError if an object doesn't have the wanted version; None wants any."""
        if wanted is not None and version != wanted:
            raise RequestError("changed", f"its version is {version!r}, wanted {wanted!r}")

    @staticmethod
    def _check_size(size_bytes: int, most_bytes: int | None) -> None:
        """Raise RequestError if an object is larger than expected; None expects any size."""
        if most_bytes is not None and size_bytes > most_bytes:
            raise RequestError("changed", f"it has {size_bytes} bytes, wanted {most_bytes}")

    @staticmethod
    def _check_range(came: tuple[int, int], wanted: tuple[int, int], size_bytes: int) -> None:
        """Raise RequestError if a store sends another range of an object than the wanted one, as
        far as it exists."""
        if came != (wanted[0], min(wanted[1], size_bytes)):
            text = f"bytes {came[0]}-{came[1]} came, wanted {wanted[0]}-{wanted[1]}"
            raise RequestError("transient", text)

    @abstractmethod
    def put(self, local: str, path: str) -> None:
        """Upload a local file."""

    @abstractmethod
    def close(self) -> None:
        """End all requests, at once if possible, and close the connections. Safe to call twice, and
        from any thread."""


# -- sizes and versions

_SIZE_AND_TIME = re.compile(r"\d+-\d+\.\d{6}")


def version_text(etag: Any, size_bytes: Any, time: Any) -> str:
    """Return an object's version: its etag without quotes, else its size and time; "" with neither.

    time: a datetime, seconds, a text, or None."""
    if etag:
        return str(etag).replace('"', "")
    if hasattr(time, "timestamp"):
        time = time.timestamp()
    if isinstance(time, int | float):
        time = f"{time:.6f}"
    return f"{size_bytes}-{time}" if time else ""


def is_strong(version: str | None) -> bool:
    """Return True if a version is a strong etag, as If-Match requires (RFC 9110, 13.1.1)."""
    if not version or version.startswith("W/") or not version.isascii():
        return False
    return version.isprintable() and not _SIZE_AND_TIME.fullmatch(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRange:
    """Bytes [start, end) of an object.

    version: the version that the object must have; None for any.
    """

    path: str
    start: int = 0
    end: int
    version: str | None = None

    def read(self, store: Store, delivering: Callable[[], AbstractContextManager[None]]) -> Answer:
        """Request the range from a store once. delivering(): a context in which bytes may be passed
        on before this returns; it raises ClosedError if they aren't wanted any more. Raises
        RequestError."""
        return store.read(self.path, (self.start, self.end), version=self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """The limits of the duration, the attempts and the number of requests to one store.

    retry_timeout_s: the longest time from the first request of a range to its FetchError.
    max_attempts: requests for one range, not counting hedges.
    backoff_base_s, backoff_cap_s: the pause before attempt n+1 is uniform in
        [0, min(cap, base * 2^n)] (full jitter); throttled requests count as three attempts more.
    first_contact_s: how long a host that has never answered may be unknown or refuse connections,
        because it may be starting, before that is an error.
    connect_timeout_s, read_timeout_s: a request fails if its connection isn't established, or
        receives nothing, for this long.
    hedge_quantile, hedge_least, hedge_factor, hedge_floor_s: a range is requested a second time
        when it takes longer than this quantile of the recent requests of a similar size, given
        at least `hedge_least` of them, than `hedge_factor` medians, and than the floor.
    max_hedge_share: the limit of hedges over requests, and of their bytes over all bytes, plus one
        hedge.
    range_bytes: the size of the ranges in which large objects are fetched. 8 MiB, because
        throughput levels off at 4 to 8 MiB a request.
    min_connections, start_connections, max_connections: requests in flight of all callers.
    fill_share: the share of the connections for requests that aren't urgent.
    fills_beside_urgent: the initial number of connections for them while there are urgent requests.
    probes: requests in flight while the remote doesn't answer.
    """

    retry_timeout_s: float = 120.0
    max_attempts: int = 12
    backoff_base_s: float = 0.1
    backoff_cap_s: float = 10.0
    first_contact_s: float = 6.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0
    hedge_quantile: float = 0.97
    hedge_least: int = 20
    hedge_factor: float = 3.0
    hedge_floor_s: float = 0.25
    max_hedge_share: float = 0.02
    range_bytes: int = 8 * 2**20
    min_connections: int = 8
    start_connections: int = 64
    max_connections: int = 96
    fill_share: float = 0.75
    fills_beside_urgent: int = 4
    probes: int = 2

    def __post_init__(self) -> None:
        for name in ("retry_timeout_s", "connect_timeout_s", "read_timeout_s", "range_bytes"):
            if not 0 < (got := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name.removesuffix('_s')}: got {got}, wanted more than 0.")
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts: got {self.max_attempts}, wanted at least 1.")
        if not 1 <= self.min_connections <= self.start_connections <= self.max_connections:
            raise ConfigError(
                "connections: wanted 1 <= min <= start <= max, got "
                f"{self.min_connections}, {self.start_connections}, {self.max_connections}."
            )
