"""Samples that can't be used: who stands in for them, how many there were, and when it is enough.

A substitute is a pure function of (seed, epoch, sample id, attempt), so that batch, world and
restart don't change it: a few attempts in the same shard, whose bytes are at hand, then anywhere.
A substitute that is bad too leads to the next attempt.

What is remembered from one epoch to the next is what no epoch can change: wrong bytes, a header
that can't be read, an image that is decoded whole. Damage that only some random windows reach is
known for its epoch only; a restart would not know more.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base.hashing import keyed_hash
from penstock.cache.errors import (
    PenstockError,
    PenstockWarning,
    RankFailedError,
    TooManyBadSamplesError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.pipeline.feed.agreement import Agreement
    from penstock.pipeline.feed.quarantine import QuarantineFile
    from penstock.pipeline.plan.steps import Cursor
    from penstock.pipeline.report.meter import Meter
    from penstock.readers import Dataset

SAME_SHARD_ATTEMPTS = 8
ATTEMPTS = 64  # with half of a dataset bad, one sample in 10^19 finds no substitute
NAMED = 10  # bad samples that one message names
TOLD_IDS = 1000  # ids that one rank tells the others

_SALT = 0x5AB57170  # keeps these hashes apart from those of order and draws
_EPOCHS_KEPT = 4
_NOTHING = [-1, 0]  # before any batch


def substitute(
    sample_id: int,
    attempt: int,
    *,
    seed: int,
    epoch: int,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> int:
    """The id that stands in for a bad sample. attempt: from 0.

    starts, sizes: first id and samples of each shard, shape (shards,). The first attempts stay in
    the sample's shard, the later ones draw from all samples; ids may repeat.
    """
    draw = int(keyed_hash(seed, epoch, sample_id, attempt, _SALT))
    if attempt < SAME_SHARD_ATTEMPTS:
        shard = int(np.searchsorted(starts, sample_id, side="right")) - 1
        return int(starts[shard]) + draw % int(sizes[shard])
    return draw % int(starts[-1] + sizes[-1])


class BadSamples:
    """What a loader knows of bad samples. Reading threads ask and tell; one thread hands out."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        max_bad: float,
        agreement: Agreement,
        report: QuarantineFile,
        meter: Meter,
    ) -> None:
        """max_bad: share of the dataset's samples, per epoch and over all ranks, past which every
        rank stops."""
        index = dataset.index
        self._dataset = dataset
        self._starts, self._sizes, self._samples = index.starts, index.sizes, index.samples
        self._seed = seed
        self._max_bad = max_bad
        self._agreement = agreement
        self._report = report
        self._meter = meter
        self._always: dict[int, str] = {}
        self._in_epoch: dict[int, dict[int, str]] = {}
        self._checked = np.zeros((index.samples + 7) // 8, np.uint8)
        self._met: dict[int, str] = {}  # handed out, in any epoch
        self._counted: dict[int, set[int]] = {}  # by epoch: told to all ranks
        self._epoch: int | None = None  # of what was handed out last; None: nothing yet
        self._stopped = False
        self._count, self._before = 0, 0  # in that epoch: in this process, and before a restart

    # -- asked and told while batches are prepared

    def reason(self, epoch: int, sample_id: int) -> str | None:
        """Why a sample can't be used in an epoch, as far as it is known."""
        return self._always.get(sample_id) or self._in_epoch.get(epoch, {}).get(sample_id)

    def known(self, epoch: int, ids: NDArray[np.int64]) -> dict[int, str]:
        """Rows of ids that are known to be bad, and why."""
        if not self._always and epoch not in self._in_epoch:
            return {}
        reasons = ((row, self.reason(epoch, i)) for row, i in enumerate(ids.tolist()))
        return {row: reason for row, reason in reasons if reason is not None}

    def learn(self, epoch: int, sample_id: int, reason: str, *, lasting: bool) -> None:
        """A sample is bad; lasting: in every epoch."""
        if lasting:
            self._always[sample_id] = reason
        else:
            self._in_epoch.setdefault(epoch, {})[sample_id] = reason

    def substitute(self, epoch: int, sample_id: int) -> int:
        """The first attempt that isn't known to be bad. Raises TooManyBadSamplesError when the
        attempts run out."""
        for attempt in range(ATTEMPTS):
            candidate = substitute(
                sample_id,
                attempt,
                seed=self._seed,
                epoch=epoch,
                starts=self._starts,
                sizes=self._sizes,
            )
            if candidate != sample_id and self.reason(epoch, candidate) is None:
                return candidate
        known = {**self._always, **self._in_epoch.get(epoch, {})}
        raise TooManyBadSamplesError(
            f"Sample {sample_id} is bad ({self.reason(epoch, sample_id)}), and so are all of "
            f"{ATTEMPTS} substitutes that were tried. Bad: {_listed(known)}. {_REMEDY}",
            sample_ids=tuple(sorted(known)),
        )

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """(shard, row) of sample ids, int64, shape (n, 2)."""
        shards = np.searchsorted(self._starts, ids, side="right") - 1
        return np.stack([shards, ids - self._starts[shards]], axis=1)

    def unchecked(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of ids that `checked` wasn't told of."""
        return np.flatnonzero((self._checked[ids >> 3] & _bits(ids)) == 0)

    def checked(self, ids: NDArray[np.int64]) -> None:
        """These samples' headers are well. One bit a sample; a bit that two threads lose costs
        another look."""
        np.bitwise_or.at(self._checked, ids >> 3, _bits(ids))

    # -- when a batch is handed out

    def check(self, asked: Cursor) -> None:
        """Raise what a rank told all to stop for: TooManyBadSamplesError, RankFailedError.

        A notice holds for what comes after the batch that it was sent with: that one every rank
        hands out, also a rank that hears of it before, as the others wait for it in their step.
        """
        notice = self._agreement.stopped()
        if notice is None:
            return
        if not self._stopped and (asked.epoch, asked.position) <= tuple(notice["last"]):
            return
        is_first, self._stopped = not self._stopped, True
        if (
            is_first and "failed" not in notice
        ):  # others stop here too; a failed rank isn't waited for
            self._agreement.end_together()
        raise self._error(notice)

    def handed_out(self, at: Cursor, bad: Mapping[int, str]) -> None:
        """Count, report and, past the limit, tell every rank to stop at the next batch.

        at: where the batch begins. bad: this rank's own samples of it, id -> reason. Again for the
        same batch, it counts nothing twice for the job.
        """
        epoch = at.epoch
        if at.position == 0 or self._epoch not in (None, epoch):
            self.begin(epoch)
        self._epoch = epoch
        if not bad:
            return
        self._count += len(bad)
        self._meter.bad += len(bad)
        counted = self._counted.setdefault(epoch, set())
        new = [sample_id for sample_id in bad if sample_id not in counted]
        counted.update(new)
        first_ever = not self._met
        self._write({i: why for i, why in bad.items() if i not in self._met}, epoch)
        self._met.update(bad)
        if new:
            total = self._agreement.add(_counter(epoch), len(new)) + self._before
            if total > self._max_bad * self._samples:
                self._agreement.stop(self._notice(at, total))
        if first_ever:
            self._warn(*next(iter(bad.items())))

    def failed(self, error: Exception) -> None:
        """This rank can't go on: tell the others, so that none waits for it."""
        if self._agreement.is_shared:
            text = f"{type(error).__name__}: {error}"
            notice = {"rank": self._agreement.rank, "failed": text[:2000], "last": _NOTHING}
            self._agreement.stop(notice)

    # -- state

    def count_before(self, at: Cursor) -> int:
        """Bad samples of an epoch before a place, over all ranks: what a state says.

        The same on every rank, and never waited for: what the ranks had told by the time that the
        first of them asked. Ranks that can't reach one another agree on none but what a state
        brought; one rank alone knows its own.
        """
        if at.position == 0:
            return 0
        if self._agreement.size == 1:
            return self._count + self._before
        told = self._agreement.count_at(f"{at.epoch}-{at.position}", _counter(at.epoch))
        return self._before + (told or 0)

    def begin(self, epoch: int) -> None:
        """An epoch begins, so none of it is counted yet."""
        self._epoch, self._count, self._before = epoch, 0, 0
        self._forget_before(epoch)

    def restore(self, bad: int) -> None:
        """Go on in the middle of an epoch of which so many were counted before. All ranks do so
        together, and what was told to all is forgotten."""
        self._epoch, self._count, self._before = None, 0, bad
        self._counted.clear()
        self._stopped = False
        self._agreement.begin()

    # -- inside

    def _forget_before(self, epoch: int) -> None:
        for old in [e for e in list(self._in_epoch) if e < epoch]:
            del self._in_epoch[old]
        while len(self._counted) > _EPOCHS_KEPT:
            del self._counted[next(iter(self._counted))]

    def _write(self, bad: Mapping[int, str], epoch: int) -> None:
        if bad:
            names = self._names(list(bad))
            self._report.append(
                [
                    {"id": i, "name": name, "reason": why, "epoch": epoch}
                    for (i, why), name in zip(bad.items(), names, strict=True)
                ]
            )
            self._meter.quarantine = self._report.path

    def _names(self, ids: list[int]) -> list[str]:
        try:
            return self._dataset.names(ids)
        except PenstockError:  # a shard that can't be opened any more: the ids will do
            return [""] * len(ids)

    def _warn(self, sample_id: int, reason: str) -> None:
        where = f", listed in {self._report.path}" if self._report.path else ""
        warnings.warn(
            f"Sample {sample_id} is bad: {reason}. It and others like it are replaced by other "
            f'samples (pad="mask": valid=False){where}. More than max_bad={self._max_bad} of '
            "an epoch stop the job.",
            PenstockWarning,
            stacklevel=4,
        )

    def _notice(self, at: Cursor, total: int) -> dict[str, Any]:
        ids = sorted(self._counted[at.epoch])
        return {
            "rank": self._agreement.rank,
            "epoch": at.epoch,
            "last": [at.epoch, at.position],
            "total": total,
            "ids": ids[:TOLD_IDS],
            "reasons": {str(i): self._met[i] for i in ids[:NAMED]},
            "file": self._report.path,
        }

    def _error(self, notice: Mapping[str, Any]) -> PenstockError:
        rank = int(notice.get("rank", 0))
        if "failed" in notice:
            return RankFailedError(
                f"Rank {rank} failed, so every rank stops here: {notice['failed']}", rank=rank
            )
        epoch, total = int(notice["epoch"]), int(notice["total"])
        reasons = {int(i): str(why) for i, why in notice["reasons"].items()}
        mine = self._counted.get(epoch, set())
        reasons |= {i: self._met[i] for i in sorted(mine) if i in self._met}
        ids = tuple(sorted(mine | {int(i) for i in notice["ids"]}))
        files = [path for path in dict.fromkeys((notice["file"], self._report.path)) if path]
        listed = f" All of them: {' and '.join(files)}." if files else ""
        return TooManyBadSamplesError(
            f"{total} bad samples in epoch {epoch} are more than max_bad={self._max_bad} of "
            f"{self._samples:,} samples. Rank {rank} passed the limit, and every rank stops. Bad: "
            f"{_listed(reasons)}.{listed} {_REMEDY}",
            sample_ids=ids,
        )


_REMEDY = (
    "Look at why; then pack the dataset (`penstock pack` verifies every image and sets bad ones "
    "aside) or run `penstock index` on the folder again; or raise max_bad=."
)


def _listed(reasons: Mapping[int, str]) -> str:
    named = "; ".join(f"{i} ({reasons[i]})" for i in sorted(reasons)[:NAMED])
    more = len(reasons) - NAMED
    return named + (f"; and {more} more" if more > 0 else "")


def _counter(epoch: int) -> str:
    return f"bad-{epoch}"


def _bits(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    bits: NDArray[np.uint8] = np.left_shift(1, ids & 7).astype(np.uint8)
    return bits
