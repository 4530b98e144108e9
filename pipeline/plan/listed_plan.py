"""Deliver the samples that a sampler lists, in its order. Pure, except for the sampler.

Position p of an epoch delivers the p-th sample of the epoch's list. A global batch is the positions
[p, p + B), and ranks take slices of it: so the sampler knows nothing of ranks, and its epochs are
the same at any number of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError, ResumeError
from penstock.pipeline.plan.order import JobPlan, SlotSamples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.pipeline.plan.lanes import Ints
    from penstock.pipeline.plan.order import SlotCut
    from penstock.readers import Contents, EpochLists


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSettings:
    """The settings of a plan by lists. samples: of an epoch. first: the hash of the first list.
    Raises ValueError for values that no list has."""

    samples: int
    first: str

    def __post_init__(self) -> None:
        if not 0 < self.samples < 2**53 or len(self.first) > 64:
            raise ValueError(f"{self.samples} samples")

    @classmethod
    def of(cls, lists: EpochLists, *, seed: int) -> ListSettings:
        """Return the settings of a job's first start."""
        return cls(samples=lists.samples, first=lists.fingerprint(seed))

    @property
    def text(self) -> str:
        """A text of the lists, to compare them."""
        return f"sampler {self.first[:12]}"

    def check(self, lists: EpochLists | None, *, seed: int) -> None:
        """Raise ResumeError unless these lists are those of the settings."""
        if lists is None:
            raise ResumeError(
                "State was saved with a sampler, and this loader has none. Pass the same sampler=, "
                "or start without a state."
            )
        own = ListSettings.of(lists, seed=seed)
        if own != self:
            raise ResumeError(
                f"State was saved with a sampler of {self.samples:,} samples an epoch (first list "
                f"{self.first[:12]}), and this loader's has {own.samples:,} ({own.first[:12]}). "
                "Pass the sampler with the job's arguments, or start without a state."
            )


class ListedPlan(JobPlan):
    """The mapping from positions of a sampler's lists to samples. Thread-safe.

    contents: the samples, with their lists. Attributes: as in `JobPlan`.
    """

    def __init__(self, contents: Contents, settings: ListSettings, *, seed: int) -> None:
        assert contents.lists is not None
        self._contents, self._lists, self._seed = contents, contents.lists, seed
        self._settings = settings
        self.sizes, self.samples = contents.sizes, settings.samples
        self.lanes, self.window, self.bins = 1, 1, 1

    @property
    def open_shards(self) -> float:
        """Number of shards from which a batch may have samples."""
        return float(np.count_nonzero(self.sizes))

    @property
    def fingerprint(self) -> str:
        """Hash of all that the order depends on, 64 hex digits."""
        text = f"listed {self._seed} {self._settings} {self.sizes.tolist()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def places_together(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples:
        """Return `places` of several batches of an epoch, end to end, by one computation."""
        for cut in cuts:
            self._count(*cut)
        found = self._lists.of(self._seed, epoch)
        some = np.concatenate([np.arange(at + low, at + high) for at, _, low, high in cuts])
        return SlotSamples(
            rows=self._contents.rows(found.positions[some]),
            occurrences=None if found.occurrences is None else found.occurrences[some],
        )

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Return the shards that ranks [first, end) may read: all of them."""
        del global_batch, first, end, world
        return np.flatnonzero(self.sizes)


def refuse_order_settings(given: Mapping[str, float | None]) -> None:
    """Raise ConfigError for settings of Penstock's own order beside a sampler."""
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"{name}={value} and sampler= contradict each other: the sampler gives the order. "
                "Drop one of them."
            )
