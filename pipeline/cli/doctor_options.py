"""The options of `penstock doctor` that say which nodes are asked, and how."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cache.base.peer_settings import Peers

AskedPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="HOST:PORT",
        help="Another node's server: is it reached, does it speak as this side would, is the "
        "secret the same, how fast is it. May be given several times.",
    ),
]
ServedPeer = Annotated[
    str | None,
    typer.Option(
        "--serve-peer",
        metavar="HOST:PORT",
        help="Be such a server, at this node's own address, for ten minutes, so that others can "
        "try --peer before a job runs. With DIR it serves that cache.",
    ),
]
NodesTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--peer-token-file",
        help="With --peer or --serve-peer: the secret that the nodes share; by default what "
        "PENSTOCK_PEER_TOKEN holds.",
    ),
]
NodesCertificates = Annotated[
    tuple[Path, Path, Path] | None,
    typer.Option(
        "--peer-certificates",
        metavar="FILE FILE FILE",
        help="With --peer or --serve-peer: certificate, key and authority, PEM files, where "
        "the nodes have TlsFiles of their own.",
    ),
]
NodesTls = Annotated[
    bool,
    typer.Option("--tls/--no-tls", help="--no-tls where the network is declared private."),
]


def nodes_of(
    addresses: list[str],
    token_file: Path | None,
    certificates: tuple[Path, Path, Path] | None,
    tls: bool,
) -> list[Peers]:
    """How the nodes at some addresses serve. Raises ConfigError."""
    if not addresses:
        if token_file is not None or certificates is not None or not tls:
            raise ConfigError(
                "--peer-token-file, --peer-certificates and --no-tls go with --peer HOST:PORT or "
                "--serve-peer HOST:PORT: got neither."
            )
        return []
    from penstock.cache.base.peer_settings import Peers, TlsFiles

    if certificates is not None and not tls:
        raise ConfigError("--peer-certificates: got some beside --no-tls, which takes none.")
    files = None if certificates is None else TlsFiles(*certificates)
    return [
        Peers(address, token_file=token_file, tls=files if tls else False) for address in addresses
    ]
