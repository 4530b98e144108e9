"""What a server's process is told by who starts it: over a pipe, as it holds secrets. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache.peers.certificates import Credentials
from penstock.cache.peers.tokens import PeerSecret

if TYPE_CHECKING:
    from penstock.cache.base.peer_settings import Peers

FOLDER = "peers"
"""Of a cache folder: the lock and the socket of each server."""
LIFE_BYTE, START_BYTE = 0, 1
"""Of a server's lock file: held by the server while it lives, and by who starts one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What a server serves, where, and to whom.

    root, mode: of the cache folder. host, port: where it listens, port 0 for any that is free.
    """

    root: str
    mode: int
    host: str
    port: int
    secret: PeerSecret
    credentials: Credentials | None = field(repr=False)

    def dump(self) -> bytes:
        """The spec as a line."""
        tls = self.credentials
        told = {
            "root": self.root,
            "mode": self.mode,
            "host": self.host,
            "port": self.port,
            "secret": base64.b64encode(self.secret.value).decode(),
            "tls": None if tls is None else [tls.certificate, tls.key, tls.authority],
        }
        return json.dumps(told).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> ServerSpec:
        """The spec that a line holds."""
        told: dict[str, Any] = json.loads(line)
        tls = told["tls"]
        if tls is not None:
            tls = Credentials(certificate=tls[0], key=tls[1], authority=tls[2])
        return cls(
            root=told["root"],
            mode=told["mode"],
            host=told["host"],
            port=told["port"],
            secret=PeerSecret(base64.b64decode(told["secret"])),
            credentials=tls,
        )


def server_name(peers: Peers, secret: PeerSecret) -> str:
    """The name of a server's files in the cache folder: one for each address, secret, kind of
    encryption and user, so that all who agree on these share one."""
    about = (peers.address, secret.job, repr(peers.tls), str(os.geteuid()))
    return hashlib.sha256("\0".join(about).encode("utf-8", "surrogateescape")).hexdigest()[:16]
