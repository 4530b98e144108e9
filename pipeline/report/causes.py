"""What can hold a job back: the limits, and the causes behind them."""

from __future__ import annotations

from typing import Literal

Limit = Literal[
    "nothing yet",
    "model",
    "python",
    "copy",
    "augment",
    "decode",
    "dataset",
    "map",
    "disk",
    "remote",
    "peers",
    "cache",
]
"""The stage that holds the job back. python: the training loop, as it keeps Python's GIL. map: a
function of the user's in the recipe. peers: the other nodes' caches, and the links to them."""

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
    "slow-map",
    "slow-disk",
    "slow-read",
    "decoded-again",
    "tiny-shards",
    "slow-remote",
    "slow-peers",
    "throttled",
    "no-cache",
    "small-cache",
]
"""What is behind a limit; "" before there is anything to judge."""
