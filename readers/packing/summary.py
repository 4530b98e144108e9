"""What a run of packing came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.readers.origin.quarantine import count_left_out

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin.quarantine import LeftOut
    from penstock.readers.packing.folder import ShardRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """What `pack` did. bytes: of the shard files. complete: the manifest is written; else the
    counts are of this rank's share, and other ranks have theirs to finish. progressive: JPEGs of
    that kind in the pack, None where nobody counted. left_out: samples by the reason why they
    aren't in the pack, those that its source left out among them."""

    samples: int
    shards: int
    bytes: int
    quarantined: int
    seconds: float
    complete: bool
    progressive: int | None
    left_out: Mapping[str, int]

    @classmethod
    def of_manifest(
        cls, manifest: Manifest, seconds: float, left_out: Mapping[str, LeftOut]
    ) -> PackSummary:
        """The summary of a complete pack."""
        return cls(
            samples=manifest.about.samples,
            shards=len(manifest.names),
            bytes=int(manifest.shard_bytes.sum()),
            quarantined=manifest.about.quarantined,
            seconds=seconds,
            complete=True,
            progressive=manifest.about.progressive,
            left_out={reason: each.samples for reason, each in left_out.items()},
        )

    @classmethod
    def of_records(cls, records: Sequence[ShardRecord], seconds: float) -> PackSummary:
        """The summary of one rank's finished shards."""
        facts = [record.facts for record in records if record.facts is not None]
        return cls(
            samples=sum(f.samples for f in facts),
            shards=len(facts),
            bytes=sum(f.size_bytes for f in facts),
            quarantined=sum(len(record.rejected) for record in records),
            seconds=seconds,
            complete=False,
            progressive=sum(s.progressive or 0 for f in facts for s in f.fields.values()),
            left_out={
                reason: each.samples
                for reason, each in count_left_out(
                    (q for record in records for _, q in record.rejected), has_papers=True
                ).items()
            },
        )
