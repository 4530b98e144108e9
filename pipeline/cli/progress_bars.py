"""Draw the progress bars of commands on stderr, so that stdout stays clean."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from penstock.cache.base import format_size


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed or 0.0
        done_bytes = task.fields["done_bytes"]
        per_s = done_bytes / task.elapsed if task.elapsed else 0.0
        return Text(f"{speed:,.0f}/s  {format_size(per_s)}/s", style="progress.data.speed")


class _Bar(Progress):
    """A bar of work with a known end. columns: after the bar."""

    def __init__(self, what: str, *columns: ProgressColumn) -> None:
        super().__init__(
            TextColumn(f"[bold]{what}"),
            BarColumn(),
            *columns,
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar = self.add_task(what, total=None, detail="", done_bytes=0)


class SampleProgress(_Bar):
    """A bar that readers call with (done, total, done_bytes)."""

    def __init__(self, what: str) -> None:
        super().__init__(what, MofNCompleteColumn(), _Rate())

    def __call__(self, done: int, total: int, done_bytes: int) -> None:
        self.update(self._bar, completed=done, total=total, done_bytes=done_bytes)


class ByteProgress(_Bar):
    """A bar that is called with (done bytes, total bytes, what they are)."""

    def __init__(self, what: str) -> None:
        super().__init__(what, DownloadColumn(binary_units=True), TransferSpeedColumn())

    def __call__(self, done: int, total: int, detail: str) -> None:
        self.update(self._bar, completed=done, total=total, detail=detail)


class MeasuringBar(Progress):
    """Show the current measurement. Only calls redraw it: a thread that redraws a bar would slow
    the measurement."""

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn(f"[bold]{what}[/] {{task.description}}"),
            BarColumn(),
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
