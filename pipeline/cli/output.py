"""Print the result of a command on stdout: one JSON object, or lines and tables for people.

Progress bars are drawn on stderr.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import typer
from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from penstock.cache.base import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def report(values: Mapping[str, Any], shown: Iterable[str | Table], *, as_json: bool) -> None:
    """Print a result on stdout. values: of the JSON object. shown: lines with rich's markup, and
    tables; only iterated without `as_json`."""
    if as_json:
        typer.echo(json.dumps(values))
        return
    console = Console()
    for one in shown:
        console.print(one, soft_wrap=isinstance(one, str))


def table(*heads: str | Column, rows: Iterable[Iterable[str]], **options: Any) -> Table:
    """Return a table of plain texts. options: of rich's Table."""
    named = (escape(head) if isinstance(head, str) else head for head in heads)
    made = Table(*named, **{"box": None, "pad_edge": False, **options})
    for row in rows:
        made.add_row(*map(escape, row))
    return made


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


class _Rate(progress.ProgressColumn):
    def render(self, task: progress.Task) -> Text:
        speed = task.finished_speed or task.speed or 0.0
        done_bytes = task.fields["done_bytes"]
        per_s = done_bytes / task.elapsed if task.elapsed else 0.0
        return Text(f"{speed:,.0f}/s  {format_size(per_s)}/s", style="progress.data.speed")


class _Bar(progress.Progress):
    """A bar of work with a known end. columns: after the bar."""

    def __init__(self, what: str, *columns: progress.ProgressColumn) -> None:
        super().__init__(
            progress.TextColumn(f"[bold]{what}"),
            progress.BarColumn(),
            *columns,
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[detail]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar = self.add_task(what, total=None, detail="", done_bytes=0)


class SampleProgress(_Bar):
    """A bar that readers call with (done, total, done_bytes)."""

    def __init__(self, what: str) -> None:
        super().__init__(what, progress.MofNCompleteColumn(), _Rate())

    def __call__(self, done: int, total: int, done_bytes: int) -> None:
        self.update(self._bar, completed=done, total=total, done_bytes=done_bytes)


class ByteProgress(_Bar):
    """A bar that is called with (done bytes, total bytes, what they are)."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what, progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()
        )

    def __call__(self, done: int, total: int, detail: str) -> None:
        self.update(self._bar, completed=done, total=total, detail=detail)


class MeasuringBar(progress.Progress):
    """Show the current measurement. Only calls redraw it: a thread that redraws a bar would slow
    the measurement."""

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        super().__init__(
            progress.TextColumn(f"[bold]{what}[/] {{task.description}}"),
            progress.BarColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self.add_task("", total=None)

    def __call__(self, what: str, share: float | None = None, /) -> None:
        self.update(self._bar, description=what, completed=share or 0.0)
        self.tasks[0].total = None if share is None else 1.0
        self.refresh()
