"""The verdict: facts in, and out come the limit, its cause and the one change that helps most. Pure.

The stage is told by where the training loop waited. Its cause is the anomaly with the largest
predicted gain (progressive JPEGs, oversized images, a slow core, tiny shards, a small cache, ...);
where nothing is out of the ordinary, the stage itself is. Every prediction scales the rate of this
very run by a factor that is stated with where it comes from, and ends at the next stage's ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cache.sizes import format_size

if TYPE_CHECKING:
    from pipeline.bench.facts import Facts, Limit, Pictures, Stage
    from pipeline.statistics import RemoteFacts

Cause = Literal[
    "",
    "slow-model",
    "gil",
    "slow-copy",
    "slow-augment",
    "slow-decode",
    "slow-core",
    "oversized",
    "progressive",
    "dataset-code",
    "slow-disk",
    "tiny-shards",
    "slow-remote",
    "throttled",
    "no-cache",
    "small-cache",
]
"""What is behind the limit; "" before anything can be told."""

# Waits shorter than this share of the time move nothing: the accelerator is fed.
FED_WAIT_SHARE = 0.02
# More of the requests than this refused, and the store's limits are what to change.
_THROTTLED_SHARE = 0.05
# A cache that keeps less of what the node reads than this is too small for it.
_KEPT_SHARE = 0.98
# A progressive JPEG costs so many times the CPU time of a baseline one of the same size to decode
# (libjpeg-turbo and DALI, 480 x 406, measured).
PROGRESSIVE_COST = 2.9
# An image has more pixels than the recipe can use where it has so many times those of a pack at
# its `pack_short`: photographs of ImageNet's size have 2.5 times.
_OVERSIZED = 4.0
# Requests below this size are all latency: throughput levels off at 4 to 8 MiB a request.
TINY_SHARD_BYTES = 1 << 20
_RANGE_BYTES = 8 << 20
# A change that gains less isn't worth a sentence.
_LEAST_GAIN = 1.15
# Tries to take the GIL that are late as often as this: somebody keeps it. A loop of pure Python or
# a C call that doesn't let it go was late 91 to 94 times of 100, a step that waits once (measured).
_HELD_GIL = 0.4
_AUGMENT_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What holds a run back.

    limit: the stage; cause: what is behind it. of_ceiling: the run's rate over what that stage does
    alone, measured in the same run; None without that. advice: the one change that would help most.
    predicted_samples_per_s: with it; None where nothing measured tells; basis: what the prediction
    follows from. verdict: all of it, in some sentences.
    """

    limit: Limit
    cause: Cause
    of_ceiling: float | None
    advice: str
    predicted_samples_per_s: float | None
    basis: str
    verdict: str


def diagnose(facts: Facts) -> Diagnosis:
    """Name the limit of a run, its cause, and what would move it."""
    raise NotImplementedError
