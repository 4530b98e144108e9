"""Draw the progress bars of commands on stderr, so that stdout stays clean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

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

if TYPE_CHECKING:
    from types import TracebackType


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed or 0.0
        done_bytes = task.fields["done_bytes"]
        per_s = done_bytes / task.elapsed if task.elapsed else 0.0
        return Text(f"{speed:,.0f}/s  {format_size(per_s)}/s", style="progress.data.speed")


class _ProgressBar:
    """A bar on stderr that is shown while the context is open."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


class SampleProgress(_ProgressBar):
    """A context manager, and the callable that readers report to: (done, total, done_bytes)."""

    def __init__(self, what: str) -> None:
        super().__init__(
            Progress(
                TextColumn(f"[bold]{what}"),
                BarColumn(),
                MofNCompleteColumn(),
                _Rate(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
        )
        self._task = self._progress.add_task(what, total=None, done_bytes=0)

    def __call__(self, done: int, total: int, done_bytes: int) -> None:
        self._progress.update(self._task, completed=done, total=total, done_bytes=done_bytes)


class ByteProgress(_ProgressBar):
    """A context manager, and a callable: (done bytes, total bytes, what they are)."""

    def __init__(self, what: str) -> None:
        super().__init__(
            Progress(
                TextColumn(f"[bold]{what}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[detail]}"),
                console=Console(stderr=True),
                transient=True,
            )
        )
        self._task = self._progress.add_task(what, total=None, detail="")

    def __call__(self, done: int, total: int, detail: str) -> None:
        self._progress.update(self._task, completed=done, total=total, detail=detail)


class MeasuringBar(_ProgressBar):
    """Show the current measurement. Only calls redraw it: a thread that redraws a bar would slow
    the measurement."""

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        super().__init__(
            Progress(
                TextColumn(f"[bold]{what}[/] {{task.description}}"),
                BarColumn(),
                console=console,
                auto_refresh=False,
                transient=True,
                disable=not console.is_terminal,
            )
        )
        self._task = self._progress.add_task("", total=None)

    def __call__(self, what: str, share: float | None = None, /) -> None:
        self._progress.update(self._task, description=what, completed=share or 0.0)
        self._progress.tasks[0].total = None if share is None else 1.0
        self._progress.refresh()
