"""Files that are in a folder and not in the dataset: each by name, with its reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.readers.files.names import printable
from penstock.readers.origin.unread import remedy_for

if TYPE_CHECKING:
    from collections.abc import Sequence

QUARANTINE = b"quarantine.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """A file that is left out of a dataset, and why. name: below the dataset's root."""

    name: bytes
    reason: str


def quarantine_lines(quarantined: Sequence[QuarantineEntry]) -> bytes:
    """One JSON object a line, sorted by name: {"name": printable, "reason": …}."""
    return b"".join(
        json.dumps({"name": printable(q.name), "reason": q.reason}).encode("ascii") + b"\n"
        for q in sorted(quarantined, key=lambda q: (q.name, q.reason))
    )


def nothing_decodes(url: str, quarantined: Sequence[QuarantineEntry], *, shown: int = 3) -> str:
    """The message for a dataset without one good sample; names the first few."""
    remedies = [remedy for q in quarantined if (remedy := remedy_for(q.name))]
    first = "; ".join(f"{printable(q.name)}: {q.reason}" for q in quarantined[:shown])
    more = len(quarantined) - shown
    return (
        f"{url}: none of {len(quarantined)} samples can be used ({first}"
        f"{f'; and {more} more' if more > 0 else ''}). Wanted images that decode, or other fields "
        "as docs/fields.md says: in one sub-folder a class or none, in *.tar files directly in the "
        "folder, or a pack." + (f" {remedies[0]}" if remedies else "")
    )
