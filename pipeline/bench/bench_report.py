"""Report the result of a bench as tables for people, as JSON values and as a picture.

docs/reference/bench.md explains the fields of `penstock bench --json`. The report names the machine
and the versions that the figures were measured on. The picture needs the extra `plot`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from penstock.cache import ConfigError, MissingDependencyError
from penstock.cache.base import format_size, machine_memory_bytes, usable_cores
from penstock.pipeline.bench.measurement import BUSY_NOISE, BenchResult
from penstock.pipeline.report import Rate, ceiling_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from penstock.pipeline.bench.loader_comparison import LoaderComparison
    from penstock.pipeline.bench.measured_run import RunFigures


_DALI = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")


def machine() -> dict[str, Any]:
    """Return the machine of the figures: usable cores, processor, memory, kernel."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return {
        "cores": usable_cores(),
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "memory_gib": round(machine_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of Python and of the relevant packages that are installed, including
    those named in `distributions`."""
    found = {"python": platform.python_version()}
    for name in ("penstock", "torch", *_DALI, "pillow", "numpy", *distributions):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["dali" if name in _DALI else name] = importlib.metadata.version(name)
    return found


OURS = "penstock"
# Decode threads that never wait use their cores fully, except for the kernel's share.
_FREE_CORES = 0.75
_STAGE_TITLES = {"augment": "decode + augment", "python": "Python's part"}


def stage_rows(result: BenchResult) -> list[tuple[str, Rate, str]]:
    """Return title and rate of the stages that were measured alone, and of the limiting one what
    the judged run reached."""
    limit, share = ceiling_of(result.diagnosis.limit, result.ceilings), result.diagnosis.of_ceiling
    rows = []
    for name, rate in result.ceilings.stages().items():
        note = ""
        if limit is not None and name == limit[0] and share is not None:
            note = f"the limit: reached {share:.0%}" if share <= 1 else "the limit"
        rows.append((_STAGE_TITLES.get(name, name), rate, note))
    return rows


def as_json(result: BenchResult) -> dict[str, Any]:
    """Return all measurements as JSON values; docs/reference/bench.md explains each field."""
    workload, found, loaders = result.workload, result.diagnosis, result.loaders
    raw, main, search = result.raw.figures, result.main_run.figures, result.search
    of_raw = ("samples_per_s", "bytes_per_s", "cpu_s_per_1000", "first_batch_s", "samples")
    of_main = ("wait_p50_s", "wait_p99_s", "wait_share")
    of_found = ("verdict", "limit", "cause", "of_ceiling", "advice", "assumes", "basis")
    has_step = result.stepped is not None
    tried = [
        {**asdict(setup), "samples_per_s": statistics.median(runs), "runs": runs}
        for setup, runs in (search.runs.items() if search is not None else ())
    ]
    return {
        **{name: getattr(raw, name) for name in of_raw},
        **{name: getattr(main, name) for name in of_main},
        **{name: getattr(found, name) for name in of_found},
        **asdict(result.setup),
        "cores_used": raw.cpu_s / raw.seconds,
        "au": main.au if has_step else None,
        "floor_au": result.floor_au,
        "fed_step_ms": fed_step_ms(result),
        "stepped_samples_per_s": main.samples_per_s if has_step else None,
        "bytes_by_tier": dict(raw.bytes_by_tier),
        "stepped_bytes_by_tier": dict(main.bytes_by_tier) if has_step else None,
        "predicted": found.predicted_samples_per_s,
        "ceilings": {name: asdict(rate) for name, rate in result.ceilings.stages().items()},
        "against": {name: asdict(figures) for name, figures in loaders.results.items()},
        "against_ours": None if loaders.ours is None else asdict(loaders.ours),
        "skipped": dict(loaders.skipped),
        "failed": None if result.loaders_error is None else str(result.loaders_error),
        "url": workload.place,
        "augment": workload.recipe.name,
        "device": workload.device,
        "step_ms": 1000 * workload.step_s if workload.step_s else None,
        "accelerator": workload.accelerator or None,
        "seconds": workload.seconds,
        "dataset": asdict(result.dataset),
        "python": None if workload.recipe.reads_only else workload.line(result.setup),
        "tried": None if search is None else tried,
        "noise": None if search is None else search.noise,
        "date": result.date.isoformat(),
        "machine": machine(),
        "versions": versions(),
    }


def fed_step_ms(result: BenchResult) -> float:
    """Return the shortest training step of a batch, in milliseconds, that never waits for data at
    this rate."""
    rate = result.raw.figures.samples_per_s
    return 1000 * result.setup.batch_size / rate if rate else 0.0


def show_result(result: BenchResult, console: Console) -> None:
    """Print a result for people."""
    if result.search is not None:
        console.print(_title("Settings tried"), _search_table(result), sep="\n", end="\n\n")
    console.print(_head(result), soft_wrap=True)
    console.print(_figures(result))
    if stages := stage_rows(result):
        console.print(_title("Each stage on its own"), _stages(stages), sep="\n")
    _show_loaders(result.loaders, console)
    found = result.diagnosis
    before, advice, after = found.verdict.partition(found.advice or "\0")
    console.print(Text(f"\n{before.strip()}", style="bold"), soft_wrap=True)
    for line in (f"{advice}{after}", *_hints(result)):
        if line:
            console.print(Text(line), soft_wrap=True)
    workload = result.workload
    if not workload.recipe.reads_only:  # no user's loader only reads
        code = f"{workload.imports}\nloader = {workload.line(result.setup)}"
        console.print(_title("The same in Python"), Text(code), sep="\n", soft_wrap=True)


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="dim")


def _table(*names: str) -> Table:
    """Return a table with a column of words, columns of figures, and unnamed columns of words."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number and name else "left")
    return table


def _head(result: BenchResult) -> Text:
    workload, setup, dataset = result.workload, result.setup, result.dataset
    where = workload.device
    if not result.raw.facts.decodes:
        where = "nothing to decode"
    elif where == "cpu":
        where = f"{setup.num_workers} decode thread{'s' * (setup.num_workers != 1)} on the CPU"
    what = "read only" if workload.recipe.reads_only else workload.recipe.name
    return Text.assemble(
        (workload.place, "bold"),
        f"\n{dataset.samples:,} samples, {format_size(dataset.bytes)}, {dataset.kind}; {what}, "
        f"batches of {setup.batch_size}, {where}\n",
    )


def _figures(result: BenchResult) -> Table:
    raw, main, workload = result.raw.figures, result.main_run.figures, result.workload
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(style="bold", justify="right")
    table.add_column()
    table.add_row("samples", f"{raw.samples_per_s:,.0f}/s", _megabytes(raw))
    table.add_row("CPU", f"{raw.cpu_s_per_1000:.2f} s", "per 1,000 samples")
    table.add_row("first batch", f"{raw.first_batch_s:.2f} s", "imports not counted")
    wait = f"{1000 * main.wait_p50_s:,.1f} ms"
    p99 = f"p50; p99 {1000 * main.wait_p99_s:,.1f} ms, over {main.batches:,} batches"
    if result.stepped is None:
        table.add_row("a batch every", wait, p99)
        table.add_row("read", *_tiers(raw))
        return table
    table.add_row("with the step", f"{main.samples_per_s:,.0f}/s", _megabytes(main))
    table.add_row("waits for a batch", wait, p99)
    step = f"{1000 * workload.step_s:,.4g} ms a step of {result.setup.batch_size}"
    step += f", {workload.accelerator}" if workload.accelerator else ""
    floor = f"a loader without any cost would reach {result.floor_au:.2f} %"
    table.add_row("accelerator used", f"{main.au:.2f} %", f"{step}; {floor}")
    table.add_row("read, with the step", *_tiers(main))
    table.add_row("read, without", *_tiers(raw))
    return table


def _megabytes(figures: RunFigures) -> str:
    """Return the rate of encoded bytes; "" if they aren't counted, as for numbers of tables."""
    return f"{figures.bytes_per_s / 1e6:,.1f} MB/s" if any(figures.bytes_by_tier.values()) else ""


def _tiers(figures: RunFigures) -> tuple[str, str]:
    """Return the bytes that were read, in total and by tier."""
    found = figures.bytes_by_tier.items()
    # "disk" is renamed, because the bytes may have come from the page cache.
    tiers = {"local files" if tier == "disk" else tier: size for tier, size in found if size}
    if not tiers:
        return "-", "not counted here"
    if len(tiers) == 1:
        return format_size(sum(tiers.values())), f"from {next(iter(tiers))}"
    parts = (f"{format_size(size)} from {name}" for name, size in tiers.items())
    return format_size(sum(tiers.values())), ", ".join(parts)


def _stages(rows: Sequence[tuple[str, Rate, str]]) -> Table:
    table = _table("stage", "samples/s", "MB/s", "CPU s/1,000", "")
    for title, rate, note in rows:
        size = f"{rate.bytes_per_s / 1e6:,.1f}" if rate.bytes_per_s else "-"
        figures = f"{rate.samples_per_s:,.0f}", size, f"{rate.cpu_s_per_1000:.2f}"
        table.add_row(title, *figures, note, style="bold" if note else "")
    return table


def _show_loaders(loaders: LoaderComparison, console: Console) -> None:
    table = _table("loader", "samples/s", "CPU s/1,000", "Penstock is")
    rows = {OURS: loaders.ours} if loaders.ours is not None else {}
    for name, each in (rows | dict(loaders.results)).items():
        ratio = "" if name == OURS else f"{each.ratio:.2f} x as fast"
        table.add_row(name, f"{each.samples_per_s:,.0f}", f"{each.cpu_s_per_1000:.2f}", ratio)
    if loaders.results:
        title = _title("Other loaders, in turns")
        console.print(title, table, loaders.note, sep="\n", soft_wrap=True)
    for name, how in loaders.skipped.items():
        line = f"{name} was left out because it isn't installed. {how}"
        console.print(Text(line), style="yellow", soft_wrap=True)


def _search_table(result: BenchResult) -> Table:
    assert result.search is not None
    settings = ("num_workers", "prefetch_factor", "batch_size", "read")
    table = _table(*settings, "samples/s", "runs", "")
    for setup, runs in result.search.runs.items():
        word, style = ("chosen", "bold") if setup == result.setup else ("", "")
        values = (str(getattr(setup, name)) for name in settings)
        table.add_row(*values, f"{statistics.median(runs):,.0f}", str(len(runs)), word, style=style)
    return table


def _hints(result: BenchResult) -> Iterator[str]:
    raw, threads = result.raw.figures, min(result.setup.num_workers, usable_cores())
    used = raw.cpu_s / raw.seconds
    # Without a step, a run that waits only for decoding keeps all decode threads busy.
    facts = result.raw.facts
    decodes = facts.wait_decode_s > 0.9 * (facts.wait_s + facts.step_s)
    if decodes and result.workload.device == "cpu" and used < _FREE_CORES * threads:
        yield (
            f"The decode threads could have used {threads} core{'s' * (threads != 1)} but got only "
            f"{used:.1f}: another program used the cores, or a CPU limit throttled the process. "
            "Measure again without them."
        )
    if result.search is not None:
        noise = f"Runs of one setting differed by {result.search.noise:.1%}"
        if result.search.noise > BUSY_NOISE:
            yield f"{noise}: the machine is busy with other work. Tune again when it is idle."
        else:
            yield f"{noise}; smaller differences don't count."
    if result.stepped is None:
        step_ms = fed_step_ms(result)
        shown = f"{step_ms:,.0f}" if step_ms >= 10 else f"{step_ms:.2g}"
        yield (
            f"An accelerator whose step over {result.setup.batch_size} samples takes {shown} ms or "
            "more never waits at this rate; --step-ms or --accelerator measures its utilisation."
        )
    if result.search is None:
        yield "The run used the loader's default settings; --tune searches for faster ones."


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
    """Write the picture to a path that `check_plot` accepts. Raises OSError if writing fails."""
    draw(result).savefig(path, dpi=150)


def draw(result: BenchResult) -> Any:
    """Draw the result as a matplotlib figure."""
    charts = [("Samples a second: the run, and each stage on its own", bars_of(result))]
    if result.loaders.results:
        charts.append(("Samples a second, played in turns", _loaders(result)))
    heights = [_BAR_INCHES * (len(bars) + 1.6) for _, bars in charts] + [2.2]
    figure = figure_type()(figsize=(_WIDTH_INCHES, sum(heights) + 1.6), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    for place, (title, bars) in zip(axes, charts, strict=False):
        _draw_bars(place, bars, title=title)
    _draw_waits(axes[-1], result)
    workload, setup = result.workload, result.setup
    title = (
        f"{workload.place}\n{workload.recipe.name}, batches of {setup.batch_size}, "
        f"{workload.device}, {setup.num_workers} decode threads, {result.date:%Y-%m-%d}"
    )
    figure.suptitle(title, fontsize=10, color=_INK, x=0.01, ha="left")
    return figure


class _ChartBar(NamedTuple):
    """One bar of a chart, with the note behind its figure."""

    name: str
    samples_per_s: float
    colour: str
    note: str = ""


def bars_of(result: BenchResult) -> list[_ChartBar]:
    """Return the bars of the judged run and of each stage; the limiting stage is highlighted."""
    is_raw = ceiling_of(result.diagnosis.limit, result.ceilings) is None
    run = result.raw if is_raw else result.main_run
    return [
        _ChartBar("this run", run.figures.samples_per_s, _OURS),
        *(
            _ChartBar(title, rate.samples_per_s, _LIMIT if note else _OTHER, note)
            for title, rate, note in stage_rows(result)
        ),
    ]


def _loaders(result: BenchResult) -> list[_ChartBar]:
    ours = result.loaders.ours
    bars = [_ChartBar(OURS, ours.samples_per_s, _OURS)] if ours is not None else []
    for name, figures in result.loaders.results.items():
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
    labels = [
        f"{bar.samples_per_s:,.0f}{' (beyond the axis)' if bar.samples_per_s > most else ''}"
        f"{', ' if bar.note else ''}{bar.note}"
        for bar in bars
    ]
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
    shown = np.maximum.reduceat(waits_ms, np.arange(0, len(waits_ms), every))
    axes.plot(every * np.arange(len(shown)), shown, color=_OURS, linewidth=1, marker=".", ms=4)
    figures = run.figures
    lines = [("p50", figures.wait_p50_s, _INK, ":"), ("p99", figures.wait_p99_s, _LIMIT, "--")]
    if result.stepped is not None:
        lines.append(("step", figures.step_s, _INK, "-"))
    for name, value_s, colour, style in lines:
        label = f"{name} {1000 * value_s:,.1f} ms"
        axes.axhline(1000 * value_s, color=colour, linewidth=1, linestyle=style, label=label)
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(lines)}
    axes.legend(**place, frameon=False, fontsize=8)
    axes.set_ylim(0, max(1.15 * max(waits_ms.max(), *(1000 * line[1] for line in lines)), 1e-3))
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
