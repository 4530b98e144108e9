"""Draw a comparison: images/s and CPU-seconds per 1,000 images, with one bar per loader."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from benchmarks.page import ordered
from benchmarks.pictures import FAINT, INK, OURS, PAPER
from penstock.pipeline.bench.adapters import TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OTHER = "#b7c4cd"
_ROW_INCHES = 0.42
_ROOM_INCHES = 2.05  # for the heading, the axes' names and the notes
_PANELS = (
    ("images_per_s", "images a second: longer is better", "{:,.0f}"),
    ("cpu_s_per_1000", "CPU-seconds for 1,000 images: shorter is better", "{:.2f}"),
)


def draw(result: Path, *pictures: Path) -> None:
    """Draw a result of `benchmarks.compare` in the formats of the file names (.png, .svg).

    The first loader comes first, the others by images/s. Bars are medians of the rounds; thin lines
    span the lowest and the highest round.
    """
    from matplotlib.figure import Figure

    report = json.loads(result.read_text())
    names = ordered(report["summary"])
    height = _ROOM_INCHES + _ROW_INCHES * len(names)
    figure = Figure(figsize=(11.0, height), dpi=120, facecolor=PAPER)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (what, label, form) in zip(axes, _PANELS, strict=True):
        _draw_panel(axis, [report["summary"][name][what] for name in names], form)
        axis.set_xlabel(label, fontsize=10, color=INK)
    axes[0].set_yticks(range(len(names)), [TITLES[name] for name in names], fontsize=10)
    axes[0].set_ylim(len(names) - 0.45, -0.55)
    for label, name in zip(axes[0].get_yticklabels(), names, strict=True):
        label.set_weight("bold" if name == names[0] else "normal")
    heading, details = words(report)
    figure.text(0.012, 1 - 0.12 / height, heading, fontsize=13, color=INK, va="top", weight="bold")
    figure.text(0.012, 1 - 0.42 / height, details, fontsize=9, color=FAINT, va="top")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.86 / height), w_pad=2.0)
    _save(figure, pictures)


def draw_summary(result: Path, *pictures: Path) -> None:
    """Draw images/s alone, small enough to stand beside text: one thin bar per loader.

    Penstock is shown once, as measured first.
    """
    from matplotlib.figure import Figure

    report = json.loads(result.read_text())
    names = [n for n in ordered(report["summary"]) if n != "penstock-folder"]
    figure = Figure(figsize=(7.0, 0.75 + 0.24 * len(names)), dpi=120, facecolor=PAPER)
    axis = figure.subplots()
    _draw_panel(axis, [report["summary"][name]["images_per_s"] for name in names], "{:,.0f}")
    titles = ["Penstock", *(TITLES[name] for name in names[1:])]
    axis.set_yticks(range(len(names)), titles, fontsize=9)
    axis.get_yticklabels()[0].set_fontweight("bold")
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    cores = report["machine"]["cores"]
    size = report["work"]["size"]
    axis.set_title(
        f"Images per second on {cores} cores: decode, crop to {size} pixels, flip, normalise",
        fontsize=9.5,
        color=INK,
        loc="left",
        x=-0.32,
    )
    figure.tight_layout(pad=0.4)
    _save(figure, pictures)


def _save(figure: Figure, pictures: Sequence[Path]) -> None:
    from matplotlib import rc_context

    for picture in pictures:
        # Without the date, and with ids that aren't random, the same result draws the same bytes.
        metadata = {"Date": None} if picture.suffix == ".svg" else None
        with rc_context({"svg.hashsalt": "penstock"}):
            figure.savefig(picture, metadata=metadata)


def words(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return the heading, and a line on the data and the machine."""
    here, data, work = report["machine"], report["dataset"], report["work"]
    short = f", short side {data['short_side']}" if data.get("short_side") else ""
    details = (
        f"{report['date'][:10]} on {here['cores']} cores, {here['processor']}. {data['images']:,} "
        f"JPEGs of {data['mean_bytes'] / 1000:.0f} kB{short}: decode, random crop to "
        f"{work['size']} x {work['size']}, flip, normalise; batch {work['batch_size']}, "
        f"{work['workers']} workers. Medians of {report['rounds_played']} interleaved rounds; thin "
        "lines: lowest to highest."
    )
    return "The same images, the same work", "\n".join(textwrap.wrap(details, 150))


def _draw_panel(axis: Axes, figures: list[Mapping[str, float]], form: str) -> None:
    reach = max(figure["high"] for figure in figures)
    colours = [OURS, *[_OTHER] * (len(figures) - 1)]
    axis.barh(range(len(figures)), [f["median"] for f in figures], height=0.6, color=colours)
    for row, figure in enumerate(figures):
        axis.plot([figure["low"], figure["high"]], [row, row], color=INK, linewidth=1)
        axis.text(
            figure["high"] + 0.015 * reach,
            row,
            form.format(figure["median"]),
            va="center",
            fontsize=9,
            color=INK,
        )
    axis.set_xlim(0, 1.13 * reach)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.tick_params(colors=INK, length=0, labelsize=9)
