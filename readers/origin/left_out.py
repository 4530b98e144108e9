"""Record why files are left out of a dataset, and count the left-out samples by reason.

`quarantine.jsonl` names each file; the manifest contains the counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.readers.files import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

QUARANTINE = b"quarantine.jsonl"

_MOST_REASONS, _SHOWN = 16, 5
_PLACE = re.compile(
    r" \([^()]*\b(?:row|line|file|sample) [^()]*\)| at byte \d+|:? line \d+ column \d+ \(char \d+\)"
)
# Further details that differ between samples that are left out for the same reason, in the order
# in which they are disregarded.
_DETAILS = (re.compile(r"\d[\d,._]*"), re.compile(r"'[^']*'|\"[^\"]*\""))
_SIMILAR = " (or similar)"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """A file that is left out of a dataset, and the reason. name: relative to the dataset's root.
    is_counted: False for a file that isn't meant as a sample, and for a further file of a sample
    that another entry counts."""

    name: bytes
    reason: str
    is_counted: bool = True


class LeftOut(NamedTuple):
    """The number of samples that are left out for one reason, and the printable name of one of
    them."""

    samples: int
    example: str


def quarantine_lines(quarantined: Sequence[QuarantineEntry]) -> bytes:
    """Return one line of JSON per entry, sorted by name: {"name": printable, "reason": …}."""
    return b"".join(
        json.dumps({"name": printable(q.name), "reason": q.reason}).encode("ascii") + b"\n"
        for q in sorted(quarantined, key=lambda q: (q.name, q.reason))
    )


def count_left_out(quarantined: Iterable[QuarantineEntry]) -> dict[str, LeftOut]:
    """Count the left-out samples by reason, most frequent first. If there are too many reasons to
    read, reasons that differ only in a number or a name are counted as one."""
    counted = (each for each in quarantined if each.is_counted)
    reasons = ((_PLACE.sub("", q.reason), LeftOut(1, printable(q.name))) for q in counted)
    return _shortened(_summed(reasons))


def left_out_for(reason: str, counts: Mapping[bytes, int]) -> dict[str, LeftOut]:
    """Count samples that are left out for one reason, in the form of `count_left_out`. counts:
    samples of each file, by name."""
    first = next((name for name, count in counts.items() if count), None)
    return {} if first is None else {reason: LeftOut(sum(counts.values()), printable(first))}


def joined_left_out(several: Iterable[Mapping[str, LeftOut]]) -> dict[str, LeftOut]:
    """Add up the counts of several datasets, shortened as in `count_left_out`."""
    return _shortened(_summed(each for counts in several for each in counts.items()))


def _shortened(found: dict[str, LeftOut]) -> dict[str, LeftOut]:
    for details in _DETAILS:
        if len(found) > _MOST_REASONS:
            found = _merged(found, details)
    by_count = sorted(found.items(), key=lambda each: (-each[1].samples, each[0]))
    rest = (("other reasons", each) for _, each in by_count[_MOST_REASONS:])
    return dict(by_count[:_MOST_REASONS]) | _summed(rest)


def _merged(found: Mapping[str, LeftOut], details: re.Pattern[str]) -> dict[str, LeftOut]:
    """Count reasons that differ only in details as the first of them."""
    alike: dict[str, list[str]] = {}
    for reason in found:
        alike.setdefault(details.sub("", reason.removesuffix(_SIMILAR)), []).append(reason)
    name = {
        reason: some[0] if len(some) == 1 else some[0].removesuffix(_SIMILAR) + _SIMILAR
        for some in alike.values()
        for reason in some
    }
    return _summed((name[reason], each) for reason, each in found.items())


def _summed(entries: Iterable[tuple[str, LeftOut]]) -> dict[str, LeftOut]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for reason, each in entries:
        counts[reason] += each.samples
        examples.setdefault(reason, each.example)
    return {reason: LeftOut(count, examples[reason]) for reason, count in counts.items()}


def left_out_total(left_out: Mapping[str, LeftOut]) -> int:
    """Return the number of left-out samples."""
    return sum(each.samples for each in left_out.values())


def percent(share: float) -> str:
    """Format a share, such as "3.2 %"."""
    return f"{100 * share:.3g} %"


def left_out_lines(left_out: Mapping[str, LeftOut], *, samples: int) -> list[str]:
    """Format the counts: "3 of 10 samples (30 %) are left out:", then a line for each reason, such
    as "2 x truncated JPEG (such as a/1.jpg)"."""
    total = left_out_total(left_out)
    share = percent(total / (samples + total))
    lines = [f"{total:,} of {samples + total:,} samples ({share}) are left out:"]
    for reason, each in list(left_out.items())[:_SHOWN]:
        lines.append(f"{each.samples:,} x {reason.rstrip('.')} (such as {each.example})")
    more = len(left_out) - _SHOWN
    return [*lines, f"and {more} more reasons"] if more > 0 else lines


def no_good_sample_message(url: str, quarantined: Sequence[QuarantineEntry]) -> str:
    """Return the message for a dataset without a good sample. It names the first few."""
    from penstock.readers.origin.unreadable import remedy_for

    remedies = [remedy for q in quarantined if (remedy := remedy_for(q.name))]
    first = "; ".join(f"{printable(q.name)}: {q.reason}" for q in quarantined[:3])
    more = len(quarantined) - 3
    return (
        f"{url}: none of {len(quarantined)} samples can be used ({first}"
        f"{f'; and {more} more' if more > 0 else ''}). Wanted images that decode, or the other "
        "fields of docs/reference/fields.md. docs/howto/class-folders.md describes how files make "
        "up samples." + (f" {remedies[0]}" if remedies else "")
    )
