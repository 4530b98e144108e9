"""Jobs of several nodes whose caches serve one another: real processes, a remote that counts."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from penstock import DataLoader, Dataset, DiskCache, Order, Peers
from penstock.cache import ConfigError, PenstockWarning
from penstock.pipeline import World
from penstock.pipeline.cli import main
from penstock.pipeline.feed import warm
from tests.array_packs import SAMPLES, array_pack_bytes, write_array_pack
from tests.cache.peers.fake_peer import SECRET, FakePeer, fake_peer
from tests.pipeline.ranks import forked
from tests.servers import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock import Statistics


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
    """Run one phase on each node: epochs of a loader, with ranks shifted by so many nodes."""
    usual = {"epochs": 1, "dealt": 0, "fresh": "", "peers": True, "batch": BATCH, "reshuffle": 0.0}
    return {**usual, **more}


def ports(count: int) -> list[int]:
    """Return free ports."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def run(server: Server, data: Path, out: Path, *phases: dict[str, Any]) -> list[list[Any]]:
    """Return the records of each node and phase."""
    free = ports(len(phases))
    words = json.dumps([{**one, "port": free[number]} for number, one in enumerate(phases)])
    url, report = f"{server.url}/{data.name}", {"OMP_NUM_THREADS": "1"}
    children = [([url, str(out), str(node), str(NODES), words], report) for node in range(NODES)]
    with forked(SCRIPT, children) as nodes:
        done = nodes.done()
    assert [code for code, _, _ in done] == [0] * NODES, done
    return [json.loads((out / f"{node}.json").read_text()) for node in range(NODES)]


