"""Report the forecast of `penstock plan` as one JSON object, as tables, and as a chart.

The chart shows accelerator utilisation against the number of nodes, for the first and the later
epochs, and the numbers of nodes that the store can feed. It needs the extra `plot`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError
from penstock.cache.base import format_size
from penstock.pipeline.bench import figure_type, style_axes
from penstock.pipeline.cli.output import count, table
from penstock.pipeline.cli.plan_inputs import DECODED_ELSEWHERE, DECODING, Assumptions
from penstock.pipeline.plan import AHEAD_BYTES
from penstock.pipeline.plan.sizing import (
    MOST_READERS,
    PEER_S_PER_GB,
    RAM_SHARE,
    TIER_NAMES,
    Forecast,
    changes,
    duration,
    forecast,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table

    from penstock.pipeline.plan.sizing import ClusterSetup, EpochForecast, Forecast

_SOURCES = {
    "remote": "the store",
    "peer": "other nodes' caches",
    "disk_read": "the local disk",
    "memory": "the page cache",
}
_MUCH_HIDDEN = 5.0  # per cent of an epoch: AU against the utilisation including the first step
_LEGEND = (
    "AU: accelerator utilisation, the share of the time in which GPUs compute. Only limited by: "
    "the time of the epoch if everything else took no time."
)


def plan_values(found: Forecast, assumptions: Assumptions) -> dict[str, Any]:
    """Return the values of `--json`; docs/reference/plan.md has their units."""
    job, geometry, first, main = found.setup, found.geometry, found.first, found.main
    values: dict[str, Any] = {
        "shard_bytes": round(geometry.shard_bytes),
        "shards": geometry.shards,
        "lanes": geometry.lanes,
        "window": geometry.window,
        "readers": geometry.readers,
        "connections": found.connections,
        "lookahead_bytes": round(found.lookahead_bytes),
        "first_batch_s": first.first_batch_s,
        "epoch_s": main.seconds,
        "job_s": found.seconds,
        "limit": main.limit,
        "next_limit": main.next_limit,
        "limit_first": first.limit,
        "next_limit_first": first.next_limit,
        "bytes_per_s_gpu": job.samples_per_s * job.sample_bytes,
        "bytes_per_s_node": found.bytes_per_s,
        "bytes_per_s": found.bytes_per_s * job.nodes,
        "cache_share": found.kept,
        "remote_bytes": round(found.remote_bytes),
        "requests": round(found.requests),
        "price": found.price,
        "peers": peer_values(found),
        "advice": [asdict(change) for change in changes(found)],
        "warnings": warnings_of(found, assumptions),
        "assumptions": assumptions,
    }
    for which, epoch in (("first", first), ("later", found.later)):
        tiers = ("remote", "peer", "disk_read", "disk_write", "memory")
        values |= {
            f"epoch_{which}_s": epoch.seconds,
            f"au_{which}": epoch.au,
            f"busy_{which}": epoch.busy,
            f"cores_{which}": _cores(found, epoch),
            which: {
                "seconds": epoch.seconds,
                "au": epoch.au,
                "tiers_s": epoch.tiers,
                "bytes_by_tier": {tier: round(getattr(epoch.traffic, tier)) for tier in tiers},
                "requests": round(epoch.traffic.requests),
                "peer_cpu_s": epoch.peer_cpu_s,
            },
        }
    return values


def peer_values(found: Forecast) -> dict[str, float]:
    """Return the traffic between nodes' caches in the first epoch and when a node joins.

    The cores are those that a node spends on it, as client and server. A joining node reads its
    share within an epoch, or in the time that its network needs. After the loss of a node, the
    store serves the bytes that only this node held.
    """
    job, total = found.setup, found.setup.set_bytes
    joins = total * found.kept / (job.nodes + 1) if job.peers else 0.0
    joins_s = max(found.later.seconds, joins / found.setup.link_bytes_per_s) if joins else 0.0
    return {
        "bytes_first": round(found.first.traffic.peer),
        "cores_first": found.first.peer_cpu_s / found.first.seconds / job.nodes,
        "bytes_node_joins": round(joins),
        "seconds_node_joins": joins_s,
        "cores_node_joins": PEER_S_PER_GB[job.tls][0] * joins / 1e9 / joins_s if joins else 0.0,
        "remote_bytes_node_lost": round(total * found.kept / job.nodes) if job.nodes > 1 else 0,
    }


def warnings_of(found: Forecast, assumptions: Assumptions) -> list[str]:
    """Return the warnings that belong to the plan's figures."""
    job, geometry, first = found.setup, found.geometry, found.first
    shares_shards = geometry.readers > MOST_READERS
    most_bytes = job.gpus * AHEAD_BYTES
    room = found.lookahead_bytes / (RAM_SHARE * job.ram_bytes)
    warnings = (
        (
            assumptions[DECODING]["from"] == DECODED_ELSEWHERE,
            "Decoding isn't counted: the plan assumes that the GPUs decode, if anything. If CPUs "
            "do, pass --cpu-s-per-1000 (`penstock bench` measures it), or a URL and --measure.",
        ),
        (
            job.steps > 1 and first.au - first.busy > _MUCH_HIDDEN,
            f"The first batch takes {duration(first.first_batch_s)} of the first epoch's "
            f"{duration(first.seconds)}. AU excludes it; including it, the GPUs compute "
            f"{first.busy:.1f} % of that epoch.",
        ),
        (
            shares_shards,
            f"Each shard is read by {geometry.readers:,.1f} of the {job.nodes:,} nodes: "
            f"{geometry.shards:,} shards and a batch of {job.global_batch:,} give "
            f"{geometry.lanes:,} lanes, but {job.nodes:,} nodes need at least {job.nodes:,} lanes "
            "of 4 shards each. Use smaller shards, or a batch size with more divisors.",
        ),
        (
            shares_shards and job.peers and not job.is_local and job.moved is None,
            "A cold epoch may fetch more from the store than planned: nodes that need a shard at "
            "the same time each fetch a part of it, up to "
            f"{1 + (geometry.readers - 1) / 2:.2f} datasets in total.",
        ),
        (
            job.steps < 2,
            "An epoch has only one step. AU excludes the first step, so this AU is its share.",
        ),
        (
            found.lookahead_bytes > most_bytes,
            f"The store's latency requires {format_size(found.lookahead_bytes)} of prefetch on a "
            f"node, but the loader prefetches at most {format_size(most_bytes)} (1 GiB per rank).",
        ),
        (
            room > 1,
            f"Prefetched batches use {format_size(found.lookahead_bytes)} of a node's memory, "
            f"{room:.1f} x the half that the plan reserves for data.",
        ),
    )
    return [text for is_true, text in warnings if is_true]


