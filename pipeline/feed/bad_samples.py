"""Which samples can't be used, as far as this process has found out, and what stands in for them.

What is remembered from one epoch to the next is what no epoch can change: wrong bytes, a header
that can't be read, an image that is decoded whole. Damage that only some random windows reach is
known for its epoch only; a restart would not know more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import TooManyBadSamplesError
from penstock.pipeline.plan.substitutes import ATTEMPTS, substitute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.readers.source import Source

NAMED = 10  # bad samples that one message names
REMEDY = (
    "Look at why; then leave them out (dataset.subset), or mend or delete them in the source and "
    "make its index or its pack from it again; or raise max_bad=."
)


def listed(reasons: Mapping[int, str]) -> str:
    """The first bad samples with their reasons, for a message."""
    named = "; ".join(f"{i} ({reasons[i]})" for i in sorted(reasons)[:NAMED])
    more = len(reasons) - NAMED
    return named + (f"; and {more} more" if more > 0 else "")


class BadSamples:
    """What a loader knows of samples that can't be used. Any thread may ask and tell."""

    def __init__(self, source: Source, *, seed: int) -> None:
        self._source, self._contents = source, source.contents
        self._seed = seed
        self._always: dict[int, str] = {}
        self._in_epoch: dict[int, dict[int, str]] = {}
        self._seen = np.zeros((self._contents.samples + 7) // 8, np.uint8)

    def reason(self, epoch: int, sample_id: int) -> str | None:
        """Why a sample can't be used in an epoch, as far as it is known."""
        return self._always.get(sample_id) or self._in_epoch.get(epoch, {}).get(sample_id)

    def reasons(self, epoch: int, ids: NDArray[np.int64]) -> dict[int, str]:
        """The rows of these ids whose samples are known to be bad, and why."""
        if not self._always and epoch not in self._in_epoch:
            return {}
        reasons = ((row, self.reason(epoch, i)) for row, i in enumerate(ids.tolist()))
        return {row: reason for row, reason in reasons if reason is not None}

    def learn(self, epoch: int, sample_id: int, reason: str, *, lasting: bool) -> None:
        """Remember that a sample is bad. lasting: in every epoch."""
        if lasting:
            self._always[sample_id] = reason
        else:
            self._in_epoch.setdefault(epoch, {})[sample_id] = reason

    def substitute(self, epoch: int, sample_id: int) -> int:
        """The first attempt that isn't known to be bad. Raises TooManyBadSamplesError when the
        attempts run out."""
        contents, own = self._contents, self._source.rows(np.array([sample_id], np.int64))
        place = int(contents.places(own)[0])
        for attempt in range(ATTEMPTS):
            found = substitute(
                sample_id,
                attempt,
                seed=self._seed,
                epoch=epoch,
                starts=contents.starts,
                sizes=contents.sizes,
                place=place,
            )
            candidate = int(self._source.ids(contents.rows(np.array([found], np.int64)))[0])
            if candidate != sample_id and self.reason(epoch, candidate) is None:
                return candidate
        known = {**self._always, **self._in_epoch.get(epoch, {})}
        raise TooManyBadSamplesError(
            f"Sample {sample_id} is bad ({self.reason(epoch, sample_id)}), and so are all "
            f"{ATTEMPTS} substitutes that were tried. Bad: {listed(known)}. {REMEDY}",
            sample_ids=tuple(sorted(known)),
        )

    def unseen(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of these (shard, row) have headers that nobody has looked at in this process:
        positions, int64."""
        places = self._contents.places(rows)
        return np.flatnonzero((self._seen[places >> 3] & _bits(places)) == 0)

    def mark_seen(self, rows: NDArray[np.int64]) -> None:
        """Remember that the headers of these (shard, row) can be parsed.

        One bit a sample; one that two threads lose costs another look.
        """
        places = self._contents.places(rows)
        np.bitwise_or.at(self._seen, places >> 3, _bits(places))

    def forget_before(self, epoch: int) -> None:
        """Drop what held for earlier epochs only."""
        for old in [e for e in list(self._in_epoch) if e < epoch]:
            del self._in_epoch[old]


def _bits(places: NDArray[np.int64]) -> NDArray[np.uint8]:
    bits: NDArray[np.uint8] = np.left_shift(1, places & 7).astype(np.uint8)
    return bits
