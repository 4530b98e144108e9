"""A job without a process group whose nodes are listed: peers that are wrong, or gone."""

from __future__ import annotations

import json
import socket
import warnings
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from penstock import DataLoader, Dataset, DiskCache, Peers, TlsFiles
from penstock.cache import ConfigError, PenstockWarning
from penstock.pipeline.cli import main
from penstock.pipeline.feed import warm
from tests.array_packs import SAMPLES, write_array_pack
from tests.cache.peers.fake_peer import SECRET, FakePeer, fake_peer
from tests.servers import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock import Statistics


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_array_pack(tmp_path_factory.mktemp("listed"))


@pytest.fixture
def server(data: Path) -> Iterator[Server]:
    with serving(data.parent) as found:
        yield found


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
        with pytest.warns(PenstockWarning, match="node 1 .*nothing listens at this port") as told:
            _, statistics = epoch(dataset)
        assert len(told) == 1
        _, statistics = epoch(dataset)
    assert statistics.bytes_peers == 0
    assert statistics.samples == SAMPLES


@pytest.mark.parametrize(
    ("peers", "told"),
    [
        (Peers("127.0.0.1:0", token_file="/nowhere/token"), "the token_file /nowhere/token"),
        (Peers("127.0.0.1:0", tls=TlsFiles("/nowhere/a", "/nowhere/b", "c")), "the certificate"),
        (Peers("192.0.2.7:7077", tls=False), "can't listen at 192.0.2.7:7077"),
        (Peers("127.0.0.1:0"), None),
    ],
)
def test_a_job_of_one_node_says_what_would_be_wrong_on_several(
    peers: Peers, told: str | None, server: Server, data: Path, tmp_path: Path
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
    assert len(words) == (told is not None)
    assert told is None or (told in words[0] and "continues without peers" in words[0])


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
    # One node of one: the ranks of a listed job are told, as ever, by --nodes and its like.
    assert main([*command, *nodes, "--peer-token-file", str(token), "--no-tls"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == sum(map(len, other.blobs.values()))
    assert server.bytes_sent - before < 0.1 * told["bytes"]  # the index


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--peers", "127.0.0.1:7077"), "got no --peer-nodes"),
        (("--peers", "127.0.0.1:7077", "--peer-nodes", "a:1,b:2"), "isn't among the 2 nodes"),
        (("--peers", "0.0.0.0:7077", "--peer-nodes", "0.0.0.0:7077"), "all networks of a node"),
        (("--no-tls",), "go with --peers"),
    ],
)
def test_the_command_refuses_a_list_that_can_not_be(
    options: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", "http://127.0.0.1:9/data", "--cache", str(tmp_path), *options]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