def show_plan(found: Forecast, assumptions: Assumptions, console: Console) -> None:
    """Print the result and the first change to make, then tables of the requirements, the epochs
    and the assumptions."""
    whole = not console.is_terminal  # don't wrap lines in a file or a pipe
    warnings = [f"[yellow]{words}[/]" for words in warnings_of(found, assumptions)]
    for line in [*_head(found), *warnings]:
        console.print(line, highlight=False, soft_wrap=whole)
    console.print(_settings(found))
    console.print(_epochs(found))
    console.print(_LEGEND, highlight=False, soft_wrap=whole, style="dim")
    rows = ((name, *one.values()) for name, one in assumptions.items())
    title = {"title": "Assumptions", "title_justify": "left", "pad_edge": True}
    console.print(table("assumption", "value", "from", rows=rows, **title))


def _head(found: Forecast) -> list[str]:
    """Return the result in a few lines: the epochs, and what to change first."""
    job, first, later = found.setup, found.first, found.later
    per_gpu = format_size(job.samples_per_s * job.sample_bytes)
    per_node, total = (format_size(found.bytes_per_s * nodes) for nodes in (1, job.nodes))
    takes = "consume" if job.ranks > 1 else "consumes"
    lines = [
        f"[bold]{count(job.ranks, 'GPU')}[/] on {count(job.nodes, 'node')} {takes} {per_gpu}/s "
        f"each, {per_node}/s per node, {total}/s in total.",
        f"[bold]First epoch:[/] {duration(first.seconds)}, AU {first.au:.1f} %. "
        f"{_limit_words(first)}",
    ]
    later_au = ""
    if job.epochs > 1:
        later_au = " and {:.0f} % later"
        lines.append(
            f"[bold]Later epochs:[/] {duration(later.seconds)} each, AU {later.au:.1f} %. "
            f"{_limit_words(later)} All {job.epochs} epochs take {duration(found.seconds)}."
        )
    made = [
        f"{change.words}. The job is then {change.gain:,.2f} x as fast, with AU "
        f"{change.au_first:.0f} % in the first epoch{later_au.format(change.au_later)}, and the "
        f"limit is {TIER_NAMES[change.limit]}."
        for change in changes(found)
    ]
    if not made:
        is_fed = first.limit == later.limit == "model"
        slow = "no single change makes the whole job 2 % faster"
        made = [f"nothing; {'the GPUs never wait' if is_fed else slow}."]
    words = zip(["Change first", *["Or"] * len(made)], made, strict=False)
    return [*lines, *(f"[bold]{head}:[/] {text}" for head, text in words)]


