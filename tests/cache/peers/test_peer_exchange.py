"""Test how a job's nodes exchange their addresses: each is published once, and late
nodes read all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.cache import ConfigError, JobStore, JobStoreError
from penstock.cache.base import Peers
from penstock.cache.peers import NodeRanks, Peer, PeerExchange

torch = pytest.importorskip("torch")


@pytest.fixture
def store() -> JobStore:
    return JobStore.of(torch.distributed.HashStore())


def exchanges(store: JobStore, *sizes: int) -> list[PeerExchange]:
    firsts = [sum(sizes[:node]) for node in range(len(sizes))]
    return [
        PeerExchange(store, NodeRanks(first, first + count, sum(sizes)))
        for first, count in zip(firsts, sizes, strict=True)
    ]


def test_every_node_learns_the_others_addresses_in_any_order(store: JobStore) -> None:
    nodes = exchanges(store, 2, 3, 1)

    def join(node: int) -> list[Peer]:
        nodes[node].publish(f"10.0.0.{node}:7000")
        return nodes[node].read_peers(timeout_s=20.0)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(join, [2, 1, 0]))[::-1]
    all_of_them = [Peer(node, f"10.0.0.{node}:7000") for node in range(3)]
    for node, peers in enumerate(found):
        assert peers == [peer for peer in all_of_them if peer.node != node]


def test_late_nodes_and_new_addresses_are_learned_later(store: JobStore) -> None:
    first, second = exchanges(store, 1, 1)
    first.publish("10.0.0.1:1")
    assert first.read_peers(timeout_s=0.0) == []
    assert second.read_peers(timeout_s=0.0) == [Peer(0, "10.0.0.1:1")]
    second.publish("10.0.0.2:1")
    second.publish("10.0.0.2:1")
    assert first.read_peers(timeout_s=0.0) == [Peer(1, "10.0.0.2:1")]
    assert second.read_peers(timeout_s=0.0) == [Peer(0, "10.0.0.1:1")]
    second.publish("10.0.0.2:2")
    assert first.read_peers(timeout_s=0.0) == [Peer(1, "10.0.0.2:2")]


def test_no_node_waits_for_a_node_without_a_server(store: JobStore) -> None:
    first, second, third = exchanges(store, 1, 1, 1)
    second.publish("")
    third.publish("10.0.0.3:1")
    first.publish("10.0.0.1:1")
    assert first.read_peers(timeout_s=3600.0) == [
        Peer(2, "10.0.0.3:1")
    ]  # numbered by ranks all the same
    assert second.read_peers(timeout_s=3600.0) == [Peer(0, "10.0.0.1:1"), Peer(2, "10.0.0.3:1")]
    second.publish("10.0.0.2:1")  # its disk has room again
    assert [peer.node for peer in first.read_peers(timeout_s=0.0)] == [1, 2]


def test_two_threads_that_look_at_once_miss_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore.of(torch.distributed.HashStore())
    *nodes, late = exchanges(store, 1, 1, 1, 1, 1)
    for number, node in enumerate(nodes):
        node.publish(f"10.0.0.{number}:1")
    heard, others = JobStore.notices, [nodes[0]]

    def notices(store: JobStore, name: str) -> dict[int, str]:
        if others:  # here another thread does all of it
            others.pop().read_peers(timeout_s=0.0)
        return heard(store, name)

    monkeypatch.setattr(JobStore, "notices", notices)
    assert [peer.node for peer in nodes[0].read_peers(timeout_s=0.0)] == [1, 2, 3]
    late.publish("10.0.0.4:1")
    assert [peer.node for peer in nodes[0].read_peers(timeout_s=0.0)] == [1, 2, 3, 4]


def test_another_loader_of_the_job_hears_the_same_at_once(store: JobStore) -> None:
    for node, exchange in enumerate(exchanges(store, 1, 1)):
        exchange.publish(f"10.0.0.{node}:1")
    for _ in range(2):
        first, second = exchanges(store, 1, 1)
        assert first.read_peers(timeout_s=5.0) == [Peer(1, "10.0.0.1:1")]
        assert second.read_peers(timeout_s=5.0) == [Peer(0, "10.0.0.0:1")]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("10.0.0.1:1", "wanted a list"),
        (["10.0.0.1:1", "10.0.0.2"], "'10.0.0.2', wanted \"HOST:PORT\""),
        (["10.0.0.1:1", 7], "7, wanted"),
        (["10.0.0.1:1", "10.0.0.2:70000"], "70000"),
        (["10.0.0.1:1", "0.0.0.0:1"], "all networks"),
        (["10.0.0.1:1", "10.0.0.2:0"], "can't know a port"),
        (["10.0.0.1:1", "10.0.0.2:1", "10.0.0.2:1"], "'10.0.0.2:1' twice"),
        (["10.0.0.2:1", "10.0.0.3:1"], "isn't among the 2 nodes"),
    ],
)
def test_a_list_that_cant_be_is_refused(nodes: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Peers("10.0.0.1:1", nodes=nodes)


def test_a_list_is_kept_in_its_order() -> None:
    assert Peers("a:1", nodes=["b:1", "a:1"]).nodes == ("b:1", "a:1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "{}x",
        "5",
        "[5]",
        "[[0, 1]]",
        '[["0", 1, "10.0.0.7:1"]]',
        '[[1, 1, "10.0.0.7:1"]]',
        '[[0, 1, "10.0.0.7"]]',
        '[[0, 1, "u:p@10.0.0.7:1"]]',
        '[[0, 1, "0.0.0.0:1"]]',
        "[[0, 1, null]]",
    ],
)
def test_a_store_that_others_write_to_names_no_address_of_theirs(
    store: JobStore, text: str
) -> None:
    store.set("all", text)
    with pytest.raises(JobStoreError, match="weren't written by this version"):
        PeerExchange(store, NodeRanks(1, 2, 2)).read_peers(timeout_s=0.0)
    if text[:2] == "[[":
        store.post("entry", text[1:-1])
        with pytest.raises(JobStoreError, match="weren't written by this version"):
            PeerExchange(store, NodeRanks(0, 1, 2)).read_peers(timeout_s=0.0)
