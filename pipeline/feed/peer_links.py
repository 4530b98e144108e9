"""Inform a loader's remotes of the job's other nodes: their addresses, and who may hold which blob.

Loaded only where peers are in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import JobStore
from penstock.cache.peers import NodeRanks, PeerLink, PeerUpstream, job_secret
from penstock.pipeline.members import held_of_groups
from penstock.pipeline.plan import (
    MOST_LEVEL,
    Holders,
    Plan,
    held_bytes_of_lanes,
    level_text,
    levels_of,
    make_plan,
    node_ranks,
    peer_token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache.disk import DiskCache
    from penstock.pipeline.plan import JobOrder, World
    from penstock.readers import RemoteShards


class PlannedNodes:
    """Who may hold a blob, by the plan: `PlannedHolders` of one remote.

    node: this one. shard_of: finds a blob's shard. epoch: that is read now; it is set.
    """

    def __init__(
        self, holders: Holders, *, node: int, shard_of: Callable[[str], int | None], epoch: int
    ) -> None:
        self._holders, self._node, self._shard_of = holders, node, shard_of
        self._held = np.zeros(holders.held_shape, dtype=np.int64)
        self.epoch = epoch

    def likely(self, key: str) -> Sequence[int]:
        """Nodes that may hold a blob, the best first."""
        shard = self._shard_of(key)
        return () if shard is None else self._holders.nodes_of(shard, self.epoch)

    def owner(self, key: str) -> int | None:
        """The node that fetches a blob for this one too; None where there is none."""
        shard = self._shard_of(key)
        owner = None if shard is None else self._holders.owner(shard, self.epoch)
        return None if owner == self._node else owner

    def is_needed(self, key: str) -> bool:
        """Whether this node reads a blob in this epoch."""
        shard = self._shard_of(key)
        return shard is None or self._node in self._holders.readers(shard, self.epoch)

    def hear(self, words: dict[int, str]) -> None:
        """Take over what nodes say they hold: `level_text`. What is none says nothing."""
        nodes, groups = self._held.shape
        held = self._held.copy()
        for node, text in words.items():
            levels = levels_of(text, groups=groups) if 0 <= node < nodes else None
            if levels is not None:
                held[node] = np.minimum(levels, MOST_LEVEL)
        self._held = held
        self._holders.hear(held)


class PeerLinks:
    """The ties of a loader's remotes to the other nodes, from begin() to close().

    store: this loader's part of the job's; None where there is none.
    """

    def __init__(
        self, remote: RemoteShards, order: JobOrder, *, world: World, store: JobStore | None
    ) -> None:
        self._remote, self._order, self._world, self._store = remote, order, world, store
        self._links: list[PeerLink] | None = None
        self._planned: list[PlannedNodes] = []
        self._epoch = 0

    def begin(self, epoch: int) -> None:
        """Serve and ask the other nodes from now on; the first time waits for their addresses, a
        while. Raises ConfigError."""
        if self._links is not None:
            self.at(epoch, looks=True)
            return
        links: list[PeerLink] = []
        self._epoch = epoch
        try:
            for number, one in enumerate(self._remote.remotes):
                if one.cache is not None and isinstance(one.upstream, PeerUpstream):
                    store = None if self._store is None else self._store.under(f"peers/{number}")
                    planned = self._plan(self._remote.shard_of(one))
                    links.append(self._link(one.upstream, one.cache, store, planned))
        except BaseException:  # another pass tries again
            for link in links:
                link.close()
            self._planned.clear()
            raise
        self._links = links

    def at(self, epoch: int, *, looks: bool = False) -> None:
        """Note that an epoch is read now. looks: who is there, even if it is the same one."""
        if epoch == self._epoch and not looks:
            return
        self._epoch = epoch
        for planned in self._planned:
            planned.epoch = epoch
        for link in self._links or ():
            link.plan_again()
            link.renew()

    def close(self) -> None:
        """End them. Safe to call twice."""
        for link in self._links or ():
            link.close()

    def _link(
        self,
        upstream: PeerUpstream,
        cache: DiskCache,
        store: JobStore | None,
        planned: PlannedNodes | None,
    ) -> PeerLink:
        world, (first, end) = self._world, node_ranks(self._world)
        link = PeerLink(
            upstream,
            cache,
            ranks=NodeRanks(first, end, world.size),
            speaks=world.rank == first,
            store=store,
        )
        link.begin(
            lambda settings: job_secret(settings, JobStore.of_group() or self._store, peer_token()),
            planned=planned,
            held=str if planned is None else self._held_words,
        )
        return link

    def _held_words(self) -> str:
        """What this node's caches hold, for the others' `PlannedNodes`."""
        order, epoch = self._order, self._epoch
        contents = order.source.contents
        whole = held_bytes_of_lanes(
            make_plan(contents, order.settings), epoch, contents.shard_bytes
        )
        return level_text(held_of_groups(order, epoch), whole)

    def _plan(self, shard_of: Callable[[str], int | None]) -> PlannedNodes | None:
        """Who may hold what, where the plan tells: nodes have as many ranks each, and batches are
        cut by samples."""
        plan, (first, end) = self._order.plan(), node_ranks(self._world)
        nodes, rest = divmod(self._world.size, end - first)
        if rest or first % (end - first) or not isinstance(plan, Plan):
            return None
        holders = Holders(plan, nodes=[end - first] * nodes, start_epoch=self._epoch)
        planned = PlannedNodes(
            holders, node=first // (end - first), shard_of=shard_of, epoch=self._epoch
        )
        self._planned.append(planned)
        return planned
