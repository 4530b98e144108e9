"""Find and fetch the remote shards of a source, and hold a loader's claims on them in the caches.

A source may join datasets that come through several remotes and caches, or that lie partly on the
local disk. Callers use the source's own shard numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import summed

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import BlobSource, Traffic
    from penstock.cache.blobs import Remote
    from penstock.cache.disk import DiskCache, PinnedShare
    from penstock.readers.fieldtypes import ColumnCrop
    from penstock.readers.index import Index
    from penstock.readers.types import Floats, Ints


_LOCAL = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteShards:
    """The remote shards of a source, by the source's own numbers. Fetches them and reports on them.

    datasets: the remotes and the indexes. dataset, number: the dataset of each
    shard of the source, -1 for a local shard, and its number in that index, both int64, shape
    (shards of the source,).
    """

    datasets: Sequence[tuple[Remote, Index]]
    dataset: Ints
    number: Ints

    @classmethod
    def of_dataset(cls, remote: Remote, index: Index) -> RemoteShards:
        """Return all shards of one dataset."""
        numbers = np.arange(len(index.sizes), dtype=np.int64)
        return cls(datasets=[(remote, index)], dataset=np.zeros_like(numbers), number=numbers)

    def only(self, shards: Ints) -> RemoteShards:
        """Return the remote shards of a source that has these shards of this one, in their
        order."""
        return replace(self, dataset=self.dataset[shards], number=self.number[shards])

    @classmethod
    def end_to_end(cls, parts: Sequence[tuple[RemoteShards | None, int]]) -> RemoteShards | None:
        """Return the remote shards of joined sources; None if all shards are local.

        parts: of each source its remote shards, if any, and its number of shards.
        """
        datasets: list[tuple[Remote, Index]] = []
        found, numbers = [], []
        for part, count in parts:
            local = np.full(count, _LOCAL, np.int64)
            own = part or cls(datasets=(), dataset=local, number=local)
            found.append(np.where(own.dataset == _LOCAL, _LOCAL, own.dataset + len(datasets)))
            numbers.append(own.number)
            datasets += own.datasets
        if not datasets:
            return None
        joined = np.concatenate(found), np.concatenate(numbers)
        return cls(datasets=datasets, dataset=joined[0], number=joined[1])

    def _keys_of(self, dataset: int, shards: Ints) -> list[str]:
        """Return the keys of the blobs of some shards of one dataset."""
        keys = self.datasets[dataset][1].keys
        return [keys[number] for number in self.number[shards].tolist()]

    # -- one shard

    def find(self, shard: int) -> tuple[Remote, BlobSource] | None:
        """Return the remote and the blob of a shard; None if the shard is local."""
        dataset = int(self.dataset[shard])
        if dataset == _LOCAL:
            return None
        remote, index = self.datasets[dataset]
        return remote, index.source(int(self.number[shard]))

    def is_whole(self, shard: int) -> bool:
        """Return True if all of a shard is on the local disk."""
        found = self.find(shard)
        return found is None or found[0].is_whole(found[1])

    def fill(self, shard: int, *, progress: Callable[[int], None], stop: threading.Event) -> int:
        """Fetch a whole shard into its cache. Returns and raises as `Remote.fill`."""
        found = self.find(shard)
        return 0 if found is None else found[0].fill(found[1], progress=progress, stop=stop)

    def is_near(self, shard: int) -> bool:
        """Return True if another node of the job is known to hold a shard; see
        `Upstream.is_near`."""
        found = self.find(shard)
        return found is not None and found[0].upstream.is_near(found[1].key)

    def is_left_to_others(self, shard: int) -> bool:
        """Return True if a shard's fill should wait; see `Upstream.is_left_to_others`."""
        found = self.find(shard)
        return found is not None and found[0].upstream.is_left_to_others(found[1].key)

    def wanted_share(
        self, shard: int, fields: Sequence[str], draw: Callable[[Ints], Mapping[str, ColumnCrop]]
    ) -> float:
        """Return the share of a shard's bytes that parts of its samples need; 1 if samples are read
        whole.

        draw: returns the parts of samples, given their numbers. Raises the errors of reading the
        shard's sidecar.
        """
        dataset = int(self.dataset[shard])
        if dataset == _LOCAL:
            return 1.0
        return self.datasets[dataset][1].wanted_share(int(self.number[shard]), fields, draw)

    def uri(self, shard: int) -> str:
        """Return the address of a remote shard for messages; "" for a local shard."""
        found = self.find(shard)
        return "" if found is None else found[1].uri

    def shard_of(self, remote: Remote) -> Callable[[str], int | None]:
        """Return a function from the key of a remote's blob to its shard.

        The function returns None for a blob that isn't a shard of this source.
        """
        mine = [number for number, (other, _) in enumerate(self.datasets) if other is remote]

        @functools.cache
        def sorted_marks() -> tuple[NDArray[np.uint64], Ints]:
            shards = [np.flatnonzero(self.dataset == number) for number in mine]
            keys = [key for each in zip(mine, shards, strict=True) for key in self._keys_of(*each)]
            marks = np.array([_mark(key) for key in keys], np.uint64)
            order = np.argsort(marks, kind="stable")
            return marks[order], np.concatenate(shards)[order]

        def find(key: str) -> int | None:
            marks, shards = sorted_marks()
            mark = np.uint64(_mark(key))
            at = int(np.searchsorted(marks, mark))
            return int(shards[at]) if at < len(marks) and marks[at] == mark else None

        return find

    # -- all remotes

    @property
    def remotes(self) -> tuple[Remote, ...]:
        """Return each remote once."""
        return tuple(dict.fromkeys(remote for remote, _ in self.datasets))

    @property
    def caches(self) -> tuple[DiskCache, ...]:
        """Return each cache that keeps some of the shards once."""
        caches = (remote.cache for remote in self.remotes)
        return tuple(dict.fromkeys(cache for cache in caches if cache is not None))

    def kept_by(self, cache: DiskCache) -> Ints:
        """Return the shards that come through a cache, ascending."""
        mine = [n for n, (remote, _) in enumerate(self.datasets) if remote.cache is cache]
        return np.flatnonzero(np.isin(self.dataset, mine)).astype(np.int64, copy=False)

    @property
    def max_bytes(self) -> int:
        """Return the limits of the caches, added up; 0 if none is permanent."""
        return sum(c.max_bytes or 0 for c in self.caches if not c.is_temporary)

    def held_shares(self) -> Floats:
        """Return the share of each shard's bytes in the node's caches, 0 to 1, float64, shape
        (shards of the source,). Lists each cache's folder once."""
        shares = np.zeros(len(self.dataset))
        held = {remote: remote.held() for remote in self.remotes}
        for number, (remote, _) in enumerate(self.datasets):
            if held[remote]:
                mine = np.flatnonzero(self.dataset == number)
                shares[mine] = [held[remote].get(key, 0.0) for key in self._keys_of(number, mine)]
        return shares

    def traffic(self) -> Traffic:
        """Return the traffic of all remotes, for all their users."""
        return summed([remote.traffic() for remote in self.remotes])

    @property
    def max_connections(self) -> int:
        """Return the most connections of all remotes."""
        return sum(remote.fetcher.policy.max_connections for remote in self.remotes)

    def in_flight_bytes(self, shard_bytes: int) -> tuple[int, int]:
        """Return the bytes in flight on the fewest connections: in ranges of shards of this size,
        and in full ranges."""
        policies = [remote.fetcher.policy for remote in self.remotes]
        held = sum(p.min_connections * min(p.range_bytes, shard_bytes) for p in policies)
        return held, sum(p.min_connections * p.range_bytes for p in policies)

    def request_time(self) -> tuple[float, float]:
        """Return the seconds of recent requests, mean and 99th percentile, of the slowest remote.

        Requests to other nodes, which precede those to the store, are included.
        """
        times = [remote.upstream.request_time() for remote in self.remotes]
        return max(mean for mean, _ in times), max(p99 for _, p99 in times)

    def limit_fills(
        self, room: Callable[[int, int], int], *, widening: Callable[[int], int] | None = None
    ) -> None:
        """Set how many connections fills may use while batches fetch: room(now, most) of each
        remote.

        widening(now): the factor by which requests of batches are widened; None leaves it
        unchanged.
        """
        for remote in self.remotes:
            remote.upstream.limit_fills(room)
            if widening is not None:
                remote.fills.widening = widening(remote.fills.widening)

    # -- jobs

    def join(self, shards: Ints, sizes: Ints) -> RemoteJobs:
        """Begin a job that reads these shards in each epoch, in each cache. sizes: their bytes."""
        keys: dict[int, str] = {}
        blobs_of: dict[Remote, dict[str, int]] = {}
        for number, (remote, _) in enumerate(self.datasets):
            mine = self.dataset[shards] == number
            found = self._keys_of(number, shards[mine])
            keys.update(zip(shards[mine].tolist(), found, strict=True))
            blobs = blobs_of.setdefault(remote, {})  # once, if two shards are parts of one blob
            blobs.update(zip(found, sizes[mine].tolist(), strict=True))
        joined = [(each, each.join([*own], [*own.values()])) for each, own in blobs_of.items()]
        return RemoteJobs(keys, [(remote, job) for remote, job in joined if job is not None])


def _mark(key: str) -> int:
    """Return the first 64 bits of a blob's key."""
    return int(key[:16], 16)


class RemoteJobs:
    """A loader's claims in the caches through which its shards come. They last until leave()."""

    def __init__(self, keys: Mapping[int, str], jobs: Sequence[tuple[Remote, PinnedShare]]) -> None:
        """keys: of the remote shards that the loader reads, by number."""
        self._keys, self._jobs = keys, tuple(jobs)

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes that the caches pin for the loader."""
        return sum(job.pinned_bytes for _, job in self._jobs)

    def pins(self, shard: int) -> bool:
        """Return True if a cache pins a shard for the loader."""
        key = self._keys.get(shard)
        return key is not None and any(job.pins(key) for _, job in self._jobs)

    def refresh(self) -> bool:
        """Compute the pinned shares again, as jobs come and go. Returns True if one has changed."""
        return any([job.refresh() for _, job in self._jobs])

    def leave(self) -> None:
        """End the claims. Safe to call twice."""
        for remote, job in self._jobs:
            remote.leave(job)
