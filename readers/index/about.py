"""What is true of all shards: the JSON part of a manifest, and what it may say.

A manifest may come from anybody, with a right checksum: each value is checked here, once, before
anything is sized by it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.readers.formats.limits import MAX_SAMPLES, MAX_SIDE
from penstock.readers.formats.registry import is_format
from penstock.readers.types import ImageRange

if TYPE_CHECKING:
    from collections.abc import Callable


_MAX_TEXT_BYTES = 64 * 2**20
# So many brackets and commas: a million folders with their times. Each value takes 70 bytes.
_MAX_BRACKETS, _MAX_COMMAS = 2**20, 2**21
_MAX_NAME = 4096
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_LISTING = re.compile(r"[0-9a-f]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is true of all shards; the JSON part of a manifest.

    kind: the format's name; classes: names by label; images: bounds over all samples; icc: see
    `index.totals`; source: URL of what a pack, or an index of tar files, was made from; settings:
    what a pack was asked to be; directories: name and modification time in ns of each listed folder
    (local folders); listing: fingerprint of what an index was built over, hex; passed_over: what is
    no part of a sample, by extension; progressive: JPEGs of that kind, None where nobody counted;
    overhead_bytes: of a pack's shard beside its images, at most.
    """

    kind: str
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    samples: int
    fingerprint: str
    icc: float | None
    images: ImageRange
    channels: tuple[int, ...]
    codecs: tuple[str, ...]
    quarantined: int
    shuffled: bool = False
    seed: int | None = None
    source: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    directories: tuple[tuple[str, int], ...] = ()
    listing: str = ""
    passed_over: dict[str, int] = field(default_factory=dict)
    progressive: int | None = None
    overhead_bytes: int | None = None


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
    images = values["images"]
    values["images"] = ImageRange(**images)
    for name in ("fields", "classes", "channels", "codecs"):
        values[name] = tuple(values[name])
    values["directories"] = tuple((name, ns) for name, ns in values.get("directories", ()))
    about = About(**values)
    if about.classes and "label" not in about.fields:
        raise ValueError("it has classes and no labels")
    return about


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SAMPLES


def _is_text(value: Any, *, most: int = _MAX_NAME) -> bool:
    return isinstance(value, str) and len(value) <= most


def _is_list(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_classes(value: Any) -> bool:
    return _is_list(_is_text)(value) and len(set(value)) == len(value)


def _is_correlation(value: Any) -> bool:
    # Below 0 where shards are more even than chance; by how much depends on the labels alone.
    return value is None or (
        type(value) in (int, float) and math.isfinite(value) and -1e9 <= value <= 1 + 1e-9
    )


def _is_range(value: Any) -> bool:
    names = ("min_height", "max_height", "min_width", "max_width")
    if not isinstance(value, dict) or set(value) != set(names):
        return False
    if not all(type(side) is int and 1 <= side <= MAX_SIDE for side in value.values()):
        return False
    return bool(
        value["min_height"] <= value["max_height"] and value["min_width"] <= value["max_width"]
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
    "fields": lambda value: value in (["image"], ["image", "label"]),
    "classes": _is_classes,
    "samples": lambda value: _is_count(value) and value > 0,
    "fingerprint": lambda value: _is_text(value) and bool(_FINGERPRINT.fullmatch(value)),
    "icc": _is_correlation,
    "images": _is_range,
    "channels": _is_list(lambda value: type(value) is int and 0 <= value <= 2**16),
    "codecs": _is_list(lambda value: _is_text(value, most=64)),
    "quarantined": _is_count,
    "shuffled": lambda value: isinstance(value, bool),
    "seed": lambda value: value is None or (type(value) is int and abs(value) < 2**64),
    "source": lambda value: _is_text(value, most=2**16),
    "settings": lambda value: isinstance(value, dict),
    "directories": _is_list(_is_time),
    "listing": lambda value: _is_text(value) and bool(_LISTING.fullmatch(value)),
    "passed_over": _is_counts,
    "overhead_bytes": lambda value: value is None or _is_count(value),
    "progressive": lambda value: value is None or _is_count(value),
}
