"""Hold and check the user's settings for serving the cache to the job's other nodes."""

from __future__ import annotations

import os
import re
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Spellings of 0.0.0.0 and ::, which stand for all networks: also "0", "0x0", "000.0.0.0", "[0::0]".
_ALL_NETWORKS = re.compile(r"\*|[0.]+|0x0+|\[[0:.]+\]|\[::ffff:[0.]+\]", re.IGNORECASE)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Peers:
    """The settings with which the nodes of a job serve their caches to each other.

    A node requests missing data from other nodes before it requests it from the remote.

    address: "HOST:PORT", the only address at which this node listens and at which the others reach
        it; port 0 chooses a free one. A HOST for all addresses, such as 0.0.0.0, is refused.
    token_file: a file with the secret that the job's nodes share and with which they sign their
        requests. None uses the secret of the environment, or else one that the job draws and sends
        to its processes through the process group's store.
    nodes: the addresses of all nodes including this one, in the order of the nodes' ranks, for a
        job without a process group. It needs a token_file, or the secret in the environment.
    tls: None encrypts unless the address is this machine's own (127.0.0.1). True always encrypts.
        False never encrypts, which is cheaper, for private networks only.

    Raises ConfigError for invalid values.
    """

    address: str
    _: KW_ONLY
    token_file: str | os.PathLike[str] | None = None
    tls: bool | None = None
    nodes: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_address(self.address, what="the address")
        if not isinstance(self.token_file, str | os.PathLike | None):
            raise ConfigError(
                f"peers: got a token_file of type {type(self.token_file).__name__}, wanted the "
                "path of a file that holds the secret."
            )
        if not isinstance(self.tls, bool | None):
            raise ConfigError(f"peers: got tls={self.tls!r}, wanted True, False or None.")
        # Not a set: a node's position is its number.
        if not isinstance(self.nodes, list | tuple):
            raise ConfigError(f"peers: got nodes={self.nodes!r}, wanted a list of addresses.")
        object.__setattr__(self, "nodes", tuple(self.nodes))
        for node in self.nodes:
            check_address(node, what="among nodes")
            if node.endswith(":0"):
                raise ConfigError(
                    f"peers: got {node!r} among nodes: the other nodes can't know a port that is "
                    "chosen when the server starts. Give a fixed port."
                )
        if len(set(self.nodes)) < len(self.nodes):
            twice = next(node for node in self.nodes if self.nodes.count(node) > 1)
            raise ConfigError(f"peers: got {twice!r} twice among nodes, wanted each node once.")
        if self.nodes and self.address not in self.nodes:
            raise ConfigError(
                f"peers: got the address {self.address!r}, which isn't among the "
                f"{len(self.nodes)} nodes. Pass the same list of all nodes on each node, and "
                "address= as it is written in the list."
            )

    @property
    def host(self) -> str:
        """The host of the address, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the address; 0 for any free one."""
        return int(self.address.rpartition(":")[2])


def check_address(address: object, *, what: str) -> None:
    """Raise ConfigError unless it is the "HOST:PORT" of one node."""
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or int(found[2]) > 65535:
        raise ConfigError(
            f'peers: got {what} {address!r}, wanted "HOST:PORT" of a node, such as '
            '"10.0.0.7:7077" or "[fd00::7]:7077"; port 0 chooses a free one.'
        )
    if _ALL_NETWORKS.fullmatch(found[1]):
        raise ConfigError(
            f"peers: got {what} {address!r}, which stands for all networks of a node. Pass the "
            "address by which the job's other nodes reach it."
        )
