"""Report what an index or a mixture contains, for `penstock inspect` and `plan`.

For each field it shows the type, shape, range and number of missing values; for the order, the
lanes and the window that a job of a given batch size would use; for each part of a mixture, what it
gives in an epoch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from penstock.cache.base import format_size
from penstock.pipeline.cli.output import count, table
from penstock.pipeline.plan import first_settings, label_spread, spread_warning, usual_spreads
from penstock.readers import Contents, Mixture, MixtureSummary, contents_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

    from penstock.pipeline.plan.sizing import ClusterSetup
    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats import FieldSummary
    from penstock.readers.index import Index

_CLASSES = 3


def _values(type: FieldType, summary: FieldSummary, *, samples: int) -> dict[str, Any]:
    values = {**type.to_json(), **asdict(summary)}
    stored, missing_share = str(values.pop("storage")), summary.missing / samples
    kind = type.__class__.__name__
    return {**values, "type": kind, "stored": stored, "missing_share": missing_share}


def field_table(values: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the fields of an index as a table."""
    rows = [
        (name, _type(field), _shape(field), _range(field), _missing(field))
        for name, field in values.items()
    ]
    return table("field", "type", "of one sample", "values", "missing", rows=rows)


def _missing(field: Mapping[str, Any]) -> str:
    return f"{field['missing_share']:.2%}" if field["missing"] else "0"


def _type(field: Mapping[str, Any]) -> str:
    facts = (("dtype", "{}"), ("format", "{}"), ("of", "of {}"))
    words = ", ".join(words.format(field[fact]) for fact, words in facts if fact in field)
    return f"{field['type']} ({words})" if words else str(field["type"])


def _shape(field: Mapping[str, Any]) -> str:
    if field["images"] is not None:
        sides, channels = field["images"], _joined(field["channels"])
        high, wide = (_between(sides[f"min_{s}"], sides[f"max_{s}"]) for s in ("height", "width"))
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
        words.append(f"{len(names):,} classes: {', '.join(names[:_CLASSES])}{more}")
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
    shards, about, spread, rank_spread = len(found.sizes), found.about, None, None
    settings = first_settings(contents_of(found), seed=0, global_batch=batch_size)
    lanes, window = settings.lanes, settings.window
    if about.icc is not None:
        spread = label_spread(batch_size, about.icc, min(lanes * window, shards), shards)
        rank_spread = usual_spreads(shards, icc=about.icc, shuffled=about.shuffled)
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
        "shuffled": about.shuffled,
        "icc": about.icc,
        "quarantined": about.quarantined,
        "left_out": {reason: each.samples for reason, each in found.left_out.items()},
        "passed_over": about.passed_over,
        "fingerprint": found.fingerprint,
        "batch_size": batch_size,
        "lanes": lanes,
        "window": window,
        "label_spread": spread,
        "rank_label_spread": rank_spread,
    }


def shown_index(url: str, values: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yield the values of an index for people, fields first, as lines and tables."""
    yield (
        f"{escape(url)}: {escape(values['kind'])}, {count(values['samples'], 'sample')} in "
        f"{count(values['shards'], 'shard')}, {format_size(values['bytes'])}\n"
    )
    yield field_table(values["fields"])
    shown = ("kind", "samples", "shards", "bytes", "fields")
    rows = [(_TITLES.get(n, n), _readable(n, v)) for n, v in values.items() if n not in shown]
    yield table("\nindex and order", "", rows=rows)
    if any(field["progressive"] for field in values["fields"].values()):
        remedy = "`penstock pack --baseline` rewrites them without loss."
        yield f"Progressive JPEGs take about 3 times as long to decode: {remedy}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFigures:
    """The mixture that `penstock plan` sizes: the parts of its first epoch, and its contents."""

    summary: MixtureSummary
    contents: Contents

    def completed(self, setup: ClusterSetup) -> ClusterSetup:
        """Return the setup of a job with the bytes that its epochs read for the first time."""
        from penstock.pipeline.plan.sizing import mixture_reads

        mixture = self.contents.mixture
        own = first_settings(self.contents, seed=0, global_batch=setup.global_batch).mixture
        assert mixture is not None
        assert own is not None
        first, later = mixture_reads(mixture, own, epochs=setup.epochs)
        return replace(
            setup,
            stored_bytes=float(self.contents.shard_bytes.sum()),
            new_first=first / setup.total_bytes,
            new_later=later / setup.total_bytes,
        )


def part_table(summary: MixtureSummary) -> Table:
    """Return a row for each part of an epoch, and one for all of them."""
    parts = table(*summary.HEADS, rows=summary.rows())
    for column in parts.columns[1:]:
        column.justify = "right"
    return parts


def mixture_values(
    mixture: Mixture, *, batch_size: int, epoch: int
) -> tuple[dict[str, Any], MixtureSummary]:
    """Return the values of `penstock inspect --json` for a mixture, and the epoch's parts.
    batch_size: the job's global batch."""
    contents = mixture.contents
    settings = first_settings(contents, seed=0, global_batch=batch_size)
    parts = settings.mixture
    assert contents.mixture is not None
    assert parts is not None
    stream = parts.stream(contents.mixture)
    summary = mixture.summary_of(stream, samples=parts.samples, epoch=epoch)
    values = {
        "kind": mixture.kind,
        "samples": parts.samples,
        "shards": len(contents.sizes),
        "bytes": int(contents.shard_bytes.sum()),
        "fields": {name: repr(contents.schema[name]) for name in contents.schema},
        "fingerprint": contents.fingerprint,
        "batch_size": batch_size,
        "lanes": settings.lanes,
        "mixture": (shown := summary.values()),
    }
    for part, lanes, window in zip(shown["parts"], parts.lanes, parts.windows, strict=True):
        part |= {"lanes": lanes, "window": window}
    return values, summary


def shown_mixture(
    url: str, values: Mapping[str, Any], summary: MixtureSummary
) -> Iterator[str | Table]:
    """Yield the values of a mixture for people, as lines and tables."""
    yield (
        f"{escape(url)}: {escape(values['kind'])}, {count(len(summary.parts), 'part')}, "
        f"{count(values['shards'], 'shard')}, {format_size(values['bytes'])} stored"
    )
    yield table("field", "type", rows=values["fields"].items())
    yield (
        f"Epoch {summary.epoch} of {summary.samples:,} samples, in global batches of "
        f"{values['batch_size']:,}:"
    )
    yield part_table(summary)
