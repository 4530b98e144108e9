"""What a loader tells its remotes of the job's other nodes: where they are, who may hold what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.job_store import JobStore
from penstock.cache.peers.peer_exchange import NodeRanks
from penstock.cache.peers.peer_link import PeerLink
from penstock.cache.peers.peer_secret import job_secret
from penstock.cache.peers.peer_upstream import PeerUpstream
from penstock.pipeline.plan.needs import node_ranks
from penstock.pipeline.plan.world import peer_token

if TYPE_CHECKING:
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.pipeline.plan.world import World
    from penstock.readers.remote_shards import RemoteShards


class PeerLinks:
    """The ties of a loader's remotes to the other nodes, from begin() to close().

    store: this loader's part of the job's; None where there is none.
    """

    def __init__(self, remote: RemoteShards, *, world: World, store: JobStore | None) -> None:
        self._remote, self._world, self._store = remote, world, store
        self._links: list[PeerLink] | None = None

    def begin(self) -> None:
        """Serve and ask the other nodes from now on; the first time waits for their addresses, a
        while. Raises ConfigError."""
        if self._links is not None:
            for link in self._links:
                link.renew()
            return
        self._links = []
        for number, one in enumerate(self._remote.remotes):
            if one.cache is not None and isinstance(one.upstream, PeerUpstream):
                store = None if self._store is None else self._store.under(f"peers/{number}")
                self._links.append(self._link(one.upstream, one.cache, store))

    def _link(self, upstream: PeerUpstream, cache: DiskCache, store: JobStore | None) -> PeerLink:
        world, (first, end) = self._world, node_ranks(self._world)
        link = PeerLink(
            upstream,
            cache,
            ranks=NodeRanks(first, end, world.size),
            speaks=world.rank == first,
            store=store,
        )
        link.begin(lambda settings: job_secret(settings, JobStore.of_group(), peer_token()))
        return link

    def close(self) -> None:
        """End them. Safe to call twice."""
        for link in self._links or ():
            link.close()
