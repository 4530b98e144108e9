"""Find and fetch the remote shards of a source, and hold a loader's claims on them in the caches.

A source may be joined from datasets that come through several remotes and caches, or lie partly on
the local disk. Callers use the source's own shard numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import joined_traffic

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import BlobSource, Traffic
    from penstock.cache.blobs import Remote
    from penstock.cache.disk import DiskCache, PinnedShare
    from penstock.readers.fields import ColumnCrop
    from penstock.readers.index import IndexShards

    Ints = NDArray[np.int64]

_ABSENT = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Provider:
    """A dataset's remote, and which shards of a source come through it.

    shards: of the dataset's index. numbers: of each shard of the source its number there, -1 for
    those from elsewhere, int64, shape (shards of the source,).
    """

    remote: Remote
    shards: IndexShards
    numbers: Ints

    def taken(self, numbers: Ints) -> Provider:
        """The same remote for a source whose shards are these."""
        return Provider(remote=self.remote, shards=self.shards, numbers=numbers)


class RemoteShards:
    """Says which shards of a source are here and fetches others, by the source's own numbers.

    Datasets end to end may come through several remotes and caches, and lie in part on the local
    disk; who fills and counts asks here and needn't know.
    """

    def __init__(self, providers: Sequence[Provider]) -> None:
        """providers: at least one, no shard in two of them."""
        self._providers = tuple(providers)
        self._of = np.full(len(providers[0].numbers), _ABSENT, np.int64)
        for place, provider in enumerate(providers):
            self._of[provider.numbers != _ABSENT] = place

    @classmethod
    def of_dataset(cls, remote: Remote, shards: IndexShards, *, count: int) -> RemoteShards:
        """All shards of one dataset."""
        numbers = np.arange(count, dtype=np.int64)
        return cls([Provider(remote=remote, shards=shards, numbers=numbers)])

    def only(self, shards: Ints) -> RemoteShards:
        """For a source that has these shards of this one, in their order."""
        return RemoteShards([p.taken(p.numbers[shards]) for p in self._providers])

    @classmethod
    def end_to_end(cls, parts: Sequence[tuple[RemoteShards | None, int]]) -> RemoteShards | None:
        """For sources end to end: of each its remote shards, if any, and how many shards it has."""
        total, before, providers = sum(count for _, count in parts), 0, list[Provider]()
        for part, count in parts:
            for provider in part._providers if part is not None else ():
                numbers = np.full(total, _ABSENT, np.int64)
                numbers[before : before + count] = provider.numbers
                providers.append(provider.taken(numbers))
            before += count
        return cls(providers) if providers else None

    # -- one shard

    def find(self, shard: int) -> tuple[Remote, BlobSource] | None:
        """Through which remote a shard comes, and as which blob; None where it is local."""
        place = int(self._of[shard])
        if place == _ABSENT:
            return None
        provider = self._providers[place]
        return provider.remote, provider.shards.source(int(provider.numbers[shard]))

    def is_whole(self, shard: int) -> bool:
        """Whether a shard is on the local disk, all of it."""
        found = self.find(shard)
        return found is None or found[0].is_whole(found[1])

    def fill(self, shard: int, *, progress: Callable[[int], None], stop: threading.Event) -> int:
        """Fetch a whole shard into its cache; returns and raises as `Remote.fill`."""
        found = self.find(shard)
        return 0 if found is None else found[0].fill(found[1], progress=progress, stop=stop)

    def is_near(self, shard: int) -> bool:
        """Whether another node of the job is known to hold a shard, as `Upstream.is_near` says."""
        found = self.find(shard)
        return found is not None and found[0].upstream.is_near(found[1].key)

    def is_left_to_others(self, shard: int) -> bool:
        """Whether a shard's fill shall wait, as `Remote.is_left_to_others` says."""
        found = self.find(shard)
        return found is not None and found[0].is_left_to_others(found[1])

    def wanted_share(
        self, shard: int, fields: Sequence[str], draw: Callable[[Ints], Mapping[str, ColumnCrop]]
    ) -> float:
        """Which share of a shard's bytes the parts of all its samples need that a function draws of
        so many numbers; 1 where samples lie whole. Raises what reading its sidecar raises."""
        place = int(self._of[shard])
        if place == _ABSENT:
            return 1.0
        provider = self._providers[place]
        return provider.shards.wanted_share(int(provider.numbers[shard]), fields, draw)

    def uri(self, shard: int) -> str:
        """Where a remote shard lies, for people."""
        found = self.find(shard)
        return "" if found is None else found[1].uri

    def shard_of(self, remote: Remote) -> Callable[[str], int | None]:
        """A function that finds the shard that a blob of a remote is, by its key; None where it is
        of no shard here."""
        mine = [provider for provider in self._providers if provider.remote is remote]

        @functools.cache
        def marks() -> tuple[NDArray[np.uint64], Ints]:
            found, shards = [], []
            for provider in mine:
                keys = provider.shards.keys()
                places = np.flatnonzero(provider.numbers != _ABSENT)
                shards.append(places)
                numbers = provider.numbers[places].tolist()
                found.append(np.array([_mark(keys[number]) for number in numbers], np.uint64))
            every, shard = np.concatenate(found), np.concatenate(shards)
            order = np.argsort(every, kind="stable")
            return every[order], shard[order]

        def find(key: str) -> int | None:
            every, shards = marks()
            mark = np.uint64(_mark(key))
            at = int(np.searchsorted(every, mark))
            return int(shards[at]) if at < len(every) and every[at] == mark else None

        return find

    # -- all remotes

    @property
    def remotes(self) -> tuple[Remote, ...]:
        """Each remote once."""
        return tuple(dict.fromkeys(provider.remote for provider in self._providers))

    @property
    def caches(self) -> tuple[DiskCache, ...]:
        """Each cache that keeps some of them once."""
        caches = (remote.cache for remote in self.remotes)
        return tuple(dict.fromkeys(cache for cache in caches if cache is not None))

    def kept_by(self, cache: DiskCache) -> Ints:
        """The shards that come through a cache, ascending."""
        mine = [p.numbers != _ABSENT for p in self._providers if p.remote.cache is cache]
        return np.flatnonzero(np.any(mine, axis=0)).astype(np.int64, copy=False)

    @property
    def max_bytes(self) -> int:
        """What the caches may hold together; 0 without one that stays."""
        return sum(c.max_bytes or 0 for c in self.caches if not c.is_temporary)

    def held_shares(self) -> NDArray[np.float64]:
        """Which share of each shard's bytes the node's caches hold, 0 to 1, float64, shape
        (shards of the source,). Lists each cache's folder once."""
        shares = np.zeros(len(self._of))
        for remote in self.remotes:
            held = remote.held()
            for provider in self._providers if held else ():
                if provider.remote is remote:
                    mine = np.flatnonzero(provider.numbers != _ABSENT)
                    keys = provider.shards.keys()
                    names = (keys[number] for number in provider.numbers[mine].tolist())
                    shares[mine] = [held.get(name, 0.0) for name in names]
        return shares

    def traffic(self) -> Traffic:
        """The traffic of all remotes, whoever caused it."""
        return joined_traffic([remote.traffic() for remote in self.remotes])

    @property
    def max_connections(self) -> int:
        """Connections of all remotes at most."""
        return sum(remote.fetcher.policy.max_connections for remote in self.remotes)

    def in_flight_bytes(self, shard_bytes: int) -> tuple[int, int]:
        """Bytes that the least connections hold: in ranges of shards of that size, and in whole
        ranges."""
        policies = [remote.fetcher.policy for remote in self.remotes]
        held = sum(p.min_connections * min(p.range_bytes, shard_bytes) for p in policies)
        return held, sum(p.min_connections * p.range_bytes for p in policies)

    def request_time(self) -> tuple[float, float]:
        """Seconds of recent requests, mean and 99th percentile: of the slowest remote, other nodes
        that are asked before it among them."""
        times = [remote.upstream.request_time() for remote in self.remotes]
        return max(mean for mean, _ in times), max(p99 for _, p99 in times)

    def let_fills(
        self, room: Callable[[int, int], int], *, widening: Callable[[int], int] | None = None
    ) -> None:
        """Set how many connections fills may use beside batches: room(now, most) of each remote.
        widening(now): how many times as much is fetched for a batch as it needs; None: no more."""
        for remote in self.remotes:
            remote.upstream.let_fills(room)
            if widening is not None:
                remote.widening = widening(remote.widening)

    # -- jobs

    def join(self, shards: Ints, sizes: Ints) -> RemoteJobs:
        """Begin a job in each cache that reads these shards in each epoch. sizes: their bytes."""
        keys = [""] * len(shards)
        wanted: dict[Remote, dict[str, int]] = {}
        for place, provider in self._providers_of(shards):
            names = provider.shards.keys()
            blobs = wanted.setdefault(provider.remote, {})
            for at in place.tolist():
                keys[at] = names[int(provider.numbers[shards[at]])]
                blobs[keys[at]] = int(sizes[at])  # once, where two shards are parts of one
        jobs = [
            (remote, job)
            for remote, blobs in wanted.items()
            if (job := remote.join(list(blobs), list(blobs.values()))) is not None
        ]
        return RemoteJobs(shards, keys, jobs)

    def _providers_of(self, shards: Ints) -> Iterator[tuple[Ints, Provider]]:
        """Each provider, and the places of its shards among some."""
        for number, provider in enumerate(self._providers):
            yield np.flatnonzero(self._of[shards] == number), provider


def _mark(key: str) -> int:
    """The first 64 bits of a blob's key."""
    return int(key[:16], 16)


class RemoteJobs:
    """A loader's claims in the caches that its shards come through, until leave()."""

    def __init__(
        self, shards: Ints, keys: Sequence[str], jobs: Sequence[tuple[Remote, PinnedShare]]
    ) -> None:
        """shards: that the loader reads, ascending; keys: of each, "" where it is local."""
        self._shards, self._keys, self._jobs = shards, tuple(keys), tuple(jobs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the caches keep, or will keep, for it."""
        return sum(job.pinned_bytes for _, job in self._jobs)

    def pins(self, shard: int) -> bool:
        """Whether a cache keeps a shard for it."""
        place = int(np.searchsorted(self._shards, shard))
        if place == len(self._shards) or self._shards[place] != shard:
            return False
        key = self._keys[place]
        return bool(key) and any(job.pins(key) for _, job in self._jobs)

    def refresh(self) -> bool:
        """Look again, as jobs come and go; whether what is pinned has changed."""
        return any([job.refresh() for _, job in self._jobs])

    def leave(self) -> None:
        """End the claims. Safe to call twice."""
        for remote, job in self._jobs:
            remote.leave(job)
