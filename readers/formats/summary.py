"""What a manifest says of one shard's samples, summed up."""

from __future__ import annotations

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
class ShardSummary:
    """One shard's contribution to a manifest. size_bytes: of its samples (a folder) or its file (a
    pack); labels: samples by label, None without labels; images, channels, codecs: over its
    samples; progressive: JPEGs of that kind, None where nobody counted; overhead_bytes: of a pack's
    shard beside its images."""

    samples: int
    size_bytes: int
    sums: Sums
    labels: Mapping[int, int] | None
    images: ImageRange
    channels: tuple[int, ...]
    codecs: tuple[str, ...]
    progressive: int | None = None
    overhead_bytes: int | None = None


def summarise(
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
) -> ShardSummary:
    """Sum up one shard; arrays of shape (samples,), samples ≥ 1."""
    return ShardSummary(
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
