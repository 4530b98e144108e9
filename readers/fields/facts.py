"""What is summed up over shards: label correlation, dims, the fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.readers.types import ImageRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums (CRC-32C) of what is noted of a shard's samples. samples: of their own CRCs as
    little-endian uint32; columns: of heights and widths as little-endian int32, then labels as
    int64."""

    samples: int
    columns: int

    @classmethod
    def of(
        cls,
        crcs: NDArray[np.uint32],
        heights: NDArray[np.int32],
        widths: NDArray[np.int32],
        labels: NDArray[np.int64] | None,
    ) -> Sums:
        """Sums over arrays of shape (samples,)."""
        columns = crc32c(np.ascontiguousarray(heights, "<i4"))
        columns = crc32c(np.ascontiguousarray(widths, "<i4"), columns)
        if labels is not None:
            columns = crc32c(np.ascontiguousarray(labels, "<i8"), columns)
        return cls(samples=crc32c(np.ascontiguousarray(crcs, "<u4")), columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """One shard's contribution. size_bytes: of its samples (a folder) or its file (a pack); labels:
    samples by label, None without labels; images, channels, codecs: over its samples; progressive:
    JPEGs of that kind, None where nobody counted; overhead_bytes: of a pack's shard beside its
    images."""

    samples: int
    size_bytes: int
    sums: Sums
    labels: Mapping[int, int] | None
    images: ImageRange
    channels: tuple[int, ...]
    codecs: tuple[str, ...]
    progressive: int | None = None
    overhead_bytes: int | None = None


def shard_facts(
    *,
    size_bytes: int,
    crcs: NDArray[np.uint32],
    heights: NDArray[np.int32],
    widths: NDArray[np.int32],
    channels: Sequence[int],
    codecs: Sequence[str],
    labels: NDArray[np.int64] | None,
    progressive: int | None = None,
    overhead_bytes: int | None = None,
) -> ShardFacts:
    """Sum up one shard; arrays of shape (samples,), samples ≥ 1."""
    return ShardFacts(
        samples=len(crcs),
        size_bytes=size_bytes,
        sums=Sums.of(crcs, heights, widths, labels),
        labels=None if labels is None else dict(Counter(labels.tolist())),
        images=ImageRange(
            min_height=int(heights.min()),
            max_height=int(heights.max()),
            min_width=int(widths.min()),
            max_width=int(widths.max()),
        ),
        channels=tuple(sorted({int(c) for c in channels})),
        codecs=tuple(sorted(set(codecs))),
        progressive=progressive,
        overhead_bytes=overhead_bytes,
    )


def join_ranges(parts: Sequence[ImageRange]) -> ImageRange:
    """The bounds over all parts; at least one."""
    return ImageRange(
        min_height=min(d.min_height for d in parts),
        max_height=max(d.max_height for d in parts),
        min_width=min(d.min_width for d in parts),
        max_width=max(d.max_width for d in parts),
    )


def label_correlation(shards: Sequence[Mapping[int, int]]) -> float:
    """How much alike the labels of one shard are: 0 as in the whole set, 1 one label a shard.

    (P_within - P_total) / (1 - P_total), P the probability that two distinct random samples share
    their label, drawn from one shard (pairs of all shards weigh the same) or from the whole set.
    P is Simpson's index in its unbiased form (E. H. Simpson, Measurement of Diversity, Nature 163,
    1949); for indicator variables of the labels, summed over labels, the ratio is the intraclass
    correlation of cluster sampling. Slightly below 0 where shards are more even than chance. 0
    where nothing can be told apart: one label, or no shard of two samples.
    """
    total: Counter[int] = Counter()
    same = pairs = 0
    for counts in shards:
        total.update(counts)
        n = sum(counts.values())
        pairs += n * (n - 1)
        same += sum(c * (c - 1) for c in counts.values())
    n = total.total()
    same_total = sum(c * (c - 1) for c in total.values())
    if pairs == 0 or same_total == n * (n - 1):
        return 0.0
    p_within, p_total = same / pairs, same_total / (n * (n - 1))
    return (p_within - p_total) / (1 - p_total)


def fingerprint(
    *,
    classes: Sequence[str],
    fields: Sequence[str],
    samples: NDArray[np.int64],
    crcs: NDArray[np.uint32],
    columns_crcs: NDArray[np.uint32],
) -> str:
    """Of the content: shards' sizes, their checksums, classes. Not of where it lies or when it
    was written, so a folder and its unshuffled pack of equal shards share it. Hex, 64
    characters."""
    digest = hashlib.sha256(json.dumps([list(classes), list(fields)]).encode("ascii"))
    for column, kind in ((samples, "<i8"), (crcs, "<u4"), (columns_crcs, "<u4")):
        digest.update(np.ascontiguousarray(column, kind).tobytes())
    return digest.hexdigest()
