"""How the caches of a job's nodes serve one another, as users say it."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    import os

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificates of one's own for the connections between nodes, as paths of PEM files.

    certificate, key: this node's. authority: whose certificates the other nodes must show.
    """

    certificate: str
    key: str
    authority: str


@dataclass(frozen=True, slots=True)
class Peers:
    """Has this node's cache serve the other nodes of the job, and ask them before the remote.

    address: "HOST:PORT" where this node listens and the others reach it, and nowhere else; port 0
        takes a free one. No HOST stands for all addresses: such as 0.0.0.0 is refused.
    token_file: a file with the secret that the job's nodes share; it signs what they ask one
        another for. None: the environment's, else one that the job draws and tells its processes
        through the process group's store.
    tls: None encrypts unless the address is this machine's own (127.0.0.1), with certificates that
        the job makes for itself; False declares the network private and saves their cost; True
        encrypts there too; or files of one's own.

    Raises ConfigError for values that can't be.
    """

    address: str
    _: KW_ONLY
    token_file: str | os.PathLike[str] | None = None
    tls: bool | TlsFiles | None = None

    def __post_init__(self) -> None:
        found = _ADDRESS.fullmatch(self.address) if isinstance(self.address, str) else None
        if found is None or int(found[2]) > 65535:
            raise ConfigError(
                f'peers: got the address {self.address!r}, wanted "HOST:PORT" of this node, such '
                'as "10.0.0.7:7077" or "[fd00::7]:7077"; port 0 takes a free one.'
            )
        if found[1] in ("0.0.0.0", "[::]", "*"):
            raise ConfigError(
                f"peers: got the address {self.address!r}, which is every network of this node. "
                "Pass the address by which the job's other nodes reach it."
            )
        if not isinstance(self.tls, bool | TlsFiles | None):
            raise ConfigError(f"peers: got tls={self.tls!r}, wanted True, False or TlsFiles.")

    @property
    def host(self) -> str:
        """The host of the address, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the address; 0 for any that is free."""
        return int(self.address.rpartition(":")[2])
