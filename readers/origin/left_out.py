"""Record why files are left out of a dataset, and count the left-out samples by reason.

Each file is named in `quarantine.jsonl`; the counts are in the manifest.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache import ConfigError, PenstockError
from penstock.readers.files import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

QUARANTINE = b"quarantine.jsonl"

ALLOWED_LEFT_OUT, WARNED_LEFT_OUT = 0.1, 0.01
"""The share of samples that a dataset may leave out unless its user says otherwise, and the share
above which each opening warns."""

NOT_KNOWN = "not known: the index names no reasons, and its quarantine.jsonl can't be read"

_MOST_REASONS, _SHOWN = 16, 5
_PLACE = re.compile(r" \([^()]*\b(?:row|line|file|sample) [^()]*\)| at byte \d+")
# What else differs between samples that are left out for the same reason.
_DETAILS = ((re.compile(r"\d[\d,._]*"), "N"), (re.compile(r"'[^']*'|\"[^\"]*\""), "'…'"))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """A file that is left out of a dataset, and why. name: below the dataset's root. is_counted:
    False for a further file of a sample that another entry counts."""

    name: bytes
    reason: str
    is_counted: bool = True


class LeftOut(NamedTuple):
    """How many samples are left out for one reason, and the name of one of them, for people."""

    samples: int
    example: str


def quarantine_lines(quarantined: Sequence[QuarantineEntry]) -> bytes:
    """One JSON object a line, sorted by name: {"name": printable, "reason": …}."""
    return b"".join(
        json.dumps({"name": printable(q.name), "reason": q.reason}).encode("ascii") + b"\n"
        for q in sorted(quarantined, key=lambda q: (q.name, q.reason))
    )


def count_left_out(
    quarantined: Iterable[QuarantineEntry], *, has_papers: bool
) -> dict[str, LeftOut]:
    """Count the samples among these by reason, most first. has_papers: files of other kinds, which
    lie beside images, may be among them: they are no samples.

    Where there are more reasons than people read, those that differ in a number or a name alone are
    counted as one.
    """
    from penstock.readers.origin.unreadable import is_no_sample

    return _shortened(
        _summed(
            (_PLACE.sub("", each.reason), LeftOut(1, printable(each.name)))
            for each in quarantined
            if each.is_counted and not (has_papers and is_no_sample(each.name, each.reason))
        )
    )


def left_out_for(reason: str, counts: Mapping[bytes, int]) -> dict[str, LeftOut]:
    """Samples that are left out for one reason, as `count_left_out` gives them. counts: of each
    file, by name."""
    first = next((name for name, count in counts.items() if count), None)
    return {} if first is None else {reason: LeftOut(sum(counts.values()), printable(first))}


def joined_left_out(several: Iterable[Mapping[str, LeftOut]]) -> dict[str, LeftOut]:
    """The counts of several datasets as one, shortened as `count_left_out` says."""
    return _shortened(_summed(each for counts in several for each in counts.items()))


def _shortened(found: dict[str, LeftOut]) -> dict[str, LeftOut]:
    for details, instead in _DETAILS:
        if len(found) > _MOST_REASONS:
            found = _summed((details.sub(instead, reason), n) for reason, n in found.items())
    by_count = sorted(found.items(), key=lambda each: (-each[1].samples, each[0]))
    shown, rest = by_count[:_MOST_REASONS], by_count[_MOST_REASONS:]
    if rest:
        others = sum(each.samples for _, each in rest)
        shown.append(("other reasons", LeftOut(others, rest[0][1].example)))
    return dict(shown)


def _summed(entries: Iterable[tuple[str, LeftOut]]) -> dict[str, LeftOut]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for reason, each in entries:
        counts[reason] += each.samples
        examples.setdefault(reason, each.example)
    return {reason: LeftOut(count, examples[reason]) for reason, count in counts.items()}


def parse_quarantine(data: bytes) -> dict[str, LeftOut]:
    """The counts of a quarantine file, which may come from anybody. Raises ValueError."""
    entries = []
    for line in data.splitlines():
        told = json.loads(line)
        if not isinstance(told, dict) or not isinstance(told.get("reason"), str):
            raise ValueError("a line of it isn't an object with a reason")
        name = str(told.get("name", "")).encode("utf-8", "surrogatepass")
        entries.append(QuarantineEntry(name=name, reason=told["reason"]))
    return count_left_out(entries, has_papers=True)


def noted_left_out(
    noted: Mapping[str, LeftOut] | None, quarantined: int, read: Callable[[], bytes], *, place: str
) -> Mapping[str, LeftOut]:
    """The samples that a dataset left out: as its manifest notes them, or where an earlier version
    wrote it, as its quarantine file does.

    quarantined: lines of that; read: its bytes, raises OSError or PenstockError; place: for people.
    """
    if noted is not None or not quarantined:
        return noted or {}
    try:
        return parse_quarantine(read())
    except (OSError, ValueError, RecursionError, PenstockError):
        return {NOT_KNOWN: LeftOut(quarantined, place)}


def left_out_total(left_out: Mapping[str, LeftOut]) -> int:
    """How many samples are left out."""
    return sum(each.samples for each in left_out.values())


def percent(share: float) -> str:
    """Such as "3.2 %"."""
    return f"{100 * share:.3g} %"


def left_out_text(left_out: Mapping[str, LeftOut], *, samples: int) -> str:
    """Such as "3 of 10 samples are left out: 2 of 'truncated JPEG' (such as a/1.jpg); …"."""
    total = left_out_total(left_out)
    told = "; ".join(
        f"{each.samples:,} x {reason} (such as {each.example})"
        for reason, each in list(left_out.items())[:_SHOWN]
    )
    more = f"; and {len(left_out) - _SHOWN} more reasons" if len(left_out) > _SHOWN else ""
    return (
        f"{total:,} of {samples + total:,} samples ({percent(total / (samples + total))}) are "
        f"left out: {told}{more}"
    )


def check_allowed_left_out(share: object) -> float:
    """The share of samples that may be left out, as `allow_left_out=` says. Raises ConfigError."""
    if isinstance(share, bool | int | float) and 0 <= share <= 1:
        return float(share)
    raise ConfigError(
        f"allow_left_out: got {share!r}, wanted the largest share of samples that may be left out, "
        "0 to 1, such as 0.2; True allows any."
    )


def nothing_decodes(url: str, quarantined: Sequence[QuarantineEntry], *, shown: int = 3) -> str:
    """The message for a dataset without one good sample; names the first few."""
    from penstock.readers.origin.unreadable import remedy_for

    remedies = [remedy for q in quarantined if (remedy := remedy_for(q.name))]
    first = "; ".join(f"{printable(q.name)}: {q.reason}" for q in quarantined[:shown])
    more = len(quarantined) - shown
    return (
        f"{url}: none of {len(quarantined)} samples can be used ({first}"
        f"{f'; and {more} more' if more > 0 else ''}). Wanted images that decode, or other fields "
        "that docs/fields.md names. docs/datasets.md says how files are laid out."
        + (f" {remedies[0]}" if remedies else "")
    )
