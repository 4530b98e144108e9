"""Search for the fastest loader settings by runs of some seconds.

The search varies one setting after the other, beginning with the defaults. It accepts a value if
two runs are faster by more than two runs with the same settings differ. This finds the large gains
(another thread, more prefetch, another way to read); a full grid would take an hour to find a gain
of a per cent that the next day's noise hides.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache.base import READ_MODE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.cache.base import ReadMode

# Smaller differences are noise, even if two runs happened to agree.
LEAST_NOISE = 0.02
# With more noise than this the machine is busy with other work, and a search finds little.
BUSY_NOISE = 0.1
_BATCH_SIZES = (64, 128, 256, 512)
# The largest gain that the search demands, however noisy the machine is.
MOST_NOISE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """The settings of a native loader that its speed depends on, by the loader's names.

    num_workers: decode threads. prefetch_factor: batches in decoding at a time.
    """

    batch_size: int
    num_workers: int
    prefetch_factor: int = 2
    read: ReadMode = READ_MODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One setting and the values to try, in an order in which speed is expected to have one peak.

    tie: True if the first of values with equal speeds (within 2 %) is better, as fewer threads are;
    False keeps the current value.
    """

    name: str
    values: tuple[Any, ...]
    tie: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search. runs: the samples/s of each run, by the settings that were tried, in
    the order of their first run; noise: as a share."""

    best: LoaderSettings
    runs: Mapping[LoaderSettings, Sequence[float]]
    noise: float


def axes_for(
    start: LoaderSettings, *, cores: int, samples: int, given: Collection[str] = ()
) -> tuple[Axis, ...]:
    """Return the settings to try on a number of cores. samples: of the dataset, the upper bound of
    a batch. given: names of settings that stay as they are."""
    threads = {1, max(1, cores // 2), cores, cores + max(1, cores // 2), start.num_workers}
    sizes = {size for size in _BATCH_SIZES if size <= samples} | {start.batch_size}
    axes = (
        Axis(name="num_workers", values=tuple(sorted(threads)), tie=True),
        Axis(name="prefetch_factor", values=tuple(sorted({1, 2, 4, start.prefetch_factor}))),
        Axis(name="batch_size", values=tuple(sorted(sizes))),
        Axis(name="read", values=("copy", "pread")),
    )
    return tuple(axis for axis in axes if axis.name not in given)


def tune(
    start: LoaderSettings, axes: Sequence[Axis], measure: Callable[[LoaderSettings], float]
) -> SearchResult:
    """Search along one axis after the other, beginning at start, and return the fastest setup.

    axes: each contains start's own value. measure: returns the samples/s of a short run. Raises
    what measure raises.
    """
    search = _SettingsSearch(measure)
    low, high = sorted((search.run(start), search.run(start)))
    noise = min(MOST_NOISE, max(LEAST_NOISE, (high - low) / high))
    best = start
    for axis in axes:
        best = search.along(axis, best, noise)
    return SearchResult(best=best, runs=search.runs, noise=noise)


class _SettingsSearch:
    """The runs of a search so far."""

    def __init__(self, measure: Callable[[LoaderSettings], float]) -> None:
        self._measure = measure
        self.runs: dict[LoaderSettings, list[float]] = {}

    def run(self, setup: LoaderSettings) -> float:
        """Make one more run and return its samples/s."""
        rate = self._measure(setup)
        self.runs.setdefault(setup, []).append(rate)
        return rate

    def beats(self, new: LoaderSettings, best: LoaderSettings, *, by: float) -> bool:
        """Return True if a setup is faster by that share (if negative: slower by no more), in a
        first run and in a second run of both: one lucky run is no reason to change."""
        if self.run(new) <= (1 + by) * statistics.median(self.runs[best]):
            return False
        return self.run(new) > (1 + by) * self.run(best)

    def along(self, axis: Axis, best: LoaderSettings, noise: float) -> LoaderSettings:
        """Return the best setup along one axis: search downwards first, then upwards if that found
        nothing better."""
        begin = place = axis.values.index(getattr(best, axis.name))
        peak = best
        for step, by in ((-1, -LEAST_NOISE if axis.tie else noise), (1, noise)):
            while 0 <= place + step < len(axis.values):
                new = replace(best, **{axis.name: axis.values[place + step]})
                # Compare with the fastest so far, so that several small losses don't add up.
                if not self.beats(new, peak, by=by):
                    break
                best, place = new, place + step
                peak = max(peak, new, key=lambda setup: statistics.median(self.runs[setup]))
            if place != begin:
                break
        return best
