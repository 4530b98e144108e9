"""Deliver samples as often as their weights say: systematic sampling, as a plan. Pure.

The weights are expected counts. With their cumulative sums S and an offset u in [0, 1) of the
epoch, sample i owns the slots ⌈S_i - u⌉ to ⌈S_(i+1) - u⌉ - 1: so it is delivered floor or ceil of
its expected count in every epoch, and exactly that count on average (systematic sampling: Madow,
"On the theory of systematic sampling, II", 1949). The slots of a shard's samples are its expanded
rows, and an epoch is a `Plan` over the expanded shards: copies are spread over the window, a node
reads the shards that it has cached, and any position costs one binary search more.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError
from penstock.cache.base import keyed_hash, unit
from penstock.pipeline.plan.order import JobPlan, SlotSamples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.order import Plan, SlotCut

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

_OFFSET = 0x77656967  # keeps the hashes of epochs' offsets apart from others
_KEPT_EPOCHS = 2


def expected_counts(weights: Floats) -> Floats:
    """Return weights scaled so that their sum is a whole number, the nearest one but at least 1.

    Raises PlanError for weights that aren't finite, negative ones, and if all are 0.
    """
    if not np.isfinite(weights).all() or (len(weights) and weights.min() < 0) or not weights.any():
        raise PlanError(
            "weights: wanted finite numbers of 0 or more, at least one of them above 0: how often "
            "each sample is expected in an epoch."
        )
    total = float(weights.sum())
    return weights * (max(1, round(total)) / total)


class WeightedPlan(JobPlan):
    """The mapping from positions of a weighted dataset's stream to samples. Thread-safe.

    sizes: samples of each shard. counts: expected count of each sample, shard by shard, float64, of
    a whole sum. seed: also of the epochs' offsets. plan: returns a plan over expanded shards.
    Attributes: as in `JobPlan`.
    """

    def __init__(
        self, sizes: Ints, counts: Floats, *, seed: int, plan: Callable[[Ints], Plan]
    ) -> None:
        if len(counts) != int(sizes.sum()):
            raise PlanError(
                f"weights: got {len(counts):,}, wanted one for each of {int(sizes.sum()):,} "
                "samples."
            )
        self.sizes = sizes
        self._sums = np.concatenate([[0.0], np.cumsum(counts)])
        self.samples = round(float(self._sums[-1]))
        self._sums[-1] = self.samples  # the sum of rounded numbers may be slightly off
        self._first = np.concatenate([[0], np.cumsum(sizes)])
        self._seed, self._plan = seed, plan
        self._epochs: dict[int, tuple[float, Plan]] = {}
        self._lock = threading.Lock()
        _, first = self._epoch(0)
        self.lanes, self.window, self.bins = first.lanes, first.window, first.bins

    def _epoch(self, number: int) -> tuple[float, Plan]:
        """Return the offset of an epoch, and the plan over its expanded shards."""
        with self._lock:
            found = self._epochs.get(number)
            if found is None:
                offset = float(unit(keyed_hash(self._seed, _OFFSET, number)))
                # The offset is a multiple of 2^-20, so that slot + offset is exact below 2^33.
                offset = np.floor(offset * 2**20) / 2**20
                borders = np.ceil(self._sums[self._first] - offset).astype(np.int64)
                found = offset, self._plan(np.diff(borders))
                while len(self._epochs) >= _KEPT_EPOCHS:
                    del self._epochs[next(iter(self._epochs))]
                self._epochs[number] = found
            return found

    @property
    def open_shards(self) -> float:
        """Mean number of shards that all lanes mix at a time."""
        return self._epoch(0)[1].open_shards

    @property
    def fingerprint(self) -> str:
        """Hash of all that the order depends on, 64 hex digits."""
        digest = hashlib.sha256(f"weighted {self._epoch(0)[1].fingerprint}".encode())
        digest.update(self._sums.astype("<f8", copy=False).data)
        return digest.hexdigest()

    def places_together(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples:
        """Return `places` of several batches of an epoch, end to end, by one computation."""
        offset, plan = self._epoch(epoch)
        rows = plan.places_together(epoch, cuts).rows
        shards = rows[:, 0]
        slot = np.ceil(self._sums[self._first[shards]] - offset).astype(np.int64) + rows[:, 1]
        sample = np.searchsorted(self._sums, slot + offset, side="right") - 1
        rows[:, 1] = sample - self._first[shards]
        occurrence = slot - np.ceil(self._sums[sample] - offset).astype(np.int64)
        return SlotSamples(rows=rows, occurrences=occurrence)

    def own_slots(self, epoch: int, position: int, size: int) -> Ints | None:
        """Return the number of each slot of a batch in the plan's own order of lanes."""
        return self._epoch(epoch)[1].own_slots(epoch, position, size)

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Return the shards that ranks [first, end) read, int64, ascending. The borders of lanes,
        and so the shards of a rank, differ by a few samples from epoch to epoch."""
        return self._epoch(0)[1].shards(global_batch, first=first, end=end, world=world)
