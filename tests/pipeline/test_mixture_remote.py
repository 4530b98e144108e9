"""Test mixtures of remote datasets: caches, pins and fills, ranks of a node, and peers."""

from __future__ import annotations

import itertools
import json
import warnings
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import DataLoader, Dataset, DiskCache, World, mix, pack
from penstock.errors import PenstockWarning
from tests.pipeline.ranks import forked, free_port, run_ranks
from tests.servers import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = {"web": 480, "code": 240}
WEIGHTS = {"web": 2.0, "code": 1.0}
SAMPLE_BYTES = 10_000
BATCH = 24

COMMON = """
import json, os, sys
from penstock import DataLoader, Dataset, DiskCache, Peers, World, mix

def mixture(url, cache):
    parts = {
        name: Dataset(f"{url}/{name}", cache=cache, fields=("array", "id"))
        for name in ("web", "code")
    }
    return mix(parts, weights={"web": 2.0, "code": 1.0})

def epoch(loader):
    "The batches of an epoch, by the numbers in the samples."
    found = []
    for data, _ in loader:
        assert (data[:, 0] == data[:, -1]).all()
        found.append((data[:, 0].int() + 256 * data[:, 1].int()).tolist())
    return found
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packs, whose samples are numbers that name them, in their first and last bytes."""
    root = tmp_path_factory.mktemp("remote")
    first = 0
    for name, size in SIZES.items():
        samples = np.zeros((size, SAMPLE_BYTES), np.uint8)
        samples[:, 0] = samples[:, -1] = (first + np.arange(size)) % 256
        samples[:, 1] = (first + np.arange(size)) // 256
        np.save(root / f"{name}.npy", samples)
        pack(str(root / f"{name}.npy"), str(root / name), shard_bytes=2**17, shuffle=False)
        first += size
    return root


@pytest.fixture
def server(data: Path) -> Iterator[Server]:
    with serving(data) as found:
        yield found


def files(data: Path) -> dict[str, int]:
    """The bytes of each shard by its path on the server."""
    found = [*data.glob("*/shard-*.arrow")]
    return {f"/{path.parent.name}/{path.name}": path.stat().st_size for path in found}


def opened(url: str, cache: DiskCache | None) -> dict[str, Dataset]:
    return {name: Dataset(f"{url}/{name}", cache=cache, fields=("array", "id")) for name in SIZES}


def loader(source: Any, **arguments: Any) -> DataLoader:
    options = {"shuffle": True, "seed": 7, "global_batch_size": BATCH, "drop_last": True}
    return DataLoader(source, **{**options, **arguments})


def numbers(job: Any) -> list[list[int]]:
    return [(d[:, 0].int() + 256 * d[:, 1].int()).tolist() for d, _ in job]


def wanted(data: Path, epochs: int) -> list[list[int]]:
    with loader(mix(opened(str(data), None), weights=WEIGHTS), world=World(0, 1)) as job:
        return [batch for _ in range(epochs) for batch in numbers(job)]


def test_each_byte_comes_once_and_then_none(server, data, tmp_path):
    sizes = files(data)
    with closing(DiskCache(tmp_path / "cache", max_bytes="64MiB")) as cache:
        parts = opened(server.url, cache)
        with loader(mix(parts, weights=WEIGHTS), world=World(0, 1)) as job:
            found = numbers(job)
            if not job.statistics().hedges:  # a slow machine's late requests are sent twice
                assert all(server.bytes_of[path] <= size for path, size in sizes.items())
            before = dict(server.bytes_of)
            found += numbers(job)
            assert {path: server.bytes_of[path] for path in sizes} == {
                path: before[path] for path in sizes
            }
            assert job.statistics().bytes_remote >= 0.98 * sum(sizes.values())
            state = job.state_dict()
        assert found == wanted(data, 2)
        with loader(mix(parts, weights=WEIGHTS), world=World(0, 1)) as job:
            job.load_state_dict(state)
            job.set_weights({"web": 1, "code": 1})
            numbers(job)
        assert {path: server.bytes_of[path] for path in sizes} == {
            path: before[path] for path in sizes
        }
        for part in parts.values():
            part.close()


