"""The demo's two pictures: a contact sheet of an augmented batch, and the times of the loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.bench.adapters import DEVIATION, MEAN, TITLES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from penstock.pipeline.bench import Comparison

INK = "#22303c"
FAINT = "#8795a1"
PAPER = "#ffffff"
STEP = "#9fb8c8"
WAIT = "#d9603b"
OURS = "#2f7f86"


def contact_sheet(
    images: torch.Tensor, labels: Sequence[str], path: Path, *, title: str, columns: int = 8
) -> Path:
    """Draw a batch as a grid with the label under each image.

    images: float32 (n, 3, h, w), normalised by ImageNet's mean and deviation. Returns the path.
    """
    from matplotlib.figure import Figure

    pixels = displayable(images)
    rows = -(-len(pixels) // columns)
    figure = Figure(figsize=(1.35 * columns, 1.58 * rows + 0.75), dpi=110, facecolor=PAPER)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, image, label in zip(axes.flat, pixels, labels, strict=False):
        axis.imshow(image)
        axis.set_title(_short(label), y=-0.17, fontsize=9, color=INK)
    figure.suptitle(title, fontsize=12, color=INK, x=0.012, y=1 - 0.14 / rows, ha="left", va="top")
    figure.subplots_adjust(
        left=0.01, right=0.99, bottom=0.045, top=1 - 0.4 / rows, wspace=0.05, hspace=0.2
    )
    figure.savefig(path)
    return path


def displayable(images: torch.Tensor) -> NDArray[np.uint8]:
    """Undo the normalisation; return uint8 (n, h, w, 3)."""
    planes = images.detach().cpu().float().numpy()
    levels = planes * np.array(DEVIATION)[:, None, None] + np.array(MEAN)[:, None, None]
    rounded: NDArray[np.uint8] = levels.round().clip(0, 255).astype(np.uint8)
    return rounded.transpose(0, 2, 3, 1)


def where_time_went(done: Comparison, path: Path, *, batch_size: int, subtitle: str) -> Path:
    """Draw two panels over the loaders: milliseconds of a batch (wait and step), and CPU-seconds.

    Bars are medians of the rounds; thin lines span the lowest and the highest round.
    """
    from matplotlib.figure import Figure

    names = list(done.summaries)
    figure = Figure(figsize=(10.5, 1.9 + 0.62 * len(names)), dpi=120, facecolor=PAPER)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_waits(left, done, batch_size)
    _draw_cpu(right, done)
    for axis in (left, right):
        axis.set_yticks(range(len(names)))
        axis.set_ylim(len(names) - 0.45, -0.55)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color(FAINT)
        axis.tick_params(colors=INK, length=0, labelsize=9)
        axis.xaxis.label.set_color(INK)
    left.set_yticklabels([TITLES[name] for name in names], fontsize=10)
    right.set_yticklabels([])
    figure.text(
        0.012, 0.975, "Where the time went", fontsize=14, color=INK, va="top", weight="bold"
    )
    figure.text(
        0.012, 0.975 - 0.3 / figure.get_figheight(), subtitle, fontsize=9, color=FAINT, va="top"
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.55 / figure.get_figheight()), w_pad=2.5)
    figure.savefig(path)
    return path


def _draw_waits(axis: Axes, done: Comparison, batch_size: int) -> None:
    summaries = list(done.summaries.values())
    steps = [s.batch_step_ms.median for s in summaries]
    waits = [s.batch_wait_ms.median for s in summaries]
    rows = range(len(summaries))
    axis.barh(rows, steps, height=0.56, color=STEP, label="accelerator's step")
    axis.barh(rows, waits, left=steps, height=0.56, color=WAIT, label="waiting for data")
    longest = max(a + b for a, b in zip(steps, waits, strict=True))
    for row, (summary, step, wait) in enumerate(zip(summaries, steps, waits, strict=True)):
        axis.text(
            step + wait + 0.015 * longest,
            row,
            f"waits {summary.wait_share.median:.0%} of the time",
            va="center",
            fontsize=9,
            color=INK,
        )
    axis.set_xlim(0, 1.32 * longest)
    axis.set_xlabel(f"milliseconds for a batch of {batch_size}, with an accelerator")
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9)


def _draw_cpu(axis: Axes, done: Comparison) -> None:
    figures = [s.cpu_s_per_1000 for s in done.summaries.values()]
    values = [f.median for f in figures]
    axis.barh(range(len(values)), values, height=0.56, color=[OURS, *[FAINT] * (len(values) - 1)])
    reach = max(f.high for f in figures)
    for row, figure in enumerate(figures):
        axis.plot([figure.low, figure.high], [row, row], color=INK, linewidth=1)
        axis.text(
            figure.high + 0.02 * reach,
            row,
            f"{figure.median:.2f}",
            va="center",
            fontsize=9,
            color=INK,
        )
    axis.set_xlim(0, 1.15 * reach)
    axis.set_xlabel("CPU-seconds for 1,000 images")


def _short(label: str, most: int = 14) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
