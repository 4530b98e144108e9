"""What is true of all shards: the JSON part of a manifest, and what it may say.

A manifest may come from anybody, with a right checksum: each value is checked here, once, before
anything is sized by it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.readers.fields.schema import Schema
from penstock.readers.formats.layout import Layout
from penstock.readers.formats.limits import MAX_SAMPLES
from penstock.readers.formats.registry import is_format
from penstock.readers.index.field_summaries import check_fit, check_summary
from penstock.readers.origin.quarantine import LeftOut, joined_left_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.readers.formats.summary import FieldSummary


_MAX_TEXT_BYTES = 64 * 2**20
# So many brackets and commas: a million folders with their times. Each value takes 70 bytes.
_MAX_BRACKETS, _MAX_COMMAS = 2**20, 2**21
_MAX_NAME = 4096
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_LISTING = re.compile(r"[0-9a-f]{0,64}")
_ARRANGEMENT = re.compile(r"([0-9a-f]{16})?")


@dataclass(frozen=True, kw_only=True)
class About:
    """What is true of all shards; the JSON part of a manifest.

    kind: the format's name; schema: the fields, settled; fields: what is known of each; icc: see
    `index.totals`; source: URL of what a pack, or an index of tar files, was made from;
    arrangement: names what the user said of how the data lie, "" for nothing; settings: what a pack
    was asked to be; directories: name and modification time in ns of each listed folder (local
    folders); listing: fingerprint of what an index was built over, hex; passed_over: what is no
    part of a sample, by extension; overhead_bytes: of a pack's shard beside the bytes of its
    samples, at most. left_out: columns that are no field, and why. samples_left_out: how many
    samples are left out for each reason, and an example; None where an earlier version wrote this.
    """

    kind: str
    schema: Schema
    fields: Mapping[str, FieldSummary]
    samples: int
    fingerprint: str
    icc: float | None
    quarantined: int
    shuffled: bool = False
    seed: int | None = None
    source: str = ""
    arrangement: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    directories: tuple[tuple[str, int], ...] = ()
    listing: str = ""
    passed_over: dict[str, int] = field(default_factory=dict)
    overhead_bytes: int | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    samples_left_out: dict[str, LeftOut] | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the only field of classes; empty where there is none, or several."""
        return self.schema.class_names()

    @property
    def progressive(self) -> int | None:
        """Progressive JPEGs of all fields; None where nobody counted."""
        counts = [each.progressive for each in self.fields.values()]
        counted = [count for count in counts if count is not None]
        return sum(counted) if counted else None

    @cached_property
    def layout(self) -> Layout:
        """How the samples are stored."""
        return Layout(
            schema=self.schema,
            storage={name: each.storage for name, each in self.fields.items()},
            lacking=frozenset(name for name, each in self.fields.items() if each.missing),
        )

    @property
    def is_of_chunks(self) -> bool:
        """Whether samples lie in chunks, which metadata tell of."""
        return any(each.storage == "chunks" for each in self.fields.values())

    def to_json(self) -> dict[str, Any]:
        """As a manifest has it."""
        values = {each.name: getattr(self, each.name) for each in dataclass_fields(self)}
        values["schema"] = self.schema.to_json()
        values["fields"] = {name: asdict(each) for name, each in self.fields.items()}
        if not self.left_out:
            del values["left_out"]
        if not self.samples_left_out:
            del values["samples_left_out"]
        return values


def load_values(text: bytes) -> dict[str, Any]:
    """The JSON object of a manifest. Raises ValueError for what isn't one, or a huge one."""
    brackets, commas = text.count(b"[") + text.count(b"{"), text.count(b",")
    if len(text) > _MAX_TEXT_BYTES or brackets > _MAX_BRACKETS or commas > _MAX_COMMAS:
        raise ValueError(f"its JSON part has {len(text):,} bytes and {commas:,} values")
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its JSON part is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("its JSON part isn't an object")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} isn't a number")


def check_about(values: dict[str, Any]) -> About:
    """The value, of JSON that says only what can be. Raises ValueError, TypeError."""
    values.pop("penstock", None)
    for name, is_right in _RIGHT.items():
        if name in values and not is_right(values[name]):
            raise ValueError(f"its {name} can't be {str(values[name])[:80]!r}")
    schema = values["schema"] = Schema.from_json(values["schema"])
    fields = {name: check_summary(each) for name, each in values["fields"].items()}
    if fields.keys() != set(schema):
        raise ValueError("what it says of its fields isn't of those of its schema")
    values["fields"] = {name: fields[name] for name in schema}  # JSON has them sorted
    if values.get("samples_left_out") is not None:
        told = values["samples_left_out"].items()
        values["samples_left_out"] = joined_left_out([{k: LeftOut(*each) for k, each in told}])
    values["directories"] = tuple((name, ns) for name, ns in values.get("directories", ()))
    about = About(**values)
    if unknown := schema.unsettled:
        raise ValueError(f"its schema doesn't say what {unknown[0]!r} is in full")
    for name, each in about.fields.items():
        check_fit(each, schema[name], samples=about.samples)
    return about


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SAMPLES


def _is_text(value: Any, *, most: int = _MAX_NAME) -> bool:
    return isinstance(value, str) and len(value) <= most


def _is_list(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _are_left_out(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(
            isinstance(each, list)
            and len(each) == 2
            and _is_count(each[0])
            and _is_text(each[1], most=4 * _MAX_NAME)
            for each in value.values()
        )
    )


def _is_correlation(value: Any) -> bool:
    # Below 0 where shards are more even than chance; by how much depends on the labels alone.
    return value is None or (
        type(value) in (int, float) and math.isfinite(value) and -1e9 <= value <= 1 + 1e-9
    )


def _is_time(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_text(value[0], most=2 * _MAX_NAME)
        and type(value[1]) is int
        and abs(value[1]) < 2**63
    )


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "kind": lambda value: isinstance(value, str) and is_format(value),
    "schema": lambda value: isinstance(value, list),
    "fields": lambda value: isinstance(value, dict),
    "samples": lambda value: _is_count(value) and value > 0,
    "fingerprint": lambda value: _is_text(value) and bool(_FINGERPRINT.fullmatch(value)),
    "icc": _is_correlation,
    "quarantined": _is_count,
    "shuffled": lambda value: isinstance(value, bool),
    "seed": lambda value: value is None or (type(value) is int and abs(value) < 2**64),
    "arrangement": lambda value: _is_text(value) and bool(_ARRANGEMENT.fullmatch(value)),
    "source": lambda value: _is_text(value, most=2**16),
    "settings": lambda value: isinstance(value, dict),
    "directories": _is_list(_is_time),
    "listing": lambda value: _is_text(value) and bool(_LISTING.fullmatch(value)),
    "passed_over": _is_counts,
    "overhead_bytes": lambda value: value is None or _is_count(value),
    "left_out": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "samples_left_out": _are_left_out,
}
