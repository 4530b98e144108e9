"""Run `penstock doctor`: check that this machine is fit to train, and name remedies.

The judgements are pure functions of `doctor_facts.MachineFacts`, so that tests can invent
machines.
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
    bool, typer.Option("--tls/--no-tls", help="--no-tls where the network is declared private.")
]


def nodes_of(
    addresses: list[str],
    token_file: Path | None,
    certificates: tuple[Path, Path, Path] | None,
    tls: bool,
) -> list[Peers]:
    """Return the answers of the nodes at some addresses. Raises ConfigError."""
    if not addresses:
        if token_file is not None or certificates is not None or not tls:
            raise ConfigError(
                "--peer-token-file, --peer-certificates and --no-tls go with --peer HOST:PORT or "
                "--serve-peer HOST:PORT: got neither."
            )
        return []
    from penstock.cache.base import Peers, TlsFiles

    if certificates is not None and not tls:
        raise ConfigError("--peer-certificates: got some beside --no-tls, which takes none.")
    files = None if certificates is None else TlsFiles(*certificates)
    return [
        Peers(address, token_file=token_file, tls=files if tls else False) for address in addresses
    ]


_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}

Folder = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="Folder for data, packs or a cache, to check too."),
]


def doctor(
    folder: Folder = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="A dataset's URL: does its store answer, accept the credentials, list and serve "
            "ranges; how long a request takes."
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

    With DIR also its disk, and a cache's limit, owner, leftovers and jobs; with --url a store; with
    --peer the way to other nodes of a job.
    Each line says ok, warn or fail, and what to do. Leaves with 1 if a check fails.
    """
    from penstock.pipeline.cli.doctor_facts import gather

    if folder is not None and ":/" in str(folder):
        raise ConfigError(
            f"doctor: got {str(folder)!r}, wanted a local folder. A dataset's URL goes to --url."
        )
    nodes = nodes_of(
        [*(peer or ()), *filter(None, [serve_peer])], peer_token_file, peer_certificates, tls
    )
    if serve_peer is not None:
        from penstock.pipeline.cli.doctor_peers import serve

        if peer:
            raise ConfigError(
                "--serve-peer: got --peer beside it. Ask from another shell, or node."
            )
        if url is not None or as_json or storage_option:
            raise ConfigError("--serve-peer checks nothing: got --url, -o or --json beside it.")
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
    """Judge a machine, in the order in which its faults would show."""
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
    """Brackets that rich would take for its markup stay what they are."""
    return text.replace("[", r"\[")
