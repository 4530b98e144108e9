"""Run `penstock doctor`: check that this machine is ready to train, and name remedies.

The checks are rows of tables (`doctor_machine`, `doctor_network`), which `doctor_table` judges.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from penstock.cache import ConfigError
from penstock.cache.base import Peers
from penstock.pipeline.cli.command_options import Json, StorageOption, parse_storage_options
from penstock.pipeline.cli.commands import command
from penstock.pipeline.cli.output import report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.cli.doctor_table import Finding


def nodes_of(addresses: list[str], token_file: Path | None, tls: bool) -> list[Peers]:
    """Return the peer settings for some addresses. Raises ConfigError."""
    if not addresses:
        if token_file is not None or not tls:
            raise ConfigError(
                "--peer-token-file and --no-tls need --peer HOST:PORT or --serve-peer HOST:PORT, "
                "but got neither."
            )
        return []
    encrypts = None if tls else False
    return [Peers(address, token_file=token_file, tls=encrypts) for address in addresses]


_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@command(
    "doctor",
    "penstock doctor cached",
    "penstock doctor --peer 10.0.0.8:7077 --peer-token-file token",
    "penstock doctor --url s3://bucket/photos -o region=eu-central-1",
)
def doctor(
    folder: Annotated[Path | None, Argument(metavar="[DIR]")] = None,
    url: str | None = None,
    storage_option: StorageOption = None,
    peer: Annotated[list[str] | None, Option(metavar="HOST:PORT")] = None,
    serve_peer: Annotated[str | None, Option(metavar="HOST:PORT")] = None,
    peer_token_file: Path | None = None,
    tls: bool = True,
    as_json: Json = False,
) -> None:
    """Check this machine: Python, torch, DALI, Zarr, GPU, cores, threads, memory, limits, launcher.

    With DIR, also check its disk, and a cache's limit, owner, leftovers and jobs; with --url, a
    store; with --peer, the connection to other nodes. Each line shows ok, warn or fail, and a
    remedy. The exit code is 1 if a check fails.

    folder: Also check this folder for data, packs or a cache.
    url: Check the store of a dataset's URL: answers, credentials, listing, ranges, time of a
        request.
    peer: Check the server of another node: reachable, same protocol, same secret, speed.
        Repeatable.
    serve_peer: Serve at this node's own address for ten minutes, so that other nodes can use --peer
        before a job runs; with DIR, serve that cache.
    peer_token_file: With --peer or --serve-peer: file with the nodes' shared secret; by default
        PENSTOCK_PEER_TOKEN.
    tls: With --peer or --serve-peer: --no-tls turns encryption off on a private network.
    """
    if folder is not None and ":/" in str(folder):
        raise ConfigError(
            f"doctor: got {str(folder)!r}, wanted a local folder. Pass a dataset's URL as --url."
        )
    nodes = nodes_of([*(peer or ()), *filter(None, [serve_peer])], peer_token_file, tls)
    if serve_peer is not None:
        from penstock.pipeline.cli.doctor_network import serve

        if peer or url is not None or as_json or storage_option:
            raise ConfigError(
                "--serve-peer: can't be used together with --peer, --url, -o or --json, because it "
                "checks nothing. Run --peer in another shell or on another node."
            )
        serve(nodes[0], folder)
        return
    found = list(_findings(folder, nodes, url, parse_storage_options(storage_option) or {}))
    failed = any(finding.status == "fail" for finding in found)
    values = {"ok": not failed, "checks": [each._asdict() for each in found]}
    report(values, [_table(found)], as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _findings(
    folder: Path | None, nodes: list[Peers], url: str | None, options: dict[str, Any]
) -> Iterator[Finding]:
    from penstock.pipeline.cli.doctor_machine import machine_findings

    yield from machine_findings(folder)
    if nodes or url is not None:
        from penstock.pipeline.cli import doctor_network

        for facts in doctor_network.peer_facts(nodes):
            yield from doctor_network.peer_findings(facts)
        if url is not None:
            store = doctor_network.STORE
            yield from store.findings(store.gather(asked=url, options=options))


def _table(found: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("name", "status", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for finding in found:
        style = _STYLE[finding.status]
        table.add_row(finding.name, f"[{style}]{finding.status}[/]", escape(finding.found))
        if finding.remedy:
            table.add_row("", "", f"[{style}]→[/] {escape(finding.remedy)}")
    return table
