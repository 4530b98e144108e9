"""Deliver samples as often as their weights say: systematic sampling, as a plan. Pure.

The weights are expected counts. With their cumulative sums S and an offset u in [0, 1) of the
epoch, sample i owns the slots ⌈S_i - u⌉ to ⌈S_(i+1) - u⌉ - 1: so it is delivered floor or ceil of
its expected count in every epoch, and exactly that count on average (systematic sampling: Madow,
"On the theory of systematic sampling, II", 1949). The slots of a shard's samples are its expanded
rows, and an epoch is a `Plan` over the expanded shards: copies are spread over the window, a node
reads the shards that it has cached, and any position costs one binary search more. If all weights
are 1, the order is that without weights.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from penstock.cache import PlanError, ResumeError
from penstock.cache.base import keyed_hash, unit
from penstock.pipeline.plan.order import JobPlan, Plan, PlanArguments, SlotSamples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.lanes import Ints
    from penstock.pipeline.plan.order import SlotCut
    from penstock.readers import Contents, SampleSlots, SampleWeights

_OFFSET = 0x77656967  # keeps the hashes of epochs' offsets apart from others
_KEPT_EPOCHS = 2
_MOST_CHANGES = 32  # so that a state stays small


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """The settings of a plan with weights of samples, beside those of a `Plan`.

    samples: of an epoch. changes: the first epoch in which weights hold, and their fingerprint,
    ascending by epoch; the oldest ones may be dropped.
    """

    samples: int
    changes: tuple[tuple[int, str], ...]

    @classmethod
    def first(cls, weights: SampleWeights | None, *, shuffle: bool = True) -> WeightSettings | None:
        """Return the settings of a new job; None without weights. Raises PlanError for weights if
        the job isn't shuffled."""
        if weights is None:
            return None
        cls.check_shuffle(shuffle)
        return cls(samples=weights.samples, changes=((0, weights.first),))

    @staticmethod
    def check_shuffle(shuffle: bool) -> None:
        """Raise PlanError for weights of samples in a job that isn't shuffled."""
        if not shuffle:
            raise PlanError(
                "weights: samples that are delivered several times, or not at all, have no index "
                "order. Pass shuffle=True, or leave the weights out."
            )

    @property
    def text(self) -> str:
        """A text of the weights, to compare them."""
        epoch, name = self.changes[-1]
        return f"weights of samples {name[:12]} from epoch {epoch} on"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON types."""
        return {"samples": self.samples, "changes": [list(each) for each in self.changes]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WeightSettings:
        """Return the settings of a dict. Raises ValueError, KeyError or TypeError unless it is one
        that `to_dict` writes."""
        changes = tuple((epoch, name) for epoch, name in values["changes"])
        settings = cls(samples=values["samples"], changes=changes)
        epochs = [epoch for epoch, _ in changes]
        if (
            {type(each) for each in (settings.samples, *epochs)} != {int}
            or {type(name) for _, name in changes} != {str}
            or not 0 < settings.samples < 2**53
            or min(epochs) < 0
            or sorted({*epochs}) != epochs
            or len(changes) > _MOST_CHANGES
        ):
            raise ValueError("the settings of weights")
        return settings

    def changed(self, epoch: int, fingerprint: str) -> WeightSettings:
        """Return the settings with other weights from an epoch on."""
        before = [each for each in self.changes if each[0] < epoch]
        if before and before[-1][1] == fingerprint:
            return WeightSettings(samples=self.samples, changes=tuple(before))
        kept = before[-(_MOST_CHANGES - 1) :]
        return WeightSettings(samples=self.samples, changes=(*kept, (epoch, fingerprint)))

    def name_in(self, epoch: int) -> str:
        """Return the fingerprint of an epoch's weights. Raises PlanError if it was dropped."""
        found = [name for first, name in self.changes if first <= epoch]
        if not found:
            raise PlanError(
                f"epoch {epoch}: its weights of samples aren't known any more; those of epoch "
                f"{self.changes[0][0]} and later ones are. Read a later epoch."
            )
        return found[-1]

    def check(self, known: SampleWeights | None, *, epoch: int) -> None:
        """Raise ResumeError unless the weights of an epoch and of all later ones are known."""
        needed = [self.name_in(epoch), *(name for first, name in self.changes if first > epoch)]
        lacking = [name for name in needed if known is None or name not in known.arrays]
        if not lacking:
            return
        given = (
            "this loader has none"
            if known is None
            else f"this loader has {', '.join(name[:12] for name in known.arrays)}"
        )
        raise ResumeError(
            f"State was saved with weights of samples {', '.join(name[:12] for name in lacking)} "
            f"(the hash of an array), and {given}. The state doesn't hold the array: pass the same "
            "one as weights= of the loader, or to loader.set_sample_weights(), before "
            "load_state_dict()."
        )


