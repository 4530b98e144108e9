"""Order the samples of a mixture: a plan of several parts, each with its own lanes and windows.

    position -> (part, index) -> the part's own epoch and position -> lane, offset -> (shard, row)

`readers.mixtures` has the first step, and each part's `Plan` the last one. A global batch is the
positions [p, p + B) of the mixture's stream, so it has of each part consecutive samples of that
part's own stream. `mixture_slots` divides the batch's slots among the parts, each of which is
spread evenly over them. A part's samples of a batch, sorted by (lane, index), get its slots in
their order, so a lane stays with its ranks, but for one or two samples.

To resolve a batch costs one call for each part that has samples in it. So a job that goes from
batch to batch resolves up to 16,384 samples ahead by one computation (batches of 256, 100 parts:
0.6 us a sample instead of 9; batches of 128, 2 parts: 0.1 us instead of 1.6).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
import zlib
from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import PlanError, ResumeError
from penstock.cache.base import keyed_hash
from penstock.pipeline.plan.lanes import packed, unpacked
from penstock.pipeline.plan.mixture_slots import SlotGroups, sorted_by
from penstock.pipeline.plan.order import JobPlan, SlotSamples, default_lanes, window_of
from penstock.pipeline.plan.weighted_plan import WeightSettings, make_part_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.lanes import Ints
    from penstock.pipeline.plan.order import PlanArguments, SlotCut
    from penstock.pipeline.plan.weighted_plan import PartPlan
    from penstock.readers import MixtureContents
    from penstock.readers.mixtures import MixtureStream, WeightChange


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSettings:
    """The settings of a mixture's plan, beside those that its dataset has.

    names: of the parts, in order. lanes, windows: of each part, as in `PlanSettings`. samples: of
    an epoch of the mixture. unit: consecutive samples of one part, 1 or a global batch. changes:
    the weights, if `set_weights` changed them during the job, else None: those of the dataset.
    counts, owed: at the first change, as for `MixtureStream`; None at the job's start. weights:
    the hash of the weights of the parts' samples; None if they have none. rule, per, shares,
    contents: what `mix` was given, to name what differs on resume: the end of an epoch, what
    weights are shares of, a hash of the weights, and one of each part's data; None if unknown.
    """

    names: tuple[str, ...]
    lanes: tuple[int, ...]
    windows: tuple[int, ...]
    samples: int
    unit: int = 1
    changes: tuple[WeightChange, ...] | None = None
    counts: tuple[int, ...] | None = None
    owed: tuple[float, ...] | None = None
    weights: str | None = None
    rule: str | None = None
    per: str | None = None
    shares: str | None = None
    contents: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """Return a text of the weights of samples, and of the changes that `set_weights` made, to
        compare them; "" for none."""
        if self.changes is None:
            return "" if self.weights is None else f"weights of samples {self.weights[:12]}"
        known = repr((self.changes, self.counts, self.owed, *filter(None, [self.weights])))
        digest = hashlib.sha256(known.encode()).hexdigest()
        return f"weights that were set for sample {self.changes[-1].start:,} ({digest[:16]})"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON types; lists of numbers by part are packed into texts."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        values = {name: value for name, value in given.items() if value is not None}
        if self.owed is not None:
            values["owed"] = [round(each * _OWED_STEPS) for each in self.owed]
        if self.changes is not None:
            values["changes"] = [*map(_packed_change, self.changes)]
        values |= {name: packed(values[name]) for name in _NUMBERS if name in values}
        return {**values, "names": _packed_names(self.names)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MixtureSettings:
        """Return the settings of a dict. Raises ValueError, KeyError or TypeError unless it is one
        that `to_dict` writes."""
        given = {name: value for name, value in values.items() if value is not None}
        names = given["names"] = _unpacked_names(given["names"])
        for name in _NUMBERS & given.keys():
            given[name] = _numbers(given[name], len(names), least=_LEAST.get(name, 0))
        if "owed" in given:
            given["owed"] = tuple(each / _OWED_STEPS for each in given["owed"])
        if "changes" in given:
            given["changes"] = tuple(_change(each, len(names)) for each in given["changes"])
        settings = cls(**given)
        starts = [change.start for change in settings.changes or ()]
        counts, texts = (settings.samples, settings.unit), [getattr(settings, n) for n in _TEXTS]
        if (
            not names
            or not all(isinstance(text, str | None) for text in texts)
            or not all(type(count) is int and count > 0 for count in counts)
            or sorted({*starts}) != starts
            or settings.changes == ()
        ):
            raise ValueError("the settings of a mixture")
        return settings

    def check(self, mixture: MixtureContents) -> None:
        """Raise ResumeError for a mixture of other parts, or that was given other arguments."""
        if self.names != mixture.names:
            new = [name for name in mixture.names if name not in self.names]
            gone = [name for name in self.names if name not in mixture.names]
            listed = {"added": new, "missing": gone}
            changed = [f"{what} {names}" for what, names in listed.items() if names]
            raise ResumeError(
                f"State was saved for a mixture of {len(self.names)} parts, and this one has "
                f"others: {' and '.join(changed) or 'the same in another order'}. Pass the job's "
                "parts under their names and in their order, or start without a state."
            )
        parts = dict(zip(mixture.names, mixture.parts, strict=True))
        if self.weights != mixture.weights:
            weighted = [name for name, part in parts.items() if part.weights is not None]
            raise ResumeError(
                f"State was saved for a mixture {_of_weights(self.weights)}, and this one is "
                f"{_of_weights(mixture.weights)} (of {weighted or 'no part'}), which gives another "
                "order. Pass the same weights to the same parts, or start without a state."
            )
        if self.contents is not None and self.contents != (now := _contents_hashes(mixture)):
            both = zip(parts, self.contents, now, strict=True)
            changed = [name for name, before, after in both if before != after]
            more = f" and {len(changed) - _MOST_SHOWN} more" if len(changed) > _MOST_SHOWN else ""
            raise ResumeError(
                f"State was saved for other data of the parts {changed[:_MOST_SHOWN]}{more}: they "
                "have other files, or others are selected. Pass the job's data, or start without a "
                "state."
            )
        arguments = {"epoch": (self.rule, str(mixture.rule)), "per": (self.per, mixture.per)}
        for name, (saved, own) in arguments.items():
            if saved not in (None, own):
                raise ResumeError(
                    f"State was saved for a mixture with {name}={saved}, and this one has "
                    f"{name}={own}. Pass {name}={saved}, or start without a state."
                )
        if self.shares not in (None, _shares_hash(mixture)):
            raise ResumeError(
                "State was saved for a mixture with other weights of its parts. Pass mix the same "
                "weights= (and temperature=, transition=) as at the job's start, and change them "
                "by loader.set_weights(weights) after load_state_dict; or start without a state."
            )

    def stream(self, mixture: MixtureContents) -> MixtureStream:
        """Return the stream of the parts' samples."""
        counts = None if self.counts is None else np.array(self.counts, np.int64)
        owed = None if self.owed is None else np.array(self.owed)
        return mixture.stream(changes=self.changes, counts=counts, owed=owed, unit=self.unit)

    def with_weights(
        self, mixture: MixtureContents, shares: tuple[int, ...], *, sample: int
    ) -> MixtureSettings:
        """Return the settings with other shares from a sample of the job's stream on, in place of
        all changes that were planned for later. Only the latest changes are kept. Raises PlanError
        for a sample before these."""
        given = self.changes or mixture.changes
        if sample < given[0].start:
            raise PlanError(
                f"set_weights: sample {sample:,} of the job is before {given[0].start:,}, the "
                "oldest change of weights that is recorded. Pass a later step."
            )
        past = [change for change in given if change.start < sample]
        past = past[-max(1, min(_MOST_CHANGES, _MOST_SHARES // len(shares))) :]
        settings = self
        if past and past[0].start != given[0].start:
            known = self.stream(mixture).weights_at(past[0].start)
            owed = None if known.owed is None else _rounded(known.owed)
            settings = replace(self, counts=tuple(known.counts.tolist()), owed=owed)
        change = replace(given[0], start=sample, shares=shares, until=None, target=None)
        return replace(settings, changes=(*past, change))


def _of_weights(digest: str | None) -> str:
    return f"with weights of samples {digest[:12]}" if digest else "without weights of samples"


def _contents_hashes(mixture: MixtureContents) -> tuple[int, ...]:
    """Return a hash of the data of each part, below 2^24."""
    hashes = (hashlib.sha256(part.fingerprint.encode()) for part in mixture.parts)
    return tuple(int(each.hexdigest()[:6], 16) for each in hashes)


def _shares_hash(mixture: MixtureContents) -> str:
    return hashlib.sha256(repr(mixture.changes).encode()).hexdigest()[:12]


_TEXTS = ("weights", "rule", "per", "shares")
_NUMBERS = {"lanes", "windows", "counts", "owed", "contents"}
"""The settings that are texts, and those that have a number for each part."""
_LEAST = {"lanes": 1, "windows": 1, "owed": -(2**52)}

_MOST_NAMES_BYTES = 2**24


def _packed_names(names: Sequence[str]) -> list[str] | str:
    """Return the names of parts, as a text if that is shorter."""
    listed = json.dumps(names).encode()
    packed = base64.b64encode(zlib.compress(listed, 9)).decode()
    return packed if len(packed) < len(listed) // 2 else list(names)


def _unpacked_names(given: object) -> tuple[str, ...]:
    """Return names of `_packed_names`. Raises ValueError for others."""
    if isinstance(given, str):
        try:
            data = base64.b64decode(given, validate=True)
            given = json.loads(zlib.decompressobj().decompress(data, _MOST_NAMES_BYTES))
        except zlib.error:
            raise ValueError("names") from None
    if not isinstance(given, list | tuple) or not all(isinstance(n, str) for n in given):
        raise ValueError("names")
    return tuple(given)


def _numbers(text: object, count: int, *, least: int = 0) -> tuple[int, ...]:
    return tuple(unpacked(text, count, least=least).tolist())


_OWED_STEPS = 2**16
"""Steps of a sample in which a state holds what parts lack of their shares."""


def _rounded(owed: NDArray[np.float64]) -> tuple[float, ...]:
    """Round what parts lack to the precision of a state, so that a job continues in the same way
    with and without a restart."""
    return tuple((np.rint(owed * _OWED_STEPS) / _OWED_STEPS).tolist())


def _packed_change(change: WeightChange) -> dict[str, Any]:
    """Return a change of weights in JSON types."""
    values: dict[str, Any] = {"start": change.start, "shares": packed(change.shares)}
    if change.target is not None:
        values |= {"until": change.until, "target": packed(change.target)}
    return values


def _change(values: Mapping[str, Any], parts: int) -> WeightChange:
    """Return the change of weights of a `_packed_change`. Raises as `MixtureSettings.from_dict`."""
    from penstock.readers.mixtures import WeightChange  # a plan alone reads no data

    lists = {name: _numbers(values[name], parts) for name in ("shares", "target") if name in values}
    ends = [values[name] for name in ("start", "until") if name in values]
    if (
        not all(type(end) is int and 0 <= end < 2**62 for end in ends)
        or sorted({*ends}) != ends
        or not all(0 < sum(shares) < 2**31 for shares in lists.values())
        or len(ends) != len(lists)
    ):
        raise ValueError("a change of weights")
    return WeightChange(**{**values, **lists})


_MOST_CHANGES, _MOST_SHARES = 16, 300  # so that a state of 100 parts stays below 10 kB


def mixture_settings(
    mixture: MixtureContents, *, shuffle: bool, global_batch: int, drop_last: bool
) -> MixtureSettings:
    """Return the settings of a new job. A part gets lanes and windows in proportion to its share.

    drop_last: an epoch is prolonged to full global batches, so that no part misses any samples.
    """
    if mixture.weights is not None:
        WeightSettings.check_shuffle(shuffle)
    shares = np.array([each.shares for each in mixture.changes], np.float64)
    share = (shares / shares.sum(axis=1, keepdims=True)).max(axis=0)
    lanes, windows = [], []
    for part, own in zip([each.expected for each in mixture.parts], share.tolist(), strict=True):
        shards = int(np.count_nonzero(part.sizes))
        count = default_lanes(global_batch, shards, share=own) if shuffle else 1
        lanes.append(count)
        # Its share of the window that it would have alone.
        alone = window_of(part, count, global_batch=global_batch) if shuffle else 1
        windows.append(max(1, math.ceil(alone * own)))
    samples, unit = mixture.samples, 1
    if mixture.per == "batch":
        samples, unit = mixture.batch_samples(global_batch), global_batch
    if (drop_last and mixture.rule != "once") or unit > 1:
        samples = -(-samples // global_batch) * global_batch
    return MixtureSettings(
        names=mixture.names,
        lanes=tuple(lanes),
        windows=tuple(windows),
        samples=samples,
        unit=unit,
        weights=mixture.weights,
        rule=str(mixture.rule),
        per=mixture.per,
        shares=_shares_hash(mixture),
        contents=_contents_hashes(mixture),
    )


_MOST_SHOWN = 5  # parts in a message


def late_parts_warning(
    mixture: MixtureContents, own: MixtureSettings, *, global_batch: int
) -> str | None:
    """Return a warning of parts that some global batches lack, and after how many batches each of
    the latest appears; None unless there are more parts than a batch has samples."""
    parts = len(own.names)
    if parts <= global_batch or own.changes is not None:
        return None
    stream, batches = own.stream(mixture), -(-own.samples // global_batch)

    def has_all_appeared(batch: int, parts: Sequence[int]) -> bool:
        counts = stream.counts(min(batch * global_batch, own.samples))
        return bool(counts[parts].all())

    never = np.flatnonzero(stream.counts(own.samples) == 0).tolist()
    if never:
        some = ", ".join(f'"{own.names[part]}"' for part in never[:_MOST_SHOWN])
        more = len(never) - _MOST_SHOWN
        return (
            f"The mixture has {parts:,} parts, and the first epoch has no sample of {some}"
            f"{f' and {more:,} others' if more > 0 else ''}. Raise the smallest weights, or pass a "
            "longer epoch to mix."
        )
    rarest = np.argsort(mixture.changes[0].shares, kind="stable")[:_MOST_SHOWN].tolist()
    shown = [
        (bisect_left(range(batches), True, key=partial(has_all_appeared, parts=[n])), own.names[n])
        for n in rarest
    ]
    listed = ", ".join(f'"{name}" after {number:,}' for number, name in sorted(shown)[::-1])
    return (
        f"The mixture has {parts:,} parts, and a global batch {global_batch:,} samples: no batch "
        f"has all of them. Each part has appeared after {max(shown)[0]:,} batches; the latest are "
        f"{listed}."
    )


_PART = 0x70617274  # keeps seeds of parts apart from other hashes


def make_mixture_plan(
    mixture: MixtureContents, own: MixtureSettings, *, seed: int | None, reshuffle: float
) -> MixturePlan:
    """Return the plan of a mixture, for one reader. seed: None for index order in each part."""
    parts: list[PartPlan] = []
    each = zip(mixture.parts, own.lanes, own.windows, strict=True)
    for number, (part, lanes, window) in enumerate(each):
        # Two parts that are the same dataset have different orders.
        key = None if seed is None else int(keyed_hash(seed, _PART, number))
        order: PlanArguments
        order = {"seed": key, "lanes": lanes, "window": window, "reshuffle": reshuffle}
        parts.append(make_part_plan(part, WeightSettings.first(part.weights), **order))
    return MixturePlan(parts, own.stream(mixture), samples=own.samples)


_ORDER = "mixture 2"  # of a batch; raise the number with any change, as that of `ORDER_VERSION`
_MOST_AHEAD, _MOST_OF_ALL_RANKS, _MOST_STEPS = 2**14, 2**18, 2**8  # samples resolved ahead; batches


class MixturePlan(JobPlan):
    """The mapping from positions of a mixture's stream to samples. Thread-safe.

    parts: the plan of each part, over its own shards. stream: of the parts and their weights.
    samples: positions of an epoch of the mixture. Attributes: as in `JobPlan`; lanes counts those
    of all parts, and window is the largest of the parts.
    """

    def __init__(self, parts: Sequence[PartPlan], stream: MixtureStream, *, samples: int) -> None:
        self.samples, self.bins = samples, 1
        self._parts, self._stream = tuple(parts), stream
        self.sizes = np.concatenate([part.sizes for part in parts])
        self.lanes = sum(part.lanes for part in parts)
        self.window = max(part.window for part in parts)
        counts = np.array([len(part.sizes) for part in parts], np.int64)
        self._first_shard = np.cumsum(counts) - counts
        self._samples = np.array([part.samples for part in parts], np.int64)
        self._lanes = np.array([part.lanes for part in parts], np.int64)
        self._first_lane = np.cumsum(self._lanes) - self._lanes
        self._has_lanes = bool((self._lanes > 1).any())
        self._lock = threading.Lock()
        self._ahead = [_Ahead()]  # the latest first

    @property
    def open_shards(self) -> float:
        """Mean number of shards of all parts that are mixed at a time."""
        return sum(part.open_shards for part in self._parts)

    @property
    def fingerprint(self) -> str:
        """Hash of the parts' orders, and of their shares, 64 hex digits."""
        stream = self._stream
        known = stream.weights_at(stream.changes[0].start)
        counts, owed = known.counts.tolist(), None if known.owed is None else known.owed.tolist()
        shares = repr((self.samples, stream.unit, stream.changes, counts, owed))
        text = "\n".join([_ORDER, shares, *(part.fingerprint for part in self._parts)])
        return hashlib.sha256(text.encode()).hexdigest()

    def places_together(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples:
        """Return `places` of several batches of an epoch, end to end, by one computation. If the
        batches follow those of earlier calls, some of the next ones are resolved, too."""
        with self._lock:
            for ahead in self._ahead:
                if (known := ahead.take(epoch, cuts)) is not None:
                    return known
            more, last = self._next_cuts(epoch, cuts), self._ahead[0]
            found = self._resolve(epoch, [*cuts, *more])
            own = sum(high - low for _, _, low, high in cuts)
            if more or not last.contains(epoch, cuts[0][0]):  # else a thread was late
                rest = found.take(slice(own, None))
                self._ahead = [_Ahead(epoch, cuts[-1], len(more), rest), last]
            return found.take(slice(0, own))

    def _next_cuts(self, epoch: int, cuts: Sequence[SlotCut]) -> list[SlotCut]:
        """Return the cuts that are resolved together with these: none at first, then ever more."""
        position, size, low, high = cuts[-1]
        begin, end, last = cuts[0][0], position + size, self._ahead[0]
        # Threads that read may come in another order.
        if not (begin == 0 or (epoch == last.epoch and 0 <= begin - last.end <= 2 * (end - begin))):
            return []
        size = max(1, size)
        most = min(_MOST_AHEAD // max(1, high - low), _MOST_OF_ALL_RANKS // size, _MOST_STEPS)
        # A reader comes for as many batches again.
        turns = min(most, 2 * last.steps + len(cuts)) // len(cuts)
        steps = min(turns * len(cuts), (self.samples - end) // size)
        return [(position + step * size, size, low, high) for step in range(1, steps + 1)]

    def _resolve(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples:
        """Return the samples in slots [low, high) of some batches, end to end."""
        begin, size, low, high = np.array(cuts).T
        sizes = np.minimum(size, self.samples - begin)
        wrong = (begin < 0) | (size < 1) | (low < 0) | (low > high) | (high > sizes)
        if len(cuts) == 1 or wrong.any():
            sizes = np.array([self._count(*cut) for cut in cuts])  # which says what is wrong
        samples = self._batches(epoch, begin, sizes)
        if (high - low != sizes).any():
            samples = samples.within(sizes, low, high)
        if not len(samples.slot):
            return SlotSamples(rows=np.empty((0, 2), np.int64), epochs=np.empty(0, np.int64))
        found = []
        for part, own_epoch, at in samples.runs():
            own = self._parts[part].samples_at(own_epoch, samples.lane[at], samples.offset[at])
            own.rows[:, 0] += self._first_shard[part]
            found.append(own)
        joined = SlotSamples.end_to_end(found)
        back = np.empty_like(samples.slot)
        back[samples.slot] = np.arange(len(back))
        epochs = np.full(len(back), samples.epoch[0])
        if (samples.epoch != epochs[0]).any():
            epochs = np.repeat(samples.epoch, samples.count)[back]
        rows = joined.rows.take(back, axis=0)  # takes a tenth of the time of an index
        occurrences = None if joined.occurrences is None else joined.occurrences[back]
        return SlotSamples(rows=rows, epochs=epochs, occurrences=occurrences)

    def _batches(self, epoch: int, begin: Ints, sizes: Ints) -> _Samples:
        """Return the samples of batches, part by part and in these batch by batch."""
        first = epoch * self.samples + begin
        if (first[1:] == (first + sizes)[:-1]).all():  # they follow one another
            counts = self._stream.counts_at(np.append(first, first[-1] + sizes[-1]))
            before, after = counts[:-1], counts[1:]
        else:
            borders, places = np.unique([first, first + sizes], return_inverse=True)
            before, after = self._stream.counts_at(borders)[places.reshape(2, -1)]
        part, batch = np.nonzero((after - before).T)
        before = before[batch, part]
        count = after[batch, part] - before
        slot = SlotGroups(part, batch, count, before, sizes).slots()
        groups = np.repeat(np.arange(len(part)), count) if self._has_lanes else None
        # A part's samples of a batch may be of several of its epochs.
        own = self._samples[part]
        own_epoch, position = np.divmod(before, own)
        epochs = (position + count - 1) // own + 1
        later = np.arange(int(epochs.sum())) - np.repeat(np.cumsum(epochs) - epochs, epochs)
        part, own = np.repeat(part, epochs), np.repeat(own, epochs)
        end = np.minimum(np.repeat(position + count, epochs) - later * own, own)
        position = np.where(later > 0, 0, np.repeat(position, epochs))
        count, own_epoch = end - position, np.repeat(own_epoch, epochs) + later
        offset = np.arange(len(slot))
        offset += np.repeat(position - (np.cumsum(count) - count), count)
        if groups is None:
            return _Samples(part, own_epoch, count, np.zeros_like(offset), offset, slot)
        offset, lane = np.divmod(offset, np.repeat(self._lanes[part], count))
        slots, slot = slot, np.empty_like(slot)
        slot[sorted_by(groups * int(self._lanes.max()) + lane)] = slots
        return _Samples(part, own_epoch, count, lane, offset, slot)

    def partner_slots(self, epoch: int, position: int, size: int, *, low: int, high: int) -> Ints:
        """Return the slots of the partners of slots [low, high): the other of two neighbours in a
        lane of the same part. The only sample of a lane has the one before it of its part, and the
        only sample of a part itself."""
        with self._lock:
            count = np.array([self._count(position, size)])
            samples = self._batches(epoch, np.array([position]), count)
        part, slot = np.repeat(samples.part, samples.count), samples.slot
        places = np.arange(len(slot))
        lanes = self._first_lane[part] + samples.lane
        by_lane = sorted_by(lanes)
        part, lanes = part[by_lane], lanes[by_lane]
        first, end = (np.searchsorted(lanes, lanes, side=side) for side in ("left", "right"))
        other = first + ((places - first) ^ 1)
        other = np.where(other < end, other, places - 1)
        alone = np.flatnonzero(end - first == 1)
        low_of, high_of = (np.searchsorted(part, part[alone], side=s) for s in ("left", "right"))
        other[alone] = low_of + (alone - low_of - 1) % (high_of - low_of)
        found = np.empty_like(places)
        found[slot[by_lane]] = slot[by_lane[other]]
        return found[low:high]

    def part_counts(self, epoch: int, position: int) -> Ints:
        """Return how many samples each part has before a position, over all epochs: int64, shape
        (parts,)."""
        with self._lock:
            return self._stream.counts(epoch * self.samples + position)

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Return the shards that ranks [first, end) read in any epoch, int64, ascending."""
        if not 0 <= first < end <= world:
            raise PlanError(f"ranks [{first}, {end}): wanted some within [0, {world}).")
        # The slots of a batch vary around the places of its samples by about the root of the parts.
        margin = (_VARIATION + math.sqrt(len(self._parts))) / global_batch
        found: list[Ints] = []
        for number, each in enumerate(self._parts):
            low = math.floor((first / world - margin) * each.lanes - _LANE_VARIATION)
            high = math.ceil((end / world + margin) * each.lanes + _LANE_VARIATION)
            lanes = np.arange(max(0, low), min(high, each.lanes))
            shards = np.flatnonzero(each.sizes) if each.reshuffle else each.shards_of_lanes(lanes)
            found.append(shards + self._first_shard[number])
        return np.concatenate(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """The samples of the steps that follow a cut, which have batches and slots of the same size.

    steps: how many of them `samples` holds.
    """

    epoch: int = -1
    cut: SlotCut = (0, 0, 0, 0)
    steps: int = 0
    samples: SlotSamples | None = None

    @property
    def end(self) -> int:
        """The position after the steps."""
        return self.cut[0] + self.cut[1] * (1 + self.steps)

    def contains(self, epoch: int, position: int) -> bool:
        """Return True for a position of the steps."""
        return epoch == self.epoch and self.cut[0] <= position < self.end

    def take(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples | None:
        """Return the samples of cuts; None unless all of them are known."""
        position, size, low, high = self.cut
        begin = cuts[0][0]
        if self.samples is None or not self.contains(epoch, begin) or begin == position:
            return None
        number, rest = divmod(begin - position, size)
        if rest or number + len(cuts) > self.steps + 1:
            return None
        wanted = range(begin, begin + len(cuts) * size, size)
        if any(cut != (at, size, low, high) for at, cut in zip(wanted, cuts, strict=True)):
            return None
        own = high - low
        return self.samples.take(slice((number - 1) * own, (number - 1 + len(cuts)) * own))


_VARIATION, _LANE_VARIATION = 2.0, 0.25  # samples, lanes


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """The samples of some batches, part by part, in pieces of one epoch of a part.

    part, epoch, count: of each piece, int64, shape (pieces,). lane, offset: of each sample in its
    part. slot: numbered over the batches end to end. int64, shape (n,).
    """

    part: Ints
    epoch: Ints
    count: Ints
    lane: Ints
    offset: Ints
    slot: Ints

    def within(self, sizes: Ints, low: Ints, high: Ints) -> _Samples:
        """Return the samples in slots [low, high) of each batch, numbered from 0 there."""
        slots = np.arange(len(self.slot)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        wanted = (slots >= np.repeat(low, sizes)) & (slots < np.repeat(high, sizes))
        is_own = wanted[self.slot]
        before = np.append(0, np.cumsum(is_own))
        count = np.diff(before[np.append(0, np.cumsum(self.count))])
        some = np.flatnonzero(is_own)
        slot = (np.cumsum(wanted) - 1)[self.slot[some]]
        return _Samples(self.part, self.epoch, count, self.lane[some], self.offset[some], slot)

    def runs(self) -> Iterator[tuple[int, int, slice]]:
        """Yield the part and the epoch of neighbouring pieces, and their samples."""
        is_new = (self.part[1:] != self.part[:-1]) | (self.epoch[1:] != self.epoch[:-1])
        pieces = np.append(np.append(0, np.flatnonzero(is_new) + 1), len(self.part))
        bounds = np.append(0, np.cumsum(self.count))[pieces].tolist()
        parts, epochs = self.part[pieces[:-1]].tolist(), self.epoch[pieces[:-1]].tolist()
        for part, epoch, (begin, end) in zip(parts, epochs, pairwise(bounds), strict=True):
            if begin < end:
                yield part, epoch, slice(begin, end)
