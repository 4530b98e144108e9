"""Write the README's tables of throughput from results, between two markers."""

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
    "waiting in training",
    "Penstock ÷ loader: images/s, CPU",
)


def markers(case: str) -> tuple[str, str]:
    """Return the lines before and after a case's table."""
    return f"<!-- {case}: `{COMMAND}` writes this -->", f"<!-- {case}: end -->"


def rewrite(readme: Path, case: str, text: str) -> None:
    """Replace the text between the case's markers, and keep everything else.

    Raises ConfigError unless each marker occurs once, in order.
    """
    begin, end = markers(case)
    old = readme.read_text()
    before, found, rest = old.partition(begin)
    inside, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in before + after:
        raise ConfigError(
            f"{readme}: wanted the two lines {begin!r} and {end!r}, once each and in this order. "
            "Add them where the table belongs."
        )
    del inside
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def table(result: Path) -> str:
    """Return Markdown: the machine and the work, the table, notes and the chart.

    result: the file that `benchmarks.compare` wrote.
    """
    values = json.loads(result.read_text())
    rows = [_row(name, values["summary"][name], values) for name in ordered(values["summary"])]
    head = [" | ".join(("", *_HEAD, "")).strip(), "|---" + "|---:" * (len(_HEAD) - 1) + "|"]
    chart = f"![Images a second and CPU-seconds](benchmarks/results/{result.stem}.png)"
    parts = [about(values, result), "\n".join([*head, *rows]), notes(values), chart]
    return "\n" + "\n\n".join(parts) + "\n"


def ordered(summary: Mapping[str, Any]) -> list[str]:
    """Return the names: the first one, then the others, the fastest first."""
    first, *others = summary
    return [first, *sorted(others, key=lambda name: -summary[name]["images_per_s"]["median"])]


def about(values: Mapping[str, Any], result: Path) -> str:
    """Return the date, machine, data, work and versions as a sentence."""
    machine, data, work = values["machine"], values["dataset"], values["work"]
    images = f"{data['images']:,} JPEGs of {data['mean_bytes'] / 1000:.0f} kB"
    if data.get("short_side"):
        images += f" with a short side of {data['short_side']} pixels"
    if data.get("origin"):
        images += f" ({data['origin']})"
    listed = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    return (
        f"{values['date'][:10]}, {machine['cores']} cores of {machine['processor']}, "
        f"{machine['system']}: {images}, "
        f"random resized crop to {work['size']} x {work['size']}, flip, normalise, batch "
        f"{work['batch_size']}, {work['workers']} workers; medians of {values['rounds_played']} "
        "interleaved rounds, lowest and highest round in brackets "
        f"([all figures](benchmarks/results/{result.name})). {listed}."
    )


def notes(values: Mapping[str, Any]) -> str:
    """Return notes on the ratios, decoders and files, and on loaders that weren't measured."""
    names = list(values["summary"])
    own = [f"{TITLES[n]} ({ADAPTERS[n].reads})" for n in names if ADAPTERS[n].converts]
    lent = [TITLES[n] for n in names if ADAPTERS[n].decodes == "ours"]
    lines = ["Ratios are medians of pairs within a round; above 1, Penstock is better."]
    if values["round"]["stepped"]:
        lines.append(
            "Waiting is a share of the time with an emulated training step "
            f"({values['round']['step_ms']:.0f} ms a batch), which uses no CPU cores, like a GPU's "
            "step."
        )
    if own:
        lines.append(
            f"Converted beforehand, not timed: {', '.join(own)}. The others read the files."
        )
    if lent:
        lines.append(f"{', '.join(lent)} decode with {values['decoder_of_the_rest']}.")
    if missing := values["not_installed"]:
        lines.append(f"Not installed, so not measured: {', '.join(TITLES[n] for n in missing)}.")
    return " ".join(lines)


def _row(name: str, summary: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    ours = name == next(iter(values["summary"]))
    title = f"**{TITLES[name]}**" if ours else TITLES[name]
    ratios = (
        ""
        if ours
        else f"{summary['speed_ratio']['median']:.2f}, {summary['cpu_ratio']['median']:.2f}"
    )
    waits = f"{summary['wait_share']['median']:.1%}" if values["round"]["stepped"] else ""
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
