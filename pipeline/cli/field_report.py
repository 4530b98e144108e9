"""What `penstock inspect` tells of a dataset's fields: types, shapes, ranges, what is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from penstock.readers.fields.field_types import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.summary import FieldSummary
    from penstock.readers.index.index import Index

_CLASSES = 3


def field_values(found: Index) -> dict[str, dict[str, Any]]:
    """The fields of an index for machines, by name and in order."""
    return {
        name: _values(type, found.summary(name), samples=found.samples)
        for name, type in found.schema.items()
    }


def _values(type: FieldType, summary: FieldSummary, *, samples: int) -> dict[str, Any]:
    return {
        **{k: list(v) if isinstance(v, tuple) else v for k, v in to_json(type).items()},
        "type": type.__class__.__name__,
        "stored": str(summary.storage),
        "missing": summary.missing,
        "missing_share": summary.missing / samples,
        "images": None if summary.images is None else asdict(summary.images),
        "channels": list(summary.channels),
        "codecs": list(summary.codecs),
        "progressive": summary.progressive,
        "lengths": [list(pair) for pair in summary.lengths],
        "bounds": None if summary.bounds is None else list(summary.bounds),
    }


def field_table(values: Mapping[str, Mapping[str, Any]]) -> Table:
    """The same for people."""
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
    # Of chunks no sample was looked at: the type tells what is known of them all.
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
