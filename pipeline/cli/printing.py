"""Print the result of a command: one JSON object, or lines and tables for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.table import Table


def report(values: Mapping[str, Any], shown: Iterable[str | Table], *, as_json: bool) -> None:
    """Print a result on stdout. values: of the JSON object. shown: lines with rich's markup, and
    tables; only iterated without `as_json`."""
    if as_json:
        typer.echo(json.dumps(values))
        return
    console = Console()
    for one in shown:
        console.print(one, soft_wrap=isinstance(one, str))
