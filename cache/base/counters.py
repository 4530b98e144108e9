"""Declare tables of counters, add them up and subtract them; count the traffic of a cache.

A table is a dataclass whose fields are declared by `counter` and `gauge`. All that follows from a
field (its export, its description, its sum and its growth) is derived from that declaration.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

Table = TypeVar("Table")


def counter(text: str, *, default: Any = 0) -> Any:
    """Declare a field that only grows. text: what it counts, for users."""
    return field(default=default, metadata={"text": text, "grows": True})


def gauge(text: str, *, default: Any = 0) -> Any:
    """Declare a field that may also fall, or that isn't a number. text: its meaning, for users."""
    return field(default=default, metadata={"text": text, "grows": False})


def summed(tables: Iterable[Table]) -> Table:
    """Add up all fields of at least one table."""
    each = list(tables)
    if len(each) == 1:
        return each[0]
    names = [row.name for row in fields(each[0])]  # type: ignore[arg-type]
    return type(each[0])(**{name: sum(getattr(table, name) for table in each) for name in names})


def growth(now: Table, earlier: Table) -> Table:
    """Return a table of the time after `earlier`: counters are subtracted, also those of tables in
    its fields. All other values are those of now."""
    changed: dict[str, Any] = {}
    for row in fields(now):  # type: ignore[arg-type]
        value, before = getattr(now, row.name), getattr(earlier, row.name)
        if value is None or before is None:
            continue
        if row.metadata.get("grows"):
            changed[row.name] = value - before
        elif is_dataclass(value):
            changed[row.name] = growth(value, before)
    return replace(now, **changed)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The counts of one process since it opened its dataset."""

    bytes_remote: int = counter("bytes received from the store, metadata included")
    bytes_filled: int = counter(
        "bytes received from the store and other nodes that were written to the cache"
    )
    bytes_passed: int = counter("bytes delivered without being cached")
    bytes_disk: int = counter("encoded bytes read from local files, cached files included")
    hits: int = counter("samples whose bytes were on the local disk when requested")
    misses: int = counter("samples whose bytes weren't on the local disk when requested")
    requests: int = counter("requests to the store")
    retries: int = counter("requests that were repeated after a failure")
    hedges: int = counter("requests sent a second time because the first was late")
    throttled: int = counter("requests that were answered with 429 or 503")
    failed: int = counter("requests that failed")
    remote_wait_s: float = counter("time that reading threads waited for the store", default=0.0)
    request_s: float = counter("time of all requests that succeeded", default=0.0)
    bytes_peers: int = counter("bytes received from other nodes' caches")
    peer_requests: int = counter("requests to other nodes")
    peer_failed: int = counter("requests to other nodes without a good answer")
    refetched: int = counter("objects fetched again because their bytes were wrong")

    @property
    def hit_ratio(self) -> float:
        """hits / (hits + misses); 1.0 before the first sample."""
        return self.hits / total if (total := self.hits + self.misses) else 1.0


_ZEROS: dict[str, Any] = {row.name: row.default for row in fields(Traffic)}


class TrafficMeter:
    """A counter of Traffic that many threads share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = dict(_ZEROS)

    def add(self, **counts: float) -> None:
        """Add to fields of Traffic by name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def snapshot(self) -> Traffic:
        """Return the counts so far."""
        with self._lock:
            counts = dict(self._counts)
        # Numpy's numbers become Python's.
        return Traffic(**{name: type(_ZEROS[name])(count) for name, count in counts.items()})
