"""Give a loader's remotes the addresses of the job's other nodes, and the readers of its shards.

Only jobs that use peers load this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import JobStore
from penstock.cache.peers import NodeRanks, PeerLink, PeerUpstream, PlannedReaders, job_secret
from penstock.pipeline.plan import Plan, ShardReaders, node_ranks, peer_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.blobs import Remote
    from penstock.pipeline.plan import JobOrder, World
    from penstock.readers import RemoteShards


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedNodes(PlannedReaders):
    """The nodes that read and fetch the blobs of one remote, by the plan.

    node: this node. shard_of: returns a blob's shard. epoch_of: returns the current epoch.
    """

    readers: ShardReaders
    node: int
    shard_of: Callable[[str], int | None]
    epoch_of: Callable[[], int]

    def owner(self, key: str) -> int | None:
        """Return the other node that fetches a blob for this one, too; None if there is none."""
        shard = self.shard_of(key)
        owner = None if shard is None else self.readers.owner(shard, self.epoch_of())
        return None if owner == self.node else owner

    def is_needed(self, key: str) -> bool:
        """Return True if this node reads a blob in the current epoch."""
        shard = self.shard_of(key)
        return shard is None or self.node in self.readers.readers(shard, self.epoch_of())


class PeerLinks:
    """The links of a loader's remotes to the other nodes, from begin() to close().

    store: this loader's part of the job's store; None if there is none.
    """

    def __init__(
        self, remote: RemoteShards, order: JobOrder, *, world: World, store: JobStore | None
    ) -> None:
        self._remote, self._order, self._world, self._store = remote, order, world, store
        self._links: list[PeerLink] | None = None
        self._epoch = 0

    def begin(self, epoch: int) -> None:
        """Begin to serve the other nodes and to send them requests.

        The first call waits a limited time for their addresses. Raises ConfigError.
        """
        if self._links is not None:
            self.set_epoch(epoch, renews=True)
            return
        links: list[PeerLink] = []
        self._epoch = epoch
        try:
            for number, remote in enumerate(self._remote.remotes):
                if isinstance(remote.upstream, PeerUpstream):
                    links.append(self._link(number, remote, remote.upstream))
        except BaseException:  # the next pass tries again
            for link in links:
                link.close()
            raise
        self._links = links

    def set_epoch(self, epoch: int, *, renews: bool = False) -> None:
        """Set the current epoch. renews: look for the nodes even if the epoch is the same."""
        if epoch == self._epoch and not renews:
            return
        self._epoch = epoch
        for link in self._links or ():
            link.renew()

    def close(self) -> None:
        """Close the links. Safe to call twice."""
        for link in self._links or ():
            link.close()

    def _link(self, number: int, remote: Remote, upstream: PeerUpstream) -> PeerLink:
        world, (first, end) = self._world, node_ranks(self._world)
        assert remote.cache is not None
        return PeerLink(
            upstream,
            remote.cache,
            ranks=NodeRanks(first, end, world.size),
            publishes=world.rank == first,
            store=None if self._store is None else self._store.under(f"peers/{number}"),
            secret_of=lambda settings: job_secret(
                settings, JobStore.of_group() or self._store, peer_token()
            ),
            planned=self._plan(self._remote.shard_of(remote)),
        )

    def _plan(self, shard_of: Callable[[str], int | None]) -> PlannedNodes | None:
        """Return the readers by the plan; None if it can't name them.

        It can if all nodes have the same number of ranks and batches are cut by samples.
        """
        plan, (first, end) = self._order.plan(), node_ranks(self._world)
        nodes, rest = divmod(self._world.size, end - first)
        if rest or first % (end - first) or not isinstance(plan, Plan):
            return None
        readers, node = ShardReaders(plan, nodes=[end - first] * nodes), first // (end - first)
        return PlannedNodes(
            readers=readers, node=node, shard_of=shard_of, epoch_of=lambda: self._epoch
        )
