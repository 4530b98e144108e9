"""Run `penstock doctor`: check that this machine is ready to train, and name remedies.

The checks are pure functions of `doctor_facts.MachineFacts`, so that tests can invent machines.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.cache import ConfigError
from penstock.pipeline.cli.command_options import StorageOption, parse_storage_options
from penstock.pipeline.cli.doctor_checks import (
    cache_checks,
    folder_checks,
    limit_checks,
    package_checks,
    python_check,
    software_checks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.base import Peers
    from penstock.pipeline.cli.doctor_checks import Check
    from penstock.pipeline.cli.doctor_facts import MachineFacts

AskedPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="HOST:PORT",
        help="Check the server of another node: reachable, same protocol, same secret, speed. "
        "Repeatable.",
    ),
]
ServedPeer = Annotated[
    str | None,
    typer.Option(
        "--serve-peer",
        metavar="HOST:PORT",
        help="Serve at this node's own address for ten minutes, so that other nodes can use "
        "--peer before a job runs; with DIR, serve that cache.",
    ),
]
NodesTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--peer-token-file",
        help="With --peer or --serve-peer: file with the nodes' shared secret; by default "
        "PENSTOCK_PEER_TOKEN.",
    ),
]
NodesCertificates = Annotated[
    tuple[Path, Path, Path] | None,
    typer.Option(
        "--peer-certificates",
        metavar="FILE FILE FILE",
        help="With --peer or --serve-peer: certificate, key and authority (PEM files), if the "
        "nodes use TlsFiles.",
    ),
]
NodesTls = Annotated[
    bool, typer.Option("--tls/--no-tls", help="Use --no-tls on a network declared private.")
]


def nodes_of(
    addresses: list[str],
    token_file: Path | None,
    certificates: tuple[Path, Path, Path] | None,
    tls: bool,
) -> list[Peers]:
    """Return the peer settings for some addresses. Raises ConfigError."""
    if not addresses:
        if token_file is not None or certificates is not None or not tls:
            raise ConfigError(
                "--peer-token-file, --peer-certificates and --no-tls need --peer HOST:PORT or "
                "--serve-peer HOST:PORT, but got neither."
            )
        return []
    from penstock.cache.base import Peers, TlsFiles

    if certificates is not None and not tls:
        raise ConfigError("--peer-certificates: can't be used together with --no-tls.")
    files = None if certificates is None else TlsFiles(*certificates)
    return [
        Peers(address, token_file=token_file, tls=files if tls else False) for address in addresses
    ]


_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}

Folder = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="Also check this folder for data, packs or a cache."),
]


def doctor(
    folder: Folder = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Check the store of a dataset's URL: answers, credentials, listing, ranges, time "
            "of a request."
        ),
    ] = None,
    storage_option: StorageOption = None,
    peer: AskedPeers = None,
    serve_peer: ServedPeer = None,
    peer_token_file: NodesTokenFile = None,
    peer_certificates: NodesCertificates = None,
    tls: NodesTls = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: Python, torch, DALI, Zarr, GPU, cores, threads, memory, limits, launcher.

    With DIR, also check its disk, and a cache's limit, owner, leftovers and jobs; with --url, a
    store; with --peer, the connection to other nodes. Each line shows ok, warn or fail, and a
    remedy. The exit code is 1 if a check fails.
    """
    from penstock.pipeline.cli.doctor_facts import gather

    if folder is not None and ":/" in str(folder):
        raise ConfigError(
            f"doctor: got {str(folder)!r}, wanted a local folder. Pass a dataset's URL as --url."
        )
    nodes = nodes_of(
        [*(peer or ()), *filter(None, [serve_peer])], peer_token_file, peer_certificates, tls
    )
    if serve_peer is not None:
        from penstock.pipeline.cli.doctor_peers import serve

        if peer:
            raise ConfigError(
                "--serve-peer: can't be used together with --peer. Run --peer in another shell or "
                "on another node."
            )
        if url is not None or as_json or storage_option:
            raise ConfigError(
                "--serve-peer: can't be used together with --url, -o or --json, because it checks "
                "nothing."
            )
        serve(nodes[0], folder)
        return
    options = parse_storage_options(storage_option) or {}
    found = list(checks(gather(folder)))
    if nodes:
        from penstock.pipeline.cli.doctor_peers import peer_checks, peer_facts

        found += [check for facts in peer_facts(nodes) for check in peer_checks(facts)]
    if url is not None:
        from penstock.pipeline.cli.doctor_store import store_checks, store_facts

        found += store_checks(store_facts(url, options))
    failed = any(check.status == "fail" for check in found)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(check) for check in found]}))
    else:
        _print(found)
    if failed:
        raise typer.Exit(1)


def checks(facts: MachineFacts) -> Iterator[Check]:
    """Check a machine, in the order in which its faults would occur."""
    yield python_check(facts)
    yield from package_checks(facts.packages)
    yield from software_checks(facts)
    yield from limit_checks(facts)
    if facts.folder is not None:
        yield from folder_checks(facts.folder)
        if facts.cache is not None:
            yield from cache_checks(facts.cache, facts.folder)


def _print(found: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("name", "status", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for check in found:
        style = _STYLE[check.status]
        table.add_row(check.name, f"[{style}]{check.status}[/]", _plain(check.found))
        if check.remedy:
            table.add_row("", "", f"[{style}]→[/] {_plain(check.remedy)}")
    Console().print(table)


def _plain(text: str) -> str:
    """Escape brackets, which rich would read as markup."""
    return text.replace("[", r"\[")