def _limit_words(epoch: EpochForecast) -> str:
    behind = TIER_NAMES[epoch.next_limit] if epoch.next_limit else ""
    if epoch.limit != "model":
        return f"The limit is {TIER_NAMES[epoch.limit]}{f', then {behind}' if behind else ''}."
    waits = "never wait"
    if epoch.first_batch_s:
        waits = f"wait {duration(epoch.first_batch_s)} for the first batch, then no more"
    return f"The GPUs {waits}{f'; the next limit would be {behind}' if behind else ''}."


def _settings(found: Forecast) -> Table:
    geometry, peers = found.geometry, peer_values(found)
    joins = f"{format_size(peers['bytes_node_joins'])} in its first epoch of "
    joins += f"{duration(peers['seconds_node_joins'])}, with {peers['cores_node_joins']:.2f} of "
    rows = [
        ("shards", f"{geometry.shards:,} of {format_size(geometry.shard_bytes)}"),
        ("lanes", f"{geometry.lanes:,}, with a window of {count(geometry.window, 'shard')} each"),
        ("nodes that read a shard", f"{geometry.readers:.2f}"),
        ("the cache keeps", f"{found.kept:.0%} of what a node reads"),
        ("from the store, whole job", format_size(found.remote_bytes)),
        ("requests, whole job", f"{found.requests:,.0f}"),
    ]
    if not found.setup.is_local:
        rows.append(("connections per node", f"{found.connections}"))
        rows.append(("prefetch per node", format_size(found.lookahead_bytes)))
    if found.price is not None:
        rows.append(("price of the requests", f"{found.price:,.4g}"))
    if found.setup.peers:
        each = f"{format_size(peers['bytes_first'])}, {peers['cores_first']:.2f} cores per node"
        rows.append(("from peers, first epoch", each))
        rows.append(("from peers, a node joins", f"{joins}its cores"))
    return table(rows=rows, pad_edge=True, show_header=False)


