"""What can be seen on one node alone of how it shall serve the others, without serving."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from penstock.cache.base.peer_settings import TlsFiles
from penstock.cache.errors import ConfigError
from penstock.cache.peers.certificates import credentials_of
from penstock.cache.peers.tokens import PeerSecret

if TYPE_CHECKING:
    from penstock.cache.base.peer_settings import Peers


def check_own_settings(settings: Peers) -> None:
    """Raise ConfigError for a token_file or TlsFiles that can't be used, and for an address that
    isn't this node's. Nothing listens, and nobody is asked but the resolver of a host's name."""
    if settings.token_file is not None:
        PeerSecret.of_file(settings.token_file)
    if isinstance(settings.tls, TlsFiles):
        credentials_of(settings, PeerSecret.draw())
    try:
        _check_local(settings.host)
    except OSError as error:
        raise not_local(settings, error.strerror or str(error)) from None


def not_local(settings: Peers, reason: str) -> ConfigError:
    """The error for an address at which this node can't listen."""
    return ConfigError(
        f"peers: the server of the cache can't listen at {settings.address} ({reason}). "
        "Pass an address of this node itself, by which the job's other nodes reach it."
    )


def _check_local(host: str) -> None:
    family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(place)  # of any port, and nobody is let in
