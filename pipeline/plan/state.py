"""Save and check the state of a loader: fingerprints, plan, batches, epoch, position. Pure.

A state is JSON of less than 10 kB.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from penstock.cache import PlanError, ResumeError
from penstock.pipeline.plan.job_order import PlanSettings, order_fingerprint
from penstock.pipeline.plan.lanes import LaneOrder
from penstock.pipeline.plan.walk import MOST_KEPT, BatchSchedule, Cursor, Walk

if TYPE_CHECKING:
    from penstock.readers import Contents

STATE_VERSION = 3
NATIVE, TORCH = "a loader over a native dataset", "a loader over a torch dataset"
_REMEDY = "Pass the state that this loader's own state_dict() returned, or start without one."


def owner_of(state: object) -> str | None:
    """Return the name of the kind of loader that wrote this state; None if unknown."""
    if not isinstance(state, dict):
        return None
    if state.get("kind") == "torch":
        return TORCH
    if "dataset" in state and "plan" in state:
        return NATIVE
    theirs = ("_snapshot", "_sampler_iter_state", "_num_yielded", "_iterator_finished")
    return "torchdata's StatefulDataLoader" if any(name in state for name in theirs) else None


def not_a_torch_state(state: object) -> ResumeError:
    """Return the error for an object that isn't the state of a loader over a torch dataset."""
    owner = owner_of(state)
    got = f"is the state of {owner}" if owner else f"{type(state).__name__} is no loader's state"
    return ResumeError(f"This {got}, and this loader reads a torch dataset. {_REMEDY}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The state of a job: all samples before (epoch, position) were delivered to some rank.

    dataset: fingerprint of the index. fingerprint: hash of index and plan. samples: samples of an
    epoch. step: number of the next global batch since the job's start; None if unknown. schedule:
    sizes of past and planned global batches. drop_last: epochs end with the last full global batch.
    lane_order: text of the lane order; None for the identity. bad: bad samples of this epoch so
    far, over all ranks, as far as this rank had received the others' counts.
    """

    dataset: str
    fingerprint: str
    samples: int
    plan: PlanSettings
    epoch: int
    position: int
    step: int | None
    schedule: BatchSchedule
    drop_last: bool
    lane_order: str | None = None
    bad: int = 0

    @property
    def cursor(self) -> Cursor:
        """The cursor at which the next batch begins."""
        return self.walk.normalise(Cursor(self.epoch, self.position))

    @property
    def walk(self) -> Walk:
        """The walk of the saved job; invalid for batches by tokens."""
        return Walk(samples=self.samples, schedule=self.schedule, drop_last=self.drop_last)

    def to_dict(self) -> dict[str, Any]:
        """Return the state in JSON types."""
        values = asdict(self)
        schedule, plan = values.pop("schedule"), values["plan"]
        for name in PARTS:
            if (part := getattr(self.plan, name)) is not None and hasattr(part, "to_dict"):
                plan[name] = part.to_dict()
            elif part is None and name != "buckets":
                del plan[name]  # the same text as before these parts existed
        if self.plan.buckets is not None and self.plan.buckets.bins == 1:
            del plan["buckets"]["bins"]  # likewise
        batches = [list(entry) for entry in schedule["entries"]]
        first_step = schedule["first_step"]
        return {"version": STATE_VERSION, **values, "batches": batches, "first_step": first_step}

    @classmethod
    def from_dict(cls, state: object) -> LoaderState:
        """Return the state of a dict; raise ResumeError unless it is one that `to_dict` writes."""
        if not isinstance(state, dict):
            raise ResumeError(
                f"A loader state is a dict, got {type(state).__name__}. Pass what "
                "loader.state_dict() returned."
            )
        if (owner := owner_of(state)) not in (None, NATIVE):
            raise ResumeError(
                f"This is the state of {owner}, and this loader reads a native dataset, which "
                f"counts positions in another way. {_REMEDY}"
            )
        if "version" not in state:
            within = [key for key, value in state.items() if owner_of(value)]
            advice = f"Pass state[{within[0]!r}]." if within else _REMEDY
            raise ResumeError(
                f"This dict isn't a loader's state: it has the keys {[*state][:8]}. {advice}"
            )
        version = state["version"]
        if version != STATE_VERSION:
            raise ResumeError(
                f"State version {version!r} can't be read: this Penstock writes and reads version "
                f"{STATE_VERSION}. Resume with the release that wrote it, or start without a state."
            )
        plan = _take(state, "plan", (dict,))
        found = _typed(PlanSettings, plan)
        for name in PARTS:
            if (part := plan.get(name)) is not None:
                found[name] = part_of(name, part)
        bad = state.get("bad")
        bad = bad if type(bad) is int and bad > 0 else 0  # an invalid count is no error
        batches = _take(state, "batches", (list, tuple))
        schedule = _schedule(batches, _take(state, "first_step", (int,)))
        own = _typed(cls, {**state, "bad": bad})
        self = cls(plan=PlanSettings(**found), schedule=schedule, **own)
        _check(
            0 <= self.epoch < _MOST and 0 <= self.position <= self.samples < _MOST,
            f"epoch {self.epoch}, position {self.position} of {self.samples} samples",
        )
        if (mixed := self.plan.mixture) is not None:
            known = mixed.samples, sum(mixed.lanes), max(mixed.windows)
            same = known == (self.samples, self.plan.lanes, self.plan.window)
            _check(same, f"its mixture has {known} samples, lanes and window")
            _check(self.lane_order is None, "a mixture has no lane order")
        settings, weights, lists = self.plan, self.plan.weights, self.plan.lists
        is_right = 0 < settings.lanes <= _MOST_LANES and settings.window > 0
        _check(is_right and 0.0 <= settings.reshuffle <= 1.0, f"invalid plan {settings}")
        _check(len(self.lane_order or "") <= MOST_LANE_ORDER, "its lane order is too long")
        same = weights is None or (settings.shuffle and weights.samples == self.samples)
        _check(same, f"its weights don't fit the {self.samples} samples of an epoch")
        same = lists is None or (lists.samples == self.samples and self.lane_order is None)
        _check(same, f"its sampler doesn't fit the {self.samples} samples of an epoch")
        self._check_step()
        return self

    def check(
        self, contents: Contents, *, wanted: dict[str, int | float] | None = None
    ) -> LaneOrder | None:
        """Raise ResumeError unless the state continues an order of the dataset; return the state's
        lane order.

        wanted: plan settings that the user passed explicitly.
        """
        if self.plan.mixture is not None and contents.mixture is not None:
            self.plan.mixture.check(contents.mixture)
        if self.dataset != contents.fingerprint:
            raise ResumeError(
                f"State was saved for dataset {self.dataset[:12]} ({self.samples:,} samples); this "
                f"run's is {contents.fingerprint[:12]} ({contents.samples:,} samples). A subset, a "
                "split, a concatenation or a mixture with other weights is a dataset of its own. "
                "Point at the old dataset, or start without a state."
            )
        self._check_weights(contents)
        for name, value in (wanted or {}).items():
            saved = getattr(self.plan, name)
            if saved != value:
                raise ResumeError(
                    f"State was saved with {name}={saved!r}, this loader was built with "
                    f"{name}={value!r}, which gives another order. Pass {name}={saved!r} to "
                    "continue exactly, or start without a state."
                )
        rebuilt = order_fingerprint(contents, self.plan)
        if rebuilt != self.fingerprint:
            raise ResumeError(
                f"State was saved for plan {self.fingerprint[:12]}; the same settings give "
                f"{rebuilt[:12]} here, so this release orders samples differently. Resume with the "
                "release that wrote the state, or start without one."
            )
        return self.parsed_lane_order()

    def _check_weights(self, contents: Contents) -> None:
        """Raise ResumeError unless the weights of samples, or the sampler, that the state needs are
        known."""
        own, known = self.plan.weights, contents.weights
        if own is None and known is not None:
            raise ResumeError(
                "State was saved without weights of samples, and this loader has some: an epoch "
                "consists of other samples. Leave weights= out and call "
                "loader.set_sample_weights(weights) after load_state_dict, which changes them from "
                "the next epoch on; or start without a state."
            )
        if own is not None:
            own.check(known, epoch=self.epoch)
        if self.plan.lists is not None:
            self.plan.lists.check(contents.lists, seed=self.plan.seed)
        elif contents.lists is not None:
            raise ResumeError(
                "State was saved without a sampler, and this loader has one. Leave sampler= out, "
                "or start without a state."
            )

    def parsed_lane_order(self) -> LaneOrder | None:
        """Return the lane order; None is the identity. Raises ResumeError."""
        if self.lane_order is None:
            return None
        try:
            return LaneOrder.parse(self.lane_order, lanes=self.plan.lanes)
        except ValueError as error:
            raise damaged(error) from None

    def resumed_schedule(self, wanted: BatchSchedule | None, *, drop_last: bool) -> BatchSchedule:
        """Return the schedule up to the position, then `wanted`; None: this state's schedule.

        Past sizes are kept to number steps, up to `MOST_KEPT` entries. If drop_last differs from
        this state's, past epochs ended in another way and can't be numbered by the same rule: then
        the numbers continue, and the record of earlier steps is dropped.
        """
        walk, cursor = self.walk, self.cursor
        at = walk.sample(cursor)
        schedule = self.schedule.continued(at, wanted)
        if drop_last != self.drop_last:
            return schedule.forgotten_before(at, walk.step_number(cursor))
        if len(schedule.entries) <= MOST_KEPT:
            return schedule
        walk = Walk(samples=self.samples, schedule=schedule, drop_last=drop_last)
        oldest = schedule.entries[-MOST_KEPT][0]
        step = walk.step_number(Cursor(*divmod(oldest, self.samples)))
        return schedule.forgotten_before(walk.sample(walk.cursor_of(step)), step)

    def moved(self, cursor: Cursor) -> LoaderState:
        """Return the state of the same job at another cursor, the start of a batch."""
        at = self.walk.sample(cursor)
        moved = replace(self, epoch=cursor.epoch, position=cursor.position, bad=0)
        if self.plan.buckets is not None:
            return replace(moved, step=None)
        moved = replace(moved, schedule=self.schedule.continued(at))
        return replace(moved, step=moved.walk.step_number(cursor))

    def _check_step(self) -> None:
        """Raise ResumeError unless the number of the step fits its position."""
        at = f"epoch {self.epoch}, position {self.position}"
        is_right = self.step is None or 0 <= self.step < _MOST
        if self.plan.buckets is None:
            try:
                is_right = self.step == self.walk.step_number(self.cursor)
            except PlanError:
                is_right = False
        _check(is_right, f"step {self.step} isn't the one at {at} of its batches")


_KINDS: dict[Any, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}
"""The types of JSON values for the fields of a state and its parts, by annotation."""

_MOST, _MOST_LANES = 2**53, 2**24
"""Upper limits of counts, which JSON stores exactly up to this, and of lanes, for memory."""

MOST_LANE_ORDER = 5_500
"""Characters of a lane order: together with `MOST_KEPT` batch sizes a state is below 10 kB."""

PARTS = {
    "buckets": "BucketSettings",
    "aspects": "AspectSettings",
    "mixture": "MixtureSettings",
    "weights": "WeightSettings",
    "lists": "ListSettings",
}
"""The classes of the parts of a plan's settings, which only jobs with such parts load."""


def part_of(name: str, values: Any) -> Any:
    """Return a part of a plan's settings from its values in a state. Raises ResumeError."""
    kind = resolve_name(f"penstock.pipeline.plan:{PARTS[name]}")
    make = getattr(kind, "from_dict", None)
    try:
        return kind(**_typed(kind, values)) if make is None else make(values)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise damaged(f"its {name} {'are' if name[-1] == 's' else 'is'} {values!r:.200}") from None


def _typed(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's plain fields. Raises ResumeError for a missing or wrong
    one."""
    plain = [each for each in fields(kind) if each.type in _KINDS]
    given = {each.name: each.default for each in plain if each.default is not MISSING} | values
    return {each.name: _take(given, each.name, _KINDS[each.type]) for each in plain}


def _take(state: dict[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    value = state.get(name)
    wanted = " or ".join(kind.__name__ for kind in kinds)
    is_right = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
    _check(is_right, f"{name!r} is {value!r}, wanted {wanted}")
    return value


def _check(is_right: bool, what: str) -> None:
    """Raise ResumeError for a damaged state. what: what is wrong with it."""
    if not is_right:
        raise damaged(what)


def damaged(what: object) -> ResumeError:
    """Return the error for a damaged state. what: what is wrong with it."""
    return ResumeError(
        f"State is damaged: {what}. Start from an older checkpoint, or without a state."
    )


def _schedule(batches: Any, first_step: int) -> BatchSchedule:
    _check(len(batches) <= MOST_KEPT, f"it has {len(batches)} sizes of batches")
    try:
        entries = tuple((first, size) for first, size in batches)
        schedule = BatchSchedule(entries, first_step=first_step)
    except (PlanError, TypeError, ValueError) as error:
        _check(False, f"'batches': {error}")
        raise
    largest = max(first_step, *schedule.entries[-1], schedule.largest)
    _check(largest < _MOST, f"{schedule.entries[-1]} is beyond a job")
    return schedule
