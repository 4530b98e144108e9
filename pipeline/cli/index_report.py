"""What `penstock inspect` tells of an index: its figures, how a job would walk it, and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from penstock.cache.base.sizes import format_size
from penstock.pipeline.cli.field_report import field_table, field_values
from penstock.pipeline.plan.advice import usual_spread_words, usual_spreads
from penstock.pipeline.plan.order import label_spread
from penstock.pipeline.plan.settings import shuffled_settings
from penstock.readers.dataset import contents_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.index.index import Index


_TITLES = {
    "bytes": "stored size",
    "largest_shard_bytes": "largest shard",
    "icc": "labels alike in a shard, 0 to 1 (ICC)",
    "left_out": "left out",
    "passed_over": "passed over",
    "batch_size": "for a global batch of",
    "lanes": "  lanes",
    "window": "  shards open a lane",
    "label_spread": "  variance of its labels, 1 is random",
    "rank_label_spread": "  of a rank's batch, by ranks",
}
"""Labels for people, for the JSON fields whose names don't explain themselves."""


def index_values(found: Index, *, batch_size: int) -> dict[str, Any]:
    """The fields of `penstock inspect --json`. batch_size: the job's, over all ranks."""
    shards = len(found.sizes)
    settings = shuffled_settings(contents_of(found), seed=0, global_batch=batch_size)
    lanes, window = settings.lanes, settings.window
    return {
        "kind": found.kind,
        "samples": found.samples,
        "shards": shards,
        "bytes": int(found.shard_bytes.sum()),
        "largest_shard_bytes": int(found.shard_bytes.max()),
        "fields": field_values(found),
        "shuffled": found.shuffled,
        "icc": found.icc,
        "quarantined": found.quarantined,
        "left_out": {reason: each.samples for reason, each in found.left_out().items()},
        "passed_over": found.about.passed_over,
        "fingerprint": found.fingerprint,
        "batch_size": batch_size,
        "lanes": lanes,
        "window": window,
        "label_spread": None
        if found.icc is None
        else label_spread(batch_size, found.icc, min(lanes * window, shards), shards),
        "rank_label_spread": None
        if found.icc is None
        else usual_spreads(shards, icc=found.icc, shuffled=found.shuffled),
    }


def show_index(url: str, values: Mapping[str, Any]) -> None:
    """Print them for people."""
    console = Console()
    table = Table("", url, show_header=True, box=None, pad_edge=False)
    for name, value in values.items():
        if name != "fields":
            table.add_row(_TITLES.get(name, name), _readable(name, value))
    console.print(table, field_table(values["fields"]), sep="\n")
    if any(field["progressive"] for field in values["fields"].values()):
        console.print(
            "Progressive JPEGs take about 3 times as long to decode: `penstock pack --baseline` "
            "rewrites them without loss.",
            soft_wrap=True,
        )


def warn_of_labels(index: Index) -> None:
    """Say where labels would make ranks lopsided, beside what a command prints."""
    if index.icc is None:
        return
    spreads = usual_spreads(len(index.sizes), icc=index.icc, shuffled=index.shuffled)
    if words := usual_spread_words(spreads, icc=index.icc):
        Console(stderr=True).print(f"[yellow]{words}[/]", soft_wrap=True)


def _readable(name: str, value: Any) -> str:
    if value is None or value == {}:
        return "-"
    if name.endswith("bytes"):
        return format_size(value)
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_readable(str(k), v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
