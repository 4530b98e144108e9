"""The settings of a job's order that a user may pass, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.cache.errors import ConfigError
from penstock.pipeline.options.checks import check_choice, check_counts, check_share

SlotsMode = Literal["data", "rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Settings of the order in which a job reads its samples, for `DataLoader(order=…)` and `warm`.

    Neither a default nor a state overrules what is set here (docs/order.md explains the order).

    lanes: the fixed shares of the shards that every global batch reads from, at least 1; None
        follows the dataset and the batch.
    window: shards that each lane shuffles together, at least 1 (units of decoding, where shards
        consist of several); None follows the dataset and the batch.
    reshuffle: the share of the shards, between 0 and 1, that change places in each epoch.
    slots: which rank reads which part of a global batch: "data" follows what the nodes' caches
        hold, "rank" the ranks' numbers (docs/cluster.md). A warm-up has no use for it.

    Raises ConfigError for values that no order can have.
    """

    lanes: int | None = None
    window: int | None = None
    reshuffle: float = 0.0
    slots: SlotsMode = "data"

    def __post_init__(self) -> None:
        check_counts(lanes=self.lanes, window=self.window)
        check_share("reshuffle", self.reshuffle)
        check_choice("slots", self.slots, get_args(SlotsMode))


DEFAULT_ORDER = Order()
"""The order that follows from the dataset and the batch alone."""


def shuffle_settings(order: Order) -> dict[str, int | float]:
    """Return the settings by name that differ from the defaults and need a shuffled order."""
    given: dict[str, int | float] = {}
    if order.lanes is not None:
        given["lanes"] = order.lanes
    if order.window is not None:
        given["window"] = order.window
    if order.reshuffle:
        given["reshuffle"] = float(order.reshuffle)
    return given


def check_shuffles(order: Order, *, shuffle: bool) -> None:
    """Raise ConfigError for settings that would shuffle where the order isn't shuffled."""
    for name, value in () if shuffle else shuffle_settings(order).items():
        raise ConfigError(
            f"{name}={value} has no meaning with shuffle=False: samples come in index order. "
            "Drop it, or pass shuffle=True."
        )