def steps(report: list[list[Any]], number: int) -> list[list[int]]:
    """The global batches of a phase, sorted."""
    ranks = [node[number]["ids"] for node in report]
    return [sorted(itertools.chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]


def total(report: list[list[Any]], number: int, what: str) -> int:
    return sum(node[number][what] for node in report)


def readers(report: list[list[Any]], number: int, data: Path) -> float:
    """Return how many nodes read a shard in a phase, on average."""
    shards = len(list(data.glob("*.arrow")))
    per_shard = -(-SAMPLES // shards)
    read = [{i // per_shard for ids in node[number]["ids"] for i in ids} for node in report]
    return sum(map(len, read)) / shards


def test_what_the_nodes_hold_leaves_the_remote_once(
    server: Server, data: Path, tmp_path: Path
) -> None:
    size = array_pack_bytes(data)
    report = run(server, data, tmp_path, phase(), phase(dealt=1), phase(fresh="-new"))
    assert sorted(itertools.chain.from_iterable(steps(report, 0))) == list(range(SAMPLES))
    assert steps(report, 0) == steps(report, 1) == steps(report, 2)
    # A node that can't wait for the owner of a shard fetches what it lacks itself, so on a busy
    # machine the remote gives each shard at most once to each node that reads it.
    assert total(report, 0, "remote") <= 1.02 * readers(report, 0, data) * size
    # Blobs that no node had completed when the epoch ended, and the index for a cache without it.
    assert total(report, 1, "remote") <= 0.1 * size
    assert total(report, 2, "remote") <= 0.1 * size
    assert total(report, 1, "peers") >= 0.85 * size
    assert 0 < report[1][2]["peers"] < 0.5 * size
    # Others fill up what batches had brought in part.
    assert total(report, 2, "peers") - report[1][2]["peers"] < 0.1 * size
    assert (
        total(report, 0, "failed") == total(report, 1, "failed") == total(report, 2, "failed") == 0
    )


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_bytes(SECRET.value)
    return file


@pytest.fixture
def other() -> Iterator[FakePeer]:
    with fake_peer() as found:
        yield found


def free_address() -> str:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def opened(url: str, folder: Path, token: Path | None, *others: str) -> Dataset:
    mine = free_address()
    peers = Peers(mine, token_file=token, nodes=[mine, *others])
    cache = DiskCache(folder, max_bytes="1GB", peers=peers)
    return Dataset(url, cache=cache, fields=("array", "id"))


def hold(other: FakePeer, url: str, data: Path, folder: Path) -> int:
    """Have a peer hold all shards; bytes of them."""
    with Dataset(url, cache=DiskCache(folder, max_bytes="1GB")) as dataset:
        shards = dataset.remote_shards
        assert shards is not None
        for shard in range(len(dataset.contents.sizes)):
            found = shards.find(shard)
            assert found is not None
            other.blobs[found[1].key] = (data / found[1].uri.rpartition("/")[2]).read_bytes()
    return sum(map(len, other.blobs.values()))


def epoch(dataset: Dataset) -> tuple[list[list[int]], Statistics]:
    """The ids of an epoch's batches, whose bytes are right."""
    found = []
    with DataLoader(dataset, 16, shuffle=True, seed=7) as loader:
        for data, id in loader:
            assert (data[:, 0] == id % 251).all()
            assert (data[:, -1] == id % 241).all()
            found.append(id.tolist())
        return found, loader.statistics()


def test_what_a_listed_node_holds_comes_from_it(
    server: Server, data: Path, token: Path, other: FakePeer, tmp_path: Path
) -> None:
    url = f"{server.url}/{data.name}"
    hold(other, url, data, tmp_path / "keys")
    with Dataset(data, fields=("array", "id")) as local:
        wanted, _ = epoch(local)
    with opened(url, tmp_path / "cache", token, other.peer(1).address) as dataset:
        result = warm(dataset, seed=7)
        assert result.bytes == sum(map(len, other.blobs.values()))
        assert not result.failed
        found, statistics = epoch(dataset)
    assert found == wanted
    assert statistics.bytes_peers == result.bytes
    assert statistics.bytes_remote < 0.1 * result.bytes  # the index
    assert statistics.peer_failed == 0


def test_wrong_bytes_with_a_right_checksum_come_from_the_remote_again(
    server: Server, data: Path, token: Path, other: FakePeer, tmp_path: Path
) -> None:
    url = f"{server.url}/{data.name}"
    size = hold(other, url, data, tmp_path / "keys")
    shards = len(other.blobs)
    for key, shard in other.blobs.items():
        middle = len(shard) // 2
        other.blobs[key] = shard[:middle] + bytes(100) + shard[middle + 100 :]
    with opened(url, tmp_path / "cache", token, other.peer(1).address) as dataset:
        warm(dataset, seed=7)
        assert dataset.traffic().bytes_peers == size
        asked = other.asked_for()
        _, statistics = epoch(dataset)
    assert statistics.bad == 0
    assert statistics.refetched == shards
    assert statistics.bytes_remote >= size
    assert other.asked_for() == asked


@pytest.mark.filterwarnings("error")
def test_nodes_that_are_gone_are_one_warning(
    server: Server, data: Path, token: Path, tmp_path: Path
) -> None:
    with opened(f"{server.url}/{data.name}", tmp_path / "cache", token, free_address()) as dataset:
        with pytest.warns(PenstockWarning, match="node 1 .*nothing listens at this port") as report:
            _, statistics = epoch(dataset)
        assert len(report) == 1
        _, statistics = epoch(dataset)
    assert statistics.bytes_peers == 0
    assert statistics.samples == SAMPLES


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (Peers("127.0.0.1:0", token_file="/nowhere/token"), "the token_file /nowhere/token"),
        (Peers("192.0.2.7:7077", tls=False), "can't listen at 192.0.2.7:7077"),
        (Peers("127.0.0.1:0"), None),
    ],
)
def test_a_job_of_one_node_states_what_would_be_wrong_on_several(
    peers: Peers, message: str | None, server: Server, data: Path, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="1GB", peers=peers)
    with (
        Dataset(f"{server.url}/{data.name}", cache=cache, fields=("array", "id")) as dataset,
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        _, statistics = epoch(dataset)
    assert statistics.samples == SAMPLES
    words = [str(one.message) for one in found if "peers:" in str(one.message)]
    assert len(words) == (message is not None)
    assert message is None or (message in words[0] and "continues without peers" in words[0])


def test_a_list_without_a_secret_is_refused(
    server: Server, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_PEER_TOKEN", raising=False)
    with (
        opened(f"{server.url}/{data.name}", tmp_path / "cache", None, free_address()) as dataset,
        pytest.raises(ConfigError, match="share no secret"),
    ):
        epoch(dataset)


def test_the_command_asks_listed_nodes(
    server: Server,
    data: Path,
    token: Path,
    other: FakePeer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, mine = f"{server.url}/{data.name}", free_address()
    hold(other, url, data, tmp_path / "keys")
    before = server.bytes_sent
    command = ["warm", url, "--cache", str(tmp_path / "cache"), "--json", "--peers", mine]
    nodes = ["--peer-nodes", f"{mine}, {other.peer(1).address}"]
    # One node of one: --nodes and similar options give the ranks of a listed job, as always.
    assert main([*command, *nodes, "--peer-token-file", str(token), "--no-tls"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == sum(map(len, other.blobs.values()))
    assert server.bytes_sent - before < 0.1 * report["bytes"]  # the index


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--peers", "127.0.0.1:7077"), "got no --peer-nodes"),
        (("--peers", "127.0.0.1:7077", "--peer-nodes", "a:1,b:2"), "isn't among the 2 nodes"),
        (("--peers", "0.0.0.0:7077", "--peer-nodes", "0.0.0.0:7077"), "all networks of a node"),
        (("--no-tls",), "need --peers"),
    ],
)
def test_the_command_refuses_a_list_that_can_not_be(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", "http://127.0.0.1:9/data", "--cache", str(tmp_path), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def member(url: str, folder: Path, rank: int) -> DataLoader:
    cache = DiskCache(folder, max_bytes="1GB", peers=Peers("127.0.0.1:0"))
    return DataLoader(
        Dataset(url, cache=cache, fields=("array", "id")),
        global_batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        seed=7,
        order=Order(slots="rank"),
        world=World(rank, NODES),
    )


def epoch_of_members(members: Sequence[DataLoader], *, step: int) -> list[list[int]]:
    """Return the global batches of an epoch that these loaders run as ranks 0, 1, 2, … of a new
    membership."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> list[list[int]]:
        members[rank].rejoin(World(rank, len(members)), step=step, store=store)
        found = []
        for data, id in members[rank]:
            assert (data[:, 0] == id % 251).all()
            found.append(id.tolist())
        return found

    with ThreadPoolExecutor(len(members)) as pool:
        ranks = list(pool.map(run, range(len(members))))
    return [sorted(itertools.chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]


def received(members: Sequence[DataLoader]) -> tuple[int, int]:
    """Return the bytes from the remote and from peers."""
    found = [one.statistics() for one in members]
    return sum(one.bytes_remote for one in found), sum(one.bytes_peers for one in found)


def test_places_change_and_a_node_is_replaced(data: Path, tmp_path: Path) -> None:
    size, steps = array_pack_bytes(data), SAMPLES // BATCH
    with serving(data.parent) as server:
        url = f"{server.url}/{data.name}"
        members = [member(url, tmp_path / f"cache-{rank}", rank) for rank in range(NODES)]
        first = epoch_of_members(members, step=0)
        assert sorted(itertools.chain.from_iterable(first)) == list(range(SAMPLES))
        remote, peers = received(members)

        moved = [members[2], members[0], members[1]]
        second = epoch_of_members(moved, step=steps)
        assert sorted(itertools.chain.from_iterable(second)) == list(range(SAMPLES))
        after = received(members)
        # Except shards that no node had fetched completely when the epoch ended.
        assert after[0] - remote <= 0.1 * size
        assert after[1] - peers >= 0.85 * size

        lost = moved[1]
        lost.close()
        fresh = member(url, tmp_path / "fresh", 1)
        third = epoch_of_members([moved[0], fresh, moved[2]], step=2 * steps)
        assert sorted(itertools.chain.from_iterable(third)) == list(range(SAMPLES))
        # Each node holds what two ranks read: the others have the bytes of the lost one.
        got = fresh.statistics()
        assert got.bytes_remote <= 0.1 * size  # the index and other small files
        assert got.bytes_peers > 0.2 * size
        for one in (*moved, fresh):
            one.close()
            one.dataset.close()  # type: ignore[attr-defined]
