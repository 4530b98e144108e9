"""Count the bytes and requests of the remote, the bytes that the cache served, and failures."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The counts of one process since it opened its dataset.

    bytes_remote: data and metadata received from the store. bytes_peers: data received from other
    nodes' caches. bytes_filled: those of both that were written to the cache. bytes_passed: data
    delivered without being cached. bytes_disk: bytes of samples that were read from the local disk.
    hits, misses: samples whose bytes were, or were not, on the local disk when they were requested.
    requests: requests to the store. retries: those repeated after a failure. hedges: those sent a
    second time because the first was late. throttled: those answered with 429 or 503. failed: those
    that failed. remote_wait_s: time that reading threads waited for the remote. request_s: mean
    time of a request, 0.0 without one. peer_requests: requests to other nodes. peer_failed: those
    without an answer or with a wrong one. refetched: blobs dropped and fetched again because their
    bytes were wrong. evicted: blobs that this process removed from the cache.
    """

    bytes_remote: int = 0
    bytes_filled: int = 0
    bytes_passed: int = 0
    bytes_disk: int = 0
    hits: int = 0
    misses: int = 0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    throttled: int = 0
    failed: int = 0
    remote_wait_s: float = 0.0
    request_s: float = 0.0
    bytes_peers: int = 0
    peer_requests: int = 0
    peer_failed: int = 0
    refetched: int = 0
    evicted: int = 0

    @property
    def hit_ratio(self) -> float:
        """hits / (hits + misses); 1.0 before the first sample."""
        return self.hits / total if (total := self.hits + self.misses) else 1.0


def joined_traffic(several: Sequence[Traffic]) -> Traffic:
    """Add up the traffic of at least one counter."""
    if len(several) == 1:
        return several[0]
    total = {name: sum(getattr(each, name) for each in several) for name in _NAMES}
    timed = sum(each.requests * each.request_s for each in several)
    return Traffic(**total, request_s=timed / max(1, total["requests"]))


_NAMES = frozenset(field.name for field in fields(Traffic)) - {"request_s"}


class TrafficMeter:
    """A counter of Traffic that many threads share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = dict.fromkeys(_NAMES, 0)
        self._request_s = 0.0
        self._timed = 0

    def add(self, **counts: float) -> None:
        """Add to fields of Traffic by name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def request(self, seconds: float) -> None:
        """Add the time of one request that succeeded."""
        with self._lock:
            self._request_s += seconds
            self._timed += 1

    def snapshot(self) -> Traffic:
        """Return the counts so far."""
        with self._lock:
            counts = dict(self._counts)
            mean = self._request_s / self._timed if self._timed else 0.0
        wait_s = counts.pop("remote_wait_s")
        numbers = {name: int(count) for name, count in counts.items()}
        return Traffic(**numbers, remote_wait_s=wait_s, request_s=mean)
