"""Nodes publish what they hold with their addresses, so that requests go to the right ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch.distributed as dist

from penstock import Dataset, DiskCache, Peers, World
from penstock.cache import JobStore
from penstock.pipeline.feed import PeerLinks, warm
from penstock.pipeline.plan import BatchSchedule, JobOrder, Walk, first_settings
from tests.array_packs import write_array_pack
from tests.cache.peers.fake_peer import SECRET
from tests.servers import serving

if TYPE_CHECKING:
    from pathlib import Path

NODES, BATCH = 4, 16


def test_ranks_that_were_dealt_anew_ask_who_held_their_lanes(tmp_path: Path) -> None:
    data = write_array_pack(tmp_path)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_bytes(SECRET.value)
    store = JobStore(dist.HashStore())  # type: ignore[attr-defined]
    with serving(tmp_path) as server:

        def opened(node: int, peers: Peers | None) -> Dataset:
            cache = DiskCache(tmp_path / f"node-{node}", max_bytes="1GB", peers=peers)
            return Dataset(f"{server.url}/{data.name}", cache=cache, fields=("array", "id"))

        held: list[set[str]] = []
        for node in range(NODES):
            with opened(node, None) as dataset:
                world = World(node, NODES, local_rank=0, local_size=1)
                warm(dataset, world=world, seed=7, global_batch_size=BATCH)
                shards = dataset.remote_shards
                assert shards is not None
                there = [n for n in range(len(dataset.contents.sizes)) if shards.is_whole(n)]
                held.append({found[1].key for n in there if (found := shards.find(n))})

        def likely(node: int) -> dict[str, int | None]:
            """Return the first node that is asked for each blob, by the next node's old rank."""
            with opened(node, Peers("127.0.0.1:0", token_file=token)) as dataset:
                contents, remote = dataset.contents, dataset.remote_shards
                assert remote is not None
                settings = first_settings(contents, seed=7, global_batch=BATCH)
                walk = Walk(
                    samples=contents.samples, schedule=BatchSchedule.constant(BATCH), drop_last=True
                )
                order = JobOrder(source=dataset, settings=settings, walk=walk)
                world = World((node + 1) % NODES, NODES, local_rank=0, local_size=1)
                links = PeerLinks(remote, order, world=world, store=store)
                links.begin(0)
                try:
                    (link,) = links._links or ()
                    planned = link._planned
                    assert planned is not None
                    keys = {
                        found[1].key
                        for n in range(len(contents.sizes))
                        if (found := remote.find(n))
                    }
                    return {key: next(iter(planned.likely(key)), None) for key in keys}
                finally:
                    links.close()

        with ThreadPoolExecutor(NODES) as pool:
            told = list(pool.map(likely, range(NODES)))
    for node, first in enumerate(told):
        for key, number in first.items():
            holders = {(other + 1) % NODES for other in range(NODES) if key in held[other]}
            assert number in holders or holders == {(node + 1) % NODES}