def test_a_cache_of_half_pins_a_half(server, data, tmp_path):
    """The second epoch fetches what isn't pinned, and only that."""
    sizes = files(data)
    total = sum(sizes.values())
    with (
        warnings.catch_warnings(),
        closing(DiskCache(tmp_path / "cache", max_bytes=total // 2 + 400 * 2**10)) as cache,
    ):
        warnings.simplefilter("ignore", PenstockWarning)  # such a small one warns
        parts = opened(server.url, cache)
        with loader(mix(parts, weights=WEIGHTS), world=World(0, 1)) as job:
            found = numbers(job)
            before = sum(server.bytes_of[path] for path in sizes)
            found += numbers(job)
            again = sum(server.bytes_of[path] for path in sizes) - before
        for part in parts.values():
            part.close()
    assert found == wanted(data, 2)
    assert 0.2 * total < again < 0.75 * total


def test_the_ranks_of_a_node_fetch_each_byte_once(server, data, tmp_path):
    script = COMMON + (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "cache = DiskCache(sys.argv[2], max_bytes='64MiB')\n"
        "with DataLoader(mixture(sys.argv[1], cache), shuffle=True, seed=7, drop_last=True,\n"
        "    global_batch_size=24) as loader:\n"
        "    found = epoch(loader)\n"
        "    loader.set_weights({'web': 1.0, 'code': 1.0})\n"
        "    found += epoch(loader)\n"
        "    dist.barrier()\n"
        "print(json.dumps(found), flush=True)\n"
    )
    ranks = run_ranks(script, server.url, str(tmp_path / "cache"))
    found = [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
    with loader(mix(opened(str(data), None), weights=WEIGHTS), world=World(0, 1)) as job:
        alone = numbers(job)
        job.set_weights({"web": 1, "code": 1})
        assert found == alone + numbers(job)
    assert all(server.bytes_of[path] <= size for path, size in files(data).items())


def test_what_another_node_holds_comes_from_it(server, data, tmp_path):
    """Slots don't follow the data: a node that gets another rank asks the node that has it."""
    script = COMMON + (
        "import torch.distributed as dist\n"
        "node, told = int(sys.argv[3]), []\n"
        "for phase, port in enumerate(json.loads(sys.argv[4])):\n"
        "    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}',\n"
        "        rank=(node + phase) % 2, world_size=2)\n"
        "    cache = DiskCache(f'{sys.argv[2]}-{node}', max_bytes='64MiB',\n"
        "        peers=Peers('127.0.0.1:0'))\n"
        "    world = World((node + phase) % 2, 2, place=((node + phase) % 2, 2))\n"
        "    with DataLoader(mixture(sys.argv[1], cache), shuffle=True, seed=7, drop_last=True,\n"
        "        global_batch_size=24, world=world) as loader:\n"
        "        found = epoch(loader)\n"
        "        dist.barrier()\n"
        "        seen = loader.statistics()\n"
        "    told.append([found, seen.bytes_remote, seen.bytes_peers])\n"
        "    dist.barrier()\n"
        "    dist.destroy_process_group()\n"
        "print(json.dumps(told), flush=True)\n"
    )
    ports = json.dumps([free_port(), free_port()])
    words = [server.url, str(tmp_path / "cache")]
    children = [([*words, str(node), ports], {"OMP_NUM_THREADS": "1"}) for node in range(2)]
    with forked(script, children) as nodes:
        done = nodes.done()
    assert [code for code, _, _ in done] == [0, 0], done
    first, second = (json.loads(out.splitlines()[-1]) for _, out, _ in done)
    total = sum(files(data).values())
    for phase, ranks in enumerate(([first, second], [second, first])):
        batches = zip(*(rank[phase][0] for rank in ranks), strict=True)
        assert [list(itertools.chain(*parts)) for parts in batches] == wanted(data, 1)
    assert sum(node[1][1] for node in (first, second)) <= 0.1 * total
    assert sum(node[1][2] for node in (first, second)) > 0.3 * total
