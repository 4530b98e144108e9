"""Draw accelerator utilisation against the number of nodes, for the first and the later epochs.

Vertical lines show the numbers of nodes that the store can feed. It needs the extra `plot`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError
from penstock.pipeline.bench import check_plot, figure_type
from penstock.pipeline.plan.sizing import Forecast, forecast

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.plan.sizing import ClusterSetup

NODES = tuple(2**power for power in range(11))
_FIRST, _LATER, _LINE, _INK = "#c8553d", "#0b6e99", "#8a959d", "#22303a"


def sweep(setup: ClusterSetup) -> list[Forecast]:
    """Forecast the job on 1 to 1,024 nodes with a constant batch per GPU, as long as an epoch has
    at least two steps (AU excludes the first one)."""
    job = setup.job
    found = []
    for nodes in NODES:
        batch = max(nodes * job.gpus, job.global_batch * nodes // job.nodes)
        if 2 * batch > setup.data.samples:
            break
        found.append(forecast(replace(setup, job=replace(job, nodes=nodes, global_batch=batch))))
    return found


def plot_plan(setup: ClusterSetup, path: Path, *, title: str) -> None:
    """Write the picture. Raises ConfigError for a path that isn't writable, and
    MissingDependencyError without matplotlib."""
    check_plot(path)
    draw_plan(setup, title=title).savefig(path, dpi=150)


def draw_plan(setup: ClusterSetup, *, title: str) -> Any:
    """Draw `sweep` as a matplotlib figure."""
    found = sweep(setup)
    if not found:
        raise ConfigError(
            f"--plot: got {setup.data.samples:,} samples, less than two global batches of one node."
        )
    nodes = [one.setup.job.nodes for one in found]
    figure = figure_type()(figsize=(9.0, 5.2), layout="constrained")
    axes = figure.subplots()
    # A wide line below a narrow one stays visible if both are equal.
    axes.plot(
        nodes, [one.later.au for one in found], color=_LATER, lw=4, marker="o", ms=7, alpha=0.9
    )
    axes.plot(nodes, [one.first.au for one in found], color=_FIRST, lw=1.8, marker="s", ms=5)
    _remote_lines(axes, setup, found)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [f"{count:,}" for count in nodes])
    axes.set_xlim(nodes[0] / 1.25, max(nodes[-1], 2) * 1.9)
    axes.set_ylim(0, 114)
    _name_ends(axes, found[-1])
    axes.set_xlabel(f"nodes of {setup.job.gpus} GPUs", fontsize=9, color=_INK)
    axes.set_ylabel("accelerator utilisation (AU), %", fontsize=9, color=_INK)
    axes.grid(axis="y", color="#e3e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=_INK, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=10, color=_INK, x=0.01, ha="left")
    return figure


def _name_ends(axes: Any, last: Forecast) -> None:
    """Label each line with its name and its limit at its end; move labels apart if both end
    alike."""
    near = abs(last.later.au - last.first.au) < 12
    ends = (("later epochs", last.later, _LATER, 14), ("first epoch", last.first, _FIRST, -14))
    for name, epoch, colour, apart in ends:
        up = apart if near else 0
        axes.annotate(
            f"{name},\nlimit: {epoch.limit}",
            (last.setup.job.nodes, max(epoch.au, 5 if up >= 0 else 9)),
            xytext=(10, up),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
        )


def _remote_lines(axes: Any, setup: ClusterSetup, found: list[Forecast]) -> None:
    """Mark the numbers of nodes that the store's bandwidth feeds: in an epoch that fetches all
    bytes, and in one that fetches only those that the caches don't keep."""
    store = setup.store
    if store is None:
        return
    most = store.bytes_per_s / found[0].bytes_per_s
    lines = [("with all of their bytes", most, ":")]
    partly = next((one for one in found if one.setup.job.nodes >= setup.job.nodes), found[-1])
    if 0 < partly.kept < 1:
        share = (
            f"with the {1 - partly.kept:.0%} that {partly.setup.job.nodes} nodes' caches don't keep"
        )
        lines.append((share, most / (1 - partly.kept), "--"))
    for name, count, style in lines:
        if not NODES[0] <= count <= NODES[-1]:
            continue
        is_left = style == ":" and count > NODES[3]  # away from the other line
        axes.axvline(count, color=_LINE, lw=1.2, ls=style)
        axes.annotate(
            f"the store feeds {count:,.3g} nodes\n{name}",
            (count, 108.5 if style == ":" else 88),
            xytext=(-4 if is_left else 4, 0),
            textcoords="offset points",
            fontsize=8,
            color=_LINE,
            ha="right" if is_left else "left",
            va="center",
        )
