"""The options of `penstock warm` about the job and its nodes; typer reads them at run time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cache.base.peer_settings import Peers

_JOB, _OTHER_NODES = "The job", "Other nodes"
_ORDER = "Where the job's order isn't the default"  # apart: a second column of names cuts long ones


WorldSize = Annotated[
    int | None,
    typer.Option(
        help="Ranks of the job; by default as launched, else one a node.",
        min=1,
        rich_help_panel=_JOB,
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Nodes of the job; by default as launched, else 1.", min=1, rich_help_panel=_JOB
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        help="Which one this is, from 0; by default as launched.", min=0, rich_help_panel=_JOB
    ),
]
WarmEpoch = Annotated[
    int, typer.Option(help="Epoch in whose order to fetch.", min=0, rich_help_panel=_JOB)
]
JobSeed = Annotated[int, typer.Option(help="The job's seed.", rich_help_panel=_JOB)]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(
        help="The job's, over all ranks; by default 256 for each rank.", min=1, rich_help_panel=_JOB
    ),
]
JobShuffles = Annotated[
    bool,
    typer.Option(
        "--shuffle/--no-shuffle", help="Whether the job shuffles.", rich_help_panel=_ORDER
    ),
]
Lanes = Annotated[
    int | None, typer.Option(help="If the job passes lanes=.", min=1, rich_help_panel=_ORDER)
]
Window = Annotated[
    int | None, typer.Option(help="If the job passes window=.", min=1, rich_help_panel=_ORDER)
]
Reshuffle = Annotated[
    float, typer.Option(help="If the job passes reshuffle=.", min=0, max=1, rich_help_panel=_ORDER)
]
JobState = Annotated[
    Path | None,
    typer.Option(
        "--state",
        exists=True,
        dir_okay=False,
        help="The job's state as JSON, if it goes on from one: what state_dict() of its loader "
        "gave. It says all of seed, epoch, shuffle, lanes, window and reshuffle.",
        rich_help_panel=_JOB,
    ),
]
IfEmpty = Annotated[
    bool,
    typer.Option(
        "--if-empty",
        help="Leave a cache that holds some of the dataset as it is: behind a restart nodes read "
        "what their caches hold, whatever their numbers are now.",
        rich_help_panel=_JOB,
    ),
]
PeerAddress = Annotated[
    str | None,
    typer.Option(
        "--peers",
        metavar="HOST:PORT",
        help="Serve other nodes here and ask their caches before the remote; needs --peer-nodes.",
        rich_help_panel=_OTHER_NODES,
    ),
]
PeerNodes = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,…",
        help="With --peers: the addresses of all nodes, in the order of their ranks.",
        rich_help_panel=_OTHER_NODES,
    ),
]
PeerTokenFile = Annotated[
    Path | None,
    typer.Option(
        help="With --peers: the secret that the nodes share; by default what PENSTOCK_PEER_TOKEN "
        "holds.",
        rich_help_panel=_OTHER_NODES,
    ),
]
PeerTls = Annotated[
    bool,
    typer.Option(
        "--tls/--no-tls",
        help="With --peers: --no-tls declares the network private: no encryption.",
        rich_help_panel=_OTHER_NODES,
    ),
]


def peers_of(
    address: str | None, nodes: str | None, token_file: Path | None, *, tls: bool
) -> Peers | None:
    """How this node and the others serve one another; None where nobody asks for it.
    Raises ConfigError."""
    if address is None:
        if nodes is not None or token_file is not None or not tls:
            raise ConfigError(
                "--peer-nodes, --peer-token-file and --no-tls go with --peers HOST:PORT, the "
                "address of this node: got none."
            )
        return None
    if nodes is None:  # a command has no process group through which nodes could tell one another
        raise ConfigError(
            f"--peers {address}: got no --peer-nodes, wanted the addresses of all nodes, the same "
            "on each: --peer-nodes 10.0.0.7:7077,10.0.0.8:7077."
        )
    from penstock.cache.base.peer_settings import Peers

    listed = [node.strip() for node in nodes.split(",")]
    return Peers(address, token_file=token_file, tls=None if tls else False, nodes=listed)