class WeightedPlan(JobPlan):
    """The mapping from positions of a weighted dataset's stream to samples. Thread-safe.

    contents: the samples, with their weights. settings: which of the weights hold in which epoch.
    Other arguments: as for `Plan`, whose units are those of the contents; windows are counted in
    expanded shards or units. Attributes: as in `JobPlan`, and reshuffle.
    """

    def __init__(
        self, contents: Contents, settings: WeightSettings, **order: Unpack[PlanArguments]
    ) -> None:
        assert contents.weights is not None
        assert order["seed"] is not None
        self._contents, self._weights, self._settings = contents, contents.weights, settings
        self.sizes, self.samples, self.bins = contents.sizes, settings.samples, 1
        self.lanes, self.window = order["lanes"], order["window"]
        self.reshuffle, self._seed, self._order = order.get("reshuffle", 0.0), order["seed"], order
        self._first = np.concatenate([[0], np.cumsum(self.sizes)])
        self._latest = settings.changes[-1][0]
        self._epochs: dict[int, tuple[SampleSlots, float, Plan]] = {}
        self._lock = threading.Lock()

    def _over(
        self, sizes: Ints, units: Sequence[Ints] | None, dealt: NDArray[np.bool_] | None = None
    ) -> Plan:
        """Return the plan of rows of these shards and units. dealt: as for `Plan`."""
        return Plan(sizes, units=units, dealt=dealt, **self._order)

    def _epoch(self, number: int) -> tuple[SampleSlots, float, Plan]:
        """Return the slots of an epoch, its offset, and the plan over its expanded shards.

        Raises PlanError if the weights of the epoch aren't known.
        """
        with self._lock:
            found = self._epochs.pop(number, None)
            if found is None:
                name = self._settings.name_in(number)
                if name not in self._weights.arrays:
                    raise PlanError(
                        f"epoch {number}: its weights of samples {name[:12]} aren't known. Pass "
                        "the same array to loader.set_sample_weights() before load_state_dict()."
                    )
                slots = self._weights.slots(name, self.samples)
                offset = float(unit(keyed_hash(self._seed, _OFFSET, number)))
                expanded = slots.expanded(self.sizes, self._contents.units, offset)
                # A shard that only some epochs deliver keeps its place among the lanes.
                found = slots, offset, self._over(*expanded, slots.are_filled(self.sizes))
            self._epochs[number] = found
            while len(self._epochs) > _KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            return found

    def plan_of(self, epoch: int) -> Plan:
        """Return the plan of an epoch over its expanded shards."""
        return self._epoch(epoch)[2]

    @property
    def open_shards(self) -> float:
        """Mean number of shards that all lanes mix at a time."""
        return self.plan_of(self._latest).open_shards

    @property
    def fingerprint(self) -> str:
        """Hash of all that the order depends on, 64 hex digits."""
        plan = self._over(self.sizes, self._contents.units)
        return hashlib.sha256(f"weighted {plan.fingerprint} {self._settings}".encode()).hexdigest()

    def places_together(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples:
        """Return `places` of several batches of an epoch, end to end, by one computation."""
        slots, shift, plan = self._epoch(epoch)
        return self._samples(plan.places_together(epoch, cuts).rows, slots, shift)

    def samples_at(self, epoch: int, lane: Ints, offset: Ints) -> SlotSamples:
        """Return the samples at offsets of lanes, as `Plan.samples_at`."""
        slots, shift, plan = self._epoch(epoch)
        return self._samples(plan.rows(epoch, lane, offset), slots, shift)

    def _samples(self, rows: Ints, slots: SampleSlots, shift: float) -> SlotSamples:
        """Return the samples of rows of expanded shards, which are changed."""
        first = self._first[rows[:, 0]]
        slot = slots.before(first, shift) + rows[:, 1]
        sample = slots.owners(slot, shift)
        rows[:, 1] = sample - first
        return SlotSamples(rows=rows, occurrences=slot - slots.before(sample, shift))

    def own_slots(self, epoch: int, position: int, size: int) -> Ints | None:
        """Return the number of each slot of a batch in the plan's own order of lanes."""
        return self.plan_of(epoch).own_slots(epoch, position, size)

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Return the shards that ranks [first, end) read, int64, ascending. The borders of lanes,
        and so the shards of a rank, differ by a few samples from epoch to epoch."""
        plan = self.plan_of(self._latest)
        return plan.shards(global_batch, first=first, end=end, world=world)

    def shards_of_lanes(self, lanes: Ints) -> Ints:
        """Return the shards that lanes consist of, as `shards`."""
        return self.plan_of(self._latest).shards_of_lanes(lanes)


PartPlan = Plan | WeightedPlan
"""The plan of one part: a dataset, a selection or a concatenation, with or without weights."""


def make_part_plan(
    contents: Contents, settings: WeightSettings | None, **order: Unpack[PlanArguments]
) -> PartPlan:
    """Return the plan of one part. settings: of the weights of its samples; None without any."""
    if settings is None:
        return Plan(contents.sizes, units=contents.units, **order)
    return WeightedPlan(contents, settings, **order)
