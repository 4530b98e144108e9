"""Jobs of several nodes whose caches serve one another: real processes, a remote that counts."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.array_packs import SAMPLES, array_pack_bytes, write_array_pack
from tests.pipeline.ranks import forked
from tests.servers import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
NODES, BATCH = 3, 24

SCRIPT = """
import json, sys
import torch.distributed as dist
from penstock import DataLoader, Dataset, DiskCache, Order, Peers

url, folder, node, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
told = []
for phase in json.loads(sys.argv[5]):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{phase['port']}",
        rank=(node + phase["dealt"]) % count, world_size=count)
    peers = Peers("127.0.0.1:0") if phase["peers"] else None
    place = f"{folder}/cache-{node}" + phase["fresh"] * (node == 1)
    cache = DiskCache(place, max_bytes="1GB", peers=peers)
    dataset = Dataset(url, cache=cache, fields=("array", "id"))
    loader = DataLoader(dataset, global_batch_size=phase["batch"], shuffle=True, seed=7,
        drop_last=True, order=Order(slots="rank", reshuffle=phase["reshuffle"]))
    ids = []
    with dataset, loader:
        for _ in range(phase["epochs"]):
            for data, id in loader:
                assert (data[:, 0] == id % 251).all() and (data[:, -1] == id % 241).all()
                ids.append(id.tolist())
        dist.barrier()
        found = loader.statistics()
    told.append({"ids": ids, "remote": found.bytes_remote, "peers": found.bytes_peers,
                 "failed": found.peer_failed})
    dist.barrier()
    dist.destroy_process_group()
with open(f"{folder}/{node}.json", "w") as file:
    json.dump(told, file)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_array_pack(tmp_path_factory.mktemp("peers"))


@pytest.fixture
def server(data: Path) -> Iterator[Server]:
    with serving(data.parent) as found:
        yield found


def phase(**more: Any) -> dict[str, Any]:
    """What each node does once: epochs of a loader, with ranks dealt so far from the nodes."""
    usual = {"epochs": 1, "dealt": 0, "fresh": "", "peers": True, "batch": BATCH, "reshuffle": 0.0}
    return {**usual, **more}


def ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def run(server: Server, data: Path, out: Path, *phases: dict[str, Any]) -> list[list[Any]]:
    """What each node told of each phase."""
    free = ports(len(phases))
    words = json.dumps([{**one, "port": free[number]} for number, one in enumerate(phases)])
    url, told = f"{server.url}/{data.name}", {"OMP_NUM_THREADS": "1"}
    children = [([url, str(out), str(node), str(NODES), words], told) for node in range(NODES)]
    with forked(SCRIPT, children) as nodes:
        done = nodes.done()
    assert [code for code, _, _ in done] == [0] * NODES, done
    return [json.loads((out / f"{node}.json").read_text()) for node in range(NODES)]


def steps(told: list[list[Any]], number: int) -> list[list[int]]:
    """The global batches of a phase, sorted."""
    ranks = [node[number]["ids"] for node in told]
    return [sorted(itertools.chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]


def total(told: list[list[Any]], number: int, what: str) -> int:
    return sum(node[number][what] for node in told)


def readers(told: list[list[Any]], number: int, data: Path) -> float:
    """How many nodes read a shard in a phase, on average."""
    shards = len(list(data.glob("*.arrow")))
    per_shard = -(-SAMPLES // shards)
    read = [{i // per_shard for ids in node[number]["ids"] for i in ids} for node in told]
    return sum(map(len, read)) / shards


def test_what_the_nodes_hold_leaves_the_remote_once(
    server: Server, data: Path, tmp_path: Path
) -> None:
    size = array_pack_bytes(data)
    told = run(server, data, tmp_path, phase(), phase(dealt=1), phase(fresh="-new"))
    assert sorted(itertools.chain.from_iterable(steps(told, 0))) == list(range(SAMPLES))
    assert steps(told, 0) == steps(told, 1) == steps(told, 2)
    # A node that can't wait for the owner of a shard fetches what it lacks itself, so on a busy
    # machine the remote gives each shard at most once to each node that reads it.
    assert total(told, 0, "remote") <= 1.02 * readers(told, 0, data) * size
    # What nobody had fetched whole when the epoch ended, and the index of a cache that lacks it.
    assert total(told, 1, "remote") <= 0.1 * size
    assert total(told, 2, "remote") <= 0.1 * size
    assert total(told, 1, "peers") >= 0.85 * size
    assert 0 < told[1][2]["peers"] < 0.5 * size
    # Others fill up what batches had brought in part.
    assert total(told, 2, "peers") - told[1][2]["peers"] < 0.1 * size
    assert total(told, 0, "failed") == total(told, 1, "failed") == total(told, 2, "failed") == 0
