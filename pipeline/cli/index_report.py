"""Report the contents of an index for `penstock inspect`: figures, fields, order and labels.

For each field it shows the type, shape, range and number of missing values; for the order, the
lanes and the window that a job of a given batch size would use.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cache.base import format_size
from penstock.pipeline.plan import first_settings, label_spread, spread_warning, usual_spreads
from penstock.readers import contents_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats import FieldSummary
    from penstock.readers.index import Index

_CLASSES = 3


def _values(type: FieldType, summary: FieldSummary, *, samples: int) -> dict[str, Any]:
    values = {**type.to_json(), **asdict(summary)}
    del values["storage"]
    return {
        **values,
        "type": type.__class__.__name__,
        "stored": str(summary.storage),
        "missing_share": summary.missing / samples,
    }


def field_table(values: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the fields of an index as a table."""
    table = Table("field", "type", "of one sample", "values", "missing", box=None, pad_edge=False)
    for name, field in values.items():
        share = f"{field['missing_share']:.2%}" if field["missing"] else "0"
        table.add_row(escape(name), escape(_type(field)), _shape(field), _range(field), share)
    return table


def _type(field: Mapping[str, Any]) -> str:
    words = [str(field["dtype"])] if "dtype" in field else []
    if "format" in field:
        words.append(field["format"])
    if "of" in field:
        words.append(f"of {field['of']}")
    name = str(field["type"])
    return f"{name} ({', '.join(words)})" if words else name


def _shape(field: Mapping[str, Any]) -> str:
    if field["images"] is not None:
        sides = field["images"]
        high = _between(sides["min_height"], sides["max_height"])
        wide = _between(sides["min_width"], sides["max_width"])
        channels = _joined(field["channels"])
        return f"{high} x {wide} px, {channels} channel{'s' * (channels != '1')}"
    if field["lengths"]:
        return " x ".join(_between(low, high) for low, high in field["lengths"])
    # Samples in chunks weren't read, so only the type is known.
    shape = field.get("shape", (None,) if field["kind"] == "tokens" else ())
    return " x ".join("any" if n is None else f"{n:,}" for n in shape) or "-"


def _range(field: Mapping[str, Any]) -> str:
    words = []
    if field["bounds"] is not None:
        low, high = field["bounds"]
        words.append(f"{low:,} to {high:,}" if isinstance(low, int) else f"{low:.4g} to {high:.4g}")
    if field.get("names"):
        names = field["names"]
        more = ", …" if len(names) > _CLASSES else ""
        words.append(f"{len(names):,} classes: {escape(', '.join(names[:_CLASSES]))}{more}")
    if field["codecs"]:
        words.append(_joined(field["codecs"]))
    if field["progressive"]:
        words.append(f"{field['progressive']:,} progressive")
    return "; ".join(words) or "-"


def _between(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _joined(values: list[Any]) -> str:
    return "/".join(map(str, values))


_TITLES = {
    "bytes": "stored size",
    "largest_shard_bytes": "largest shard",
    "icc": "similarity of labels within a shard, 0 to 1 (ICC)",
    "left_out": "left out",
    "passed_over": "passed over",
    "batch_size": "for a global batch of",
    "lanes": "  lanes",
    "window": "  open shards per lane",
    "label_spread": "  variance of its labels (1: random)",
    "rank_label_spread": "  the same of a rank's batch, by world size",
}
"""Labels for people, for the JSON fields whose names don't explain themselves."""


def index_values(found: Index, *, batch_size: int) -> dict[str, Any]:
    """Return the values of `penstock inspect --json`. batch_size: the job's global batch."""
    shards = len(found.sizes)
    settings = first_settings(contents_of(found), seed=0, global_batch=batch_size)
    lanes, window = settings.lanes, settings.window
    return {
        "kind": found.kind,
        "samples": found.samples,
        "shards": shards,
        "bytes": int(found.shard_bytes.sum()),
        "largest_shard_bytes": int(found.shard_bytes.max()),
        "fields": {
            name: _values(type, found.summary(name), samples=found.samples)
            for name, type in found.schema.items()
        },
        "shuffled": found.about.shuffled,
        "icc": found.about.icc,
        "quarantined": found.about.quarantined,
        "left_out": {reason: each.samples for reason, each in found.left_out.items()},
        "passed_over": found.about.passed_over,
        "fingerprint": found.fingerprint,
        "batch_size": batch_size,
        "lanes": lanes,
        "window": window,
        "label_spread": None
        if found.about.icc is None
        else label_spread(batch_size, found.about.icc, min(lanes * window, shards), shards),
        "rank_label_spread": None
        if found.about.icc is None
        else usual_spreads(shards, icc=found.about.icc, shuffled=found.about.shuffled),
    }


def shown_index(url: str, values: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yield the values of an index for people, as tables and a line."""
    table = Table("", url, box=None, pad_edge=False)
    for name, value in values.items():
        if name != "fields":
            table.add_row(_TITLES.get(name, name), _readable(name, value))
    yield table
    yield field_table(values["fields"])
    if any(field["progressive"] for field in values["fields"].values()):
        yield (
            "Progressive JPEGs take about 3 times as long to decode: `penstock pack --baseline` "
            "rewrites them without loss."
        )


def warn_of_labels(index: Index) -> None:
    """Warn on stderr if the labels of ranks' batches would be unbalanced."""
    if index.about.icc is None:
        return
    spreads = usual_spreads(len(index.sizes), icc=index.about.icc, shuffled=index.about.shuffled)
    if words := spread_warning(spreads, icc=index.about.icc):
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
