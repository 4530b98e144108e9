"""Forecast which bytes of a mixture an epoch reads for the first time.

An epoch may deliver samples of a part several times, which caches hold by then, and reach only some
of another part, so that later epochs read new bytes. Shards are fetched whole: a part that has
delivered a share of its samples has opened as many windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.pipeline.plan.order import strands_and_window
from penstock.pipeline.plan.windows import window_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.plan.mixture_plan import MixtureSettings
    from penstock.readers import Contents, MixtureContents


class MixtureReads(NamedTuple):
    """The bytes of shards that a job reads for the first time: in its first epoch, and on average
    in each later one."""

    first: float
    later: float


def mixture_reads(mixture: MixtureContents, own: MixtureSettings, *, epochs: int) -> MixtureReads:
    """Return the bytes that a job of some epochs reads for the first time. own: of its plan."""
    stream = own.stream(mixture)
    windows = [
        _windows(part, lanes, window)
        for part, lanes, window in zip(mixture.parts, own.lanes, own.windows, strict=True)
    ]

    def read(count: int) -> float:
        counts = stream.counts(count * own.samples).tolist()
        return _read_bytes(mixture.parts, windows, counts)

    first = read(1)
    return MixtureReads(first, (read(epochs) - first) / (epochs - 1) if epochs > 1 else 0.0)


def _windows(part: Contents, lanes: int, window: int) -> int:
    """Return the number of windows of each strand of a part."""
    shards = int(np.count_nonzero(part.sizes))
    units = shards if part.units is None else sum(map(len, part.units))
    strands, rows = strands_and_window(
        units, part.samples, shards=shards, lanes=lanes, window=window
    )
    return window_count(part.samples // strands, rows)


def _read_bytes(parts: Sequence[Contents], windows: Sequence[int], counts: Sequence[int]) -> float:
    """Return the bytes of the shards of all windows that were opened. counts: samples of each part
    so far."""
    total = 0.0
    for part, number, count in zip(parts, windows, counts, strict=True):
        if count:
            # The last window is half-way through on average, as borders are shifted.
            share = count / part.samples + 0.5 / number
            total += float(part.shard_bytes.sum()) * min(1.0, max(share, 1 / number))
    return total
