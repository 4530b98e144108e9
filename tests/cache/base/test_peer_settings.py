"""What users say of peers: an address of one node, a list of all of them, files by their paths."""

from __future__ import annotations

import pytest

from penstock import Peers
from penstock.cache import ConfigError
from penstock.cache.base import TlsFiles

HERE = "10.0.0.7:7077"


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "0", "000.0.0.0", "0x0", "[::]", "[0::0]", "[::ffff:0.0.0.0]", "*"]
)
def test_no_address_stands_for_every_network(host: str) -> None:
    with pytest.raises(ConfigError, match="all networks"):
        Peers(f"{host}:7077")
    with pytest.raises(ConfigError, match="all networks"):
        Peers(HERE, nodes=[HERE, f"{host}:7077"])


@pytest.mark.parametrize("host", ["10.0.0.7", "node-0", "[fd00::7]", "[::1]", "0x0a.example", "x"])
def test_addresses_of_one_node(host: str) -> None:
    assert Peers(f"{host}:7077").port == 7077


@pytest.mark.parametrize("nodes", [HERE, None, 5, {HERE}, {HERE: 0}, iter([HERE])])
def test_nodes_are_a_list_in_the_order_of_their_ranks(nodes: object) -> None:
    with pytest.raises(ConfigError, match="wanted a list of addresses"):
        Peers(HERE, nodes=nodes)


def test_files_are_paths() -> None:
    with pytest.raises(ConfigError, match="token_file of type int"):
        Peers(HERE, token_file=5)
    with pytest.raises(ConfigError, match="key of type NoneType"):
        TlsFiles("certificate", None, "authority")
