"""Print the result of a command: one JSON object, or lines and tables for people."""

from __future__ import annotations

import json
import math
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


def count(number: int, noun: str) -> str:
    """Format a number with its noun: 1 rank, 2 ranks, 2 processes."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def format_time(time_s: float) -> str:
    """Format a time: 0.21 ms, 34 ms, 1.2 s."""
    if time_s >= 1:
        return f"{time_s:.1f} s"
    digits = max(0, 1 - math.floor(math.log10(max(1e-5, 1000 * time_s))))
    return f"{1000 * time_s:.{digits}f} ms"
