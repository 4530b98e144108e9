"""`penstock doctor`: is this machine fit to train, and what to do where it isn't.

The judgements are pure functions of `machine.MachineFacts`, so that tests can invent machines.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.cache.errors import ConfigError
from penstock.pipeline.cli.doctor_cache import cache_checks
from penstock.pipeline.cli.doctor_folder import folder_checks
from penstock.pipeline.cli.doctor_limits import limit_checks
from penstock.pipeline.cli.doctor_options import (
    AskedPeers,
    NodesCertificates,
    NodesTls,
    NodesTokenFile,
    ServedPeer,
    nodes_of,
)
from penstock.pipeline.cli.doctor_packages import package_checks
from penstock.pipeline.cli.doctor_software import python_check, software_checks
from penstock.pipeline.cli.options import StorageOption, parse_storage_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.cli.check import Check
    from penstock.pipeline.cli.machine import MachineFacts

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
    from penstock.pipeline.cli.machine import gather

    if folder is not None and ":/" in str(folder):
        raise ConfigError(
            f"doctor: got {str(folder)!r}, wanted a local folder. A dataset's URL goes to --url."
        )
    nodes = nodes_of(
        [*(peer or ()), *filter(None, [serve_peer])], peer_token_file, peer_certificates, tls
    )
    if serve_peer is not None:
        from penstock.pipeline.cli.doctor_serve import serve

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
        from penstock.pipeline.cli.doctor_peer import peer_checks, peer_facts

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