def _epochs(found: Forecast) -> Table:
    both = (found.first, found.later)
    rows = [
        ("epoch", *(duration(epoch.seconds) for epoch in both)),
        ("AU", *(f"{epoch.au:.1f} %" for epoch in both)),
        ("first batch", *(duration(epoch.first_batch_s) for epoch in both)),
        ("cores per node", *(f"{_cores(found, epoch):.1f}" for epoch in both)),
    ]
    for name, words in _SOURCES.items():
        sizes = [getattr(epoch.traffic, name) for epoch in both]
        if any(sizes):
            rows.append((f"read from {words}", *map(format_size, sizes)))
    for tier in dict.fromkeys([*found.first.tiers, *found.later.tiers]):
        times = [epoch.tiers.get(tier) for epoch in both]
        shown = ("-" if t is None else duration(t) for t in times)
        rows.append((f"only limited by {TIER_NAMES[tier].partition(',')[0]}", *shown))
    return table("", "first epoch", "later", rows=rows, pad_edge=True)


def _cores(found: Forecast, epoch: EpochForecast) -> float:
    """Return the number of cores of a node that decoding and moving bytes use."""
    return epoch.cpu_s / epoch.seconds / found.setup.nodes


NODES = tuple(2**power for power in range(11))
_FIRST, _LATER, _LINE, _INK = "#c8553d", "#0b6e99", "#8a959d", "#22303a"


def sweep(setup: ClusterSetup) -> list[Forecast]:
    """Forecast the job on 1 to 1,024 nodes with a constant batch per GPU, as long as an epoch has
    at least two steps (AU excludes the first one)."""
    found = []
    for nodes in NODES:
        batch = max(nodes * setup.gpus, setup.global_batch * nodes // setup.nodes)
        if 2 * batch > setup.samples:
            break
        found.append(forecast(replace(setup, nodes=nodes, global_batch=batch)))
    return found


def draw_plan(setup: ClusterSetup, *, title: str) -> Any:
    """Draw `sweep` as a matplotlib figure. Raises ConfigError for too few samples."""
    found = sweep(setup)
    if not found:
        raise ConfigError(
            f"--plot: got {setup.samples:,} samples, less than two global batches of one node."
        )
    nodes = [one.setup.nodes for one in found]
    figure = figure_type()(figsize=(9.0, 5.2), layout="constrained")
    axes = figure.subplots()
    # A wide line below a narrow one stays visible if both are equal.
    for which, epochs, style in (
        ("later epochs", [one.later for one in found], {"color": _LATER, "lw": 4, "marker": "o"}),
        ("first epoch", [one.first for one in found], {"color": _FIRST, "lw": 1.8, "marker": "s"}),
    ):
        label = f"{which}, at last limited by: {epochs[-1].limit}"
        axes.plot(nodes, [epoch.au for epoch in epochs], label=label, **style)
    for number, which, dashes in _fed_nodes(setup, found):
        if NODES[0] <= number <= NODES[-1]:
            label = f"the store feeds {number:,.3g} nodes with {which}"
            axes.axvline(number, color=_LINE, lw=1.2, ls=dashes, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [f"{number:,}" for number in nodes])
    axes.set_ylim(0, 105)
    axes.set_xlabel(f"nodes of {setup.gpus} GPUs", fontsize=9, color=_INK)
    axes.set_ylabel("accelerator utilisation (AU), %", fontsize=9, color=_INK)
    axes.grid(axis="y", color="#e3e8eb", linewidth=0.8)
    style_axes(axes)
    figure.legend(loc="outside lower center", frameon=False, fontsize=9, labelcolor=_INK)
    figure.suptitle(title, fontsize=10, color=_INK, x=0.01, ha="left")
    return figure


def _fed_nodes(setup: ClusterSetup, found: list[Forecast]) -> Iterator[tuple[float, str, str]]:
    """Yield the numbers of nodes that the store's bandwidth feeds, each with the bytes that it
    feeds them and a line style."""
    if setup.is_local:
        return
    most = setup.store_bytes_per_s / found[0].bytes_per_s
    yield most, "all of their bytes", ":"
    partly = next((one for one in found if one.setup.nodes >= setup.nodes), found[-1])
    if 0 < partly.kept < 1:
        share = f"the {1 - partly.kept:.0%} that {partly.setup.nodes} nodes' caches don't keep"
        yield most / (1 - partly.kept), share, "--"
