"""Draw the result of a bench: the run and the ceilings of its stages, its waits, other loaders.

It needs the extra `plot`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, MissingDependencyError
from penstock.pipeline.bench.bench_report import OURS, loader_figures, stage_rows

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.bench.measurement import BenchResult

ENDINGS = (".png", ".svg", ".pdf")
_OURS, _LIMIT, _OTHER, _INK = "#0b6e99", "#c8553d", "#b8c4cc", "#22303a"
_BAR_INCHES, _WIDTH_INCHES = 0.34, 9.0
_MOST_POINTS = 2000
_MOST_BEYOND = 3.5
_LABEL_ROOM = 1.4  # of the longest bar, for its figure behind it


def check_plot(path: Path) -> None:
    """Check before the measurements that a picture can be written at a path.

    Raises ConfigError for a missing or read-only folder and for an unknown suffix,
    MissingDependencyError without matplotlib.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--plot: got {path}, wanted a name that ends in {', '.join(ENDINGS)}.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"--plot: {path.parent} isn't an existing folder. Create it, or pass another path."
        )
    if not os.access(path if path.is_file() else path.parent, os.W_OK):
        raise ConfigError(f"--plot: {path} isn't writable. Pass a path that you may write.")
    if path.is_dir():
        raise ConfigError(f"--plot: {path} is a folder. Pass the path of a file in it.")
    figure_type()


def plot(result: BenchResult, path: Path) -> None:
    """Write the picture. Raises what `check_plot` raises, and OSError if writing fails."""
    check_plot(path)
    figure = draw(result)
    figure.savefig(path, dpi=150)


def draw(result: BenchResult) -> Any:
    """Draw the result as a matplotlib figure."""
    charts = [("Samples a second: the run, and each stage on its own", bars_of(result))]
    if loader_figures(result):
        charts.append(("Samples a second, played in turns", _loaders(result)))
    heights = [_BAR_INCHES * (len(bars) + 1.6) for _, bars in charts] + [2.2]
    figure = figure_type()(figsize=(_WIDTH_INCHES, sum(heights) + 1.6), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    for place, (title, bars) in zip(axes, charts, strict=False):
        _draw_bars(place, bars, title=title)
    _draw_waits(axes[-1], result)
    workload, setup = result.workload, result.setup
    figure.suptitle(
        f"{workload.place}\n{workload.recipe.name}, batches of {setup.batch_size}, "
        f"{workload.device}, {setup.num_workers} decode threads, {result.date:%Y-%m-%d}",
        fontsize=10,
        color=_INK,
        x=0.01,
        ha="left",
    )
    return figure


@dataclass(frozen=True, slots=True)
class _ChartBar:
    """One bar of a chart, with the note behind its figure."""

    name: str
    samples_per_s: float
    colour: str
    note: str = ""


def bars_of(result: BenchResult) -> list[_ChartBar]:
    """Return the bars of the run and of each stage; the limiting stage is highlighted."""
    rows, run = stage_rows(result)
    bars = [_ChartBar("this run", run.figures.samples_per_s, _OURS)]
    for row in rows:
        colour = _LIMIT if row.note else _OTHER
        bars.append(_ChartBar(row.title, row.rate.samples_per_s, colour, row.note))
    return bars


def _loaders(result: BenchResult) -> list[_ChartBar]:
    assert result.loaders is not None
    ours = result.loaders.ours
    bars = [_ChartBar(OURS, ours.samples_per_s, _OURS)] if ours is not None else []
    for name, figures in loader_figures(result).items():
        note = f"Penstock is {figures.ratio:.2f} x as fast"
        bars.append(_ChartBar(name, figures.samples_per_s, _OTHER, note))
    return bars


def _draw_bars(axes: Any, bars: list[_ChartBar], *, title: str) -> None:
    """Draw horizontal bars with their figures. A bar far beyond the first one is cut, with a note:
    reading is often a hundred times faster than the run."""
    most = max(1.0, _MOST_BEYOND * bars[0].samples_per_s)
    lengths = [min(bar.samples_per_s, most) for bar in bars]
    colours = [bar.colour for bar in bars]
    drawn = axes.barh([bar.name for bar in bars], lengths, color=colours, height=0.68)
    labels = []
    for bar in bars:
        beyond = " (beyond the axis)" if bar.samples_per_s > most else ""
        labels.append(f"{bar.samples_per_s:,.0f}{beyond}{f', {bar.note}' if bar.note else ''}")
    axes.bar_label(drawn, labels, padding=6, fontsize=9, color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, _LABEL_ROOM * max(1.0, *lengths))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    style_axes(axes, title)


def _draw_waits(axes: Any, result: BenchResult) -> None:
    """Draw each measured step's wait over time, with its median and 99th percentile."""
    run = result.main_run
    waits_ms = 1000 * np.array(run.waits_s)
    every = max(1, len(waits_ms) // _MOST_POINTS)
    # Each group shows its longest wait, because spikes matter most.
    shown = np.array(
        [part.max() for part in np.split(waits_ms, range(every, len(waits_ms), every))]
    )
    axes.plot(every * np.arange(len(shown)), shown, color=_OURS, linewidth=1, marker=".", ms=4)
    lines = [("p50", run.figures.wait_p50_s), ("p99", run.figures.wait_p99_s)]
    if result.stepped is not None:
        lines.append(("step", run.figures.step_s))
    styles = {"p50": (_INK, ":"), "p99": (_LIMIT, "--"), "step": (_INK, "-")}
    for name, value_s in lines:
        colour, style = styles[name]
        label = f"{name} {1000 * value_s:,.1f} ms"
        axes.axhline(1000 * value_s, color=colour, linewidth=1, linestyle=style, label=label)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(lines), frameon=False, fontsize=8
    )
    axes.set_ylim(0, max(1.15 * max(waits_ms.max(), *(1000 * v for _, v in lines)), 1e-3))
    axes.set_xlabel("batch", fontsize=9, color=_INK)
    axes.grid(axis="y", color="#e3e8eb", linewidth=0.8)
    what = "after each step" if result.stepped is not None else "without a step"
    style_axes(axes, f"Wait for a batch, {what} (ms)")


def style_axes(axes: Any, title: str = "") -> None:
    """Give a chart its colours and sizes."""
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    axes.tick_params(labelsize=9, colors=_INK, length=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_OTHER)


def figure_type() -> Any:
    """Import matplotlib's Figure, without pyplot and its global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "--plot needs matplotlib, which isn't installed. Run pip install 'penstock[plot]', or "
            "leave out --plot."
        ) from None
    return Figure
