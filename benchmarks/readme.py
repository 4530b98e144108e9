"""The README's tables of throughput: made from a result, put between two markers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError
from penstock.pipeline.bench.adapters import ADAPTERS, TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COMMAND = "python -m benchmarks.compare"
_HEAD = (
    "loader",
    "images/s",
    "CPU-s per 1,000 images",
    "first batch",
    "waits beside a training step",
    "Penstock to it: images/s, CPU",
)


def markers(case: str) -> tuple[str, str]:
    """The lines between which a case's table stands."""
    return f"<!-- {case}: `{COMMAND}` writes this -->", f"<!-- {case}: end -->"


def rewrite(readme: Path, case: str, text: str) -> None:
    """Replace what stands between the case's markers by `text`; all else stays as it is.

    Raises ConfigError if the markers aren't there once each, in order.
    """
    begin, end = markers(case)
    old = readme.read_text()
    before, found, rest = old.partition(begin)
    inside, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in before + after:
        raise ConfigError(
            f"{readme}: wanted the two lines {begin!r} and {end!r}, once each and in this order, "
            "and they aren't there so. Put them where the table shall stand."
        )
    del inside
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def table(result: Path) -> str:
    """Markdown: what was measured on what, the table, how to read it, the chart.

    result: what `benchmarks.compare` wrote.
    """
    told = json.loads(result.read_text())
    rows = [_row(name, told["summary"][name], told) for name in ordered(told["summary"])]
    head = [" | ".join(("", *_HEAD, "")).strip(), "|---" + "|---:" * (len(_HEAD) - 1) + "|"]
    chart = f"![Images a second and CPU-seconds](benchmarks/results/{result.stem}.png)"
    parts = [about(told, result), "\n".join([*head, *rows]), notes(told), chart]
    return "\n" + "\n\n".join(parts) + "\n"


def ordered(summary: Mapping[str, Any]) -> list[str]:
    """The first one, then the others, the fastest first."""
    first, *others = summary
    return [first, *sorted(others, key=lambda name: -summary[name]["images_per_s"]["median"])]


def about(told: Mapping[str, Any], result: Path) -> str:
    """Date, machine, data, work, versions."""
    here, data, work = told["machine"], told["dataset"], told["work"]
    images = f"{data['images']:,} JPEGs of {data['mean_bytes'] / 1000:.0f} kB"
    if data.get("short_side"):
        images += f" with a short side of {data['short_side']} pixels"
    if data.get("origin"):
        images += f" ({data['origin']})"
    listed = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    return (
        f"{told['date'][:10]}, {here['cores']} cores of {here['processor']}, {here['system']}: "
        f"{images}, random resized crop to {work['size']} x {work['size']}, flip, normalise, batch "
        f"{work['batch_size']}, {work['workers']} workers; medians of {told['rounds_played']} "
        "interleaved rounds, lowest and highest round in brackets "
        f"([all figures](benchmarks/results/{result.name})). {listed}."
    )


def notes(told: Mapping[str, Any]) -> str:
    """How to read the table: who decodes how, who reads what, who isn't in it."""
    names = list(told["summary"])
    own = [f"{TITLES[n]} ({ADAPTERS[n].reads})" for n in names if ADAPTERS[n].converts]
    lent = [TITLES[n] for n in names if ADAPTERS[n].decodes == "ours"]
    lines = ["Ratios are medians of pairs inside a round; above 1 Penstock is better."]
    if told["round"]["stepped"]:
        lines.append(
            f"The training step ({told['round']['step_ms']:.0f} ms a batch) is emulated: it leaves "
            "the cores alone, as a GPU's would."
        )
    if own:
        lines.append(f"Converted beforehand, not timed: {', '.join(own)}. Others read the files.")
    if lent:
        lines.append(f"{', '.join(lent)} decode with {told['decoder_of_the_rest']}.")
    if missing := told["not_installed"]:
        lines.append(f"Not installed, so not measured: {', '.join(TITLES[n] for n in missing)}.")
    return " ".join(lines)


def _row(name: str, summary: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    ours = name == next(iter(told["summary"]))
    title = f"**{TITLES[name]}**" if ours else TITLES[name]
    ratios = (
        ""
        if ours
        else f"{summary['speed_ratio']['median']:.2f}, {summary['cpu_ratio']['median']:.2f}"
    )
    waits = f"{summary['wait_share']['median']:.1%}" if told["round"]["stepped"] else ""
    cells = (
        title,
        _figure(summary["images_per_s"], "{:,.0f}"),
        _figure(summary["cpu_s_per_1000"], "{:.2f}"),
        f"{summary['first_batch_s']['median']:.2f} s",
        waits.replace("%", " %"),
        ratios,
    )
    return f"| {' | '.join(cells)} |"


def _figure(figure: Mapping[str, float], form: str) -> str:
    low, high = form.format(figure["low"]), form.format(figure["high"])
    return f"{form.format(figure['median'])} ({low} to {high})"
