"""What a progressive JPEG of this dataset costs beside a baseline one, on the job's device.

Some of the batch's progressive images are rewritten as baseline ones, without loss, and both are
decoded in turns, in the same windows. Without jpeglib, which rewrites them, the baseline images of
the batch stand beside the progressive ones, pixel by pixel; where there are none, nothing is said.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import MissingDependencyError
from penstock.pipeline.bench.recipe_timer import RecipeTimer, play_in_turns, some_of
from penstock.pipeline.report.ceilings import ProgressiveCost
from penstock.readers.fields.sniff import HEAD_BYTES, is_progressive, sniff
from penstock.readers.packing.transcode import baseline_twin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.augment.recipe import CheckedRecipe
    from penstock.pipeline.report.ceilings import Rate
    from penstock.readers.types import Encoded, EncodedBatch

# Rewriting takes a third of a second for so many pixels; a few images tell the ratio.
_MOST_PIXELS = 2**24
_MOST_IMAGES = 16
_LEAST_NEIGHBOURS = 4  # of each kind: images of a set differ


def progressive_cost(
    batch: EncodedBatch, recipe: CheckedRecipe, *, device: str, threads: int, seconds: float
) -> ProgressiveCost | None:
    """Decode some for about `seconds` each. None where the batch has none, or nothing to compare.

    recipe: hardly more than decoding. Raises what decoding raises.
    """
    kinds = [_kind(sample) for sample in batch.encoded]
    progressive = _few(batch, [row for row, kind in enumerate(kinds) if kind == "progressive"])
    if not progressive:
        return None
    pairs = _twins(batch, progressive)
    if pairs is not None:
        return _compared(
            *pairs, recipe, of_twins=True, device=device, threads=threads, seconds=seconds
        )
    neighbours = _few(batch, [row for row, kind in enumerate(kinds) if kind == "baseline"])
    if min(len(progressive), len(neighbours)) < _LEAST_NEIGHBOURS:
        return None
    return _compared(
        some_of(batch, progressive),
        some_of(batch, neighbours),
        recipe,
        of_twins=False,
        device=device,
        threads=threads,
        seconds=seconds,
    )


def _kind(sample: Encoded) -> str:
    if sniff(bytes(sample[:HEAD_BYTES])) != "jpeg":
        return "other"
    return "progressive" if is_progressive(sample) else "baseline"


def _few(batch: EncodedBatch, rows: Sequence[int]) -> list[int]:
    """As many of them as may be rewritten; one at least, if there is one."""
    taken: list[int] = []
    pixels = 0
    for row in rows[:_MOST_IMAGES]:
        height, width = batch.dims[row].tolist()
        pixels += height * width
        if taken and pixels > _MOST_PIXELS:
            break
        taken.append(row)
    return taken


def _twins(batch: EncodedBatch, rows: Sequence[int]) -> tuple[EncodedBatch, EncodedBatch] | None:
    """Progressive images and the same as baseline ones; None where none can be rewritten."""
    try:
        found = [
            (row, twin) for row in rows if (twin := baseline_twin(batch.encoded[row])) is not None
        ]
    except MissingDependencyError:
        return None
    if not found:
        return None
    these = some_of(batch, [row for row, _ in found])
    return these, replace(these, encoded=[twin for _, twin in found])


def _compared(
    progressive: EncodedBatch,
    baseline: EncodedBatch,
    recipe: CheckedRecipe,
    *,
    of_twins: bool,
    device: str,
    threads: int,
    seconds: float,
) -> ProgressiveCost:
    with contextlib.ExitStack() as open_ones:
        stages = []
        for batch in (progressive, baseline):
            stages.append(RecipeTimer(recipe))
            stages[-1].open(batch, device=device, threads=threads, seconds=seconds, whole=True)
            open_ones.callback(stages[-1].close)
        rates = play_in_turns(stages, seconds)
    costs = [
        _cost(rate, device) / _mean_pixels(batch)
        for rate, batch in zip(rates, (progressive, baseline), strict=True)
    ]
    return ProgressiveCost(
        times=costs[0] / costs[1], images=len(progressive.encoded), of_twins=of_twins
    )


def _mean_pixels(batch: EncodedBatch) -> float:
    return float(np.prod(batch.dims, axis=1, dtype=np.int64).mean())


def _cost(rate: Rate, device: str) -> float:
    """Of a sample. CPU time drifts less than the clock's on a busy machine."""
    return rate.cpu_s_per_1000 if device == "cpu" else 1000 / rate.samples_per_s
