"""Record bad samples, choose their substitutes, and count them over all ranks against `max_bad`.

A fault that shows in every epoch is recorded for all epochs: wrong bytes, a header that can't be
parsed, an image that is decoded as a whole. Damage that only some random windows touch is recorded
for that delivery only, because a restarted job wouldn't know more either.

The count is published as batches are delivered, and no rank waits for it. When it passes the limit,
every rank stops at its next batch and lists the bad samples.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import PenstockError, PenstockWarning, TooManyBadSamplesError
from penstock.pipeline.members import rank_failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.pipeline.members import Membership
    from penstock.pipeline.plan import Cursor, DeliveredSample, Delivery
    from penstock.pipeline.report import Meter, QuarantineFile
    from penstock.readers import Source

MOST_NAMED = 10  # bad samples that one message names
REMEDY = (
    "Check the reasons; then leave the samples out (dataset.subset), or repair or delete them in "
    "the source and make its index or its pack again; or raise max_bad=."
)
Namer = Callable[[list[int]], Sequence[str]]
"""Returns the names of samples by their ids."""


def sample_names(ids: list[int], namer: Namer | None) -> Sequence[str]:
    """Return the names of samples; empty ones if there are none, or if their shard can't be opened
    any more."""
    with contextlib.suppress(PenstockError):
        if namer is not None:
            return namer(ids)
    return [""] * len(ids)


def listed_reasons(reasons: Mapping[int, str], namer: Namer | None) -> str:
    """Return the first bad samples with their names and reasons, for a message."""
    ids = sorted(reasons)[:MOST_NAMED]
    labels = zip(ids, sample_names(ids, namer), strict=True)
    named = "; ".join(f"{i}{name and f', {name}'} ({reasons[i]})" for i, name in labels)
    more = len(reasons) - MOST_NAMED
    return named + (f"; and {more} more" if more > 0 else "")


class BadSamples:
    """The bad samples of one loader, with reasons. Any thread may call it."""

    def __init__(self, source: Source, *, seed: int) -> None:
        self._source, self._contents = source, source.contents
        self._seed = seed
        self._always: dict[int, str] = {}
        self._in_epoch: dict[int, dict[DeliveredSample, str]] = {}
        # The places at which the parts of a mixture end.
        mixture = self._contents.mixture
        self._ends = None if mixture is None else np.cumsum(mixture.sizes)
        self._seen = np.zeros((self._contents.samples + 7) // 8, np.uint8)

    def reason(self, epoch: int, sample: DeliveredSample) -> str | None:
        """Return the reason why a sample can't be used in a delivery; None if none is known.

        epoch: of the stream, in which the sample is delivered.
        """
        return self._always.get(sample.sample_id) or self._in_epoch.get(epoch, {}).get(sample)

    def reasons(self, epoch: int, ids: NDArray[np.int64], delivery: Delivery) -> dict[int, str]:
        """Return the rows of these ids whose samples are known to be bad, with reasons."""
        if not self._always and epoch not in self._in_epoch:
            return {}
        every = [self.reason(epoch, delivery.of(row, i)) for row, i in enumerate(ids.tolist())]
        return {row: reason for row, reason in enumerate(every) if reason is not None}

    def record(self, epoch: int, sample: DeliveredSample, reason: str, *, lasting: bool) -> None:
        """Record that a sample is bad in a delivery. lasting: in every one."""
        if lasting:
            self._always[sample.sample_id] = reason
        else:
            self._in_epoch.setdefault(epoch, {})[sample] = reason

    def substitute(self, epoch: int, sample: DeliveredSample) -> int:
        """Return the first substitute that isn't known to be bad, from the same part.

        Raises TooManyBadSamplesError after `ATTEMPTS` bad substitutes.
        """
        from penstock.pipeline.plan import ATTEMPTS, substitutes  # needed for bad samples only

        sample_id = sample.sample_id
        contents, own = self._contents, self._source.rows(np.array([sample_id], np.int64))
        place, within = int(contents.places(own)[0]), None
        if self._ends is not None:
            part = int(np.searchsorted(self._ends, place, side="right"))
            within = int(self._ends[part - 1]) if part else 0, int(self._ends[part])
        for found in substitutes(
            sample_id,
            seed=self._seed,
            epoch=sample.epoch,
            occurrence=sample.occurrence,
            starts=contents.starts,
            sizes=contents.sizes,
            place=place,
            within=within,
        ):
            candidate = int(self._source.ids(contents.rows(np.array([found], np.int64)))[0])
            one = sample._replace(sample_id=candidate)
            if candidate != sample_id and self.reason(epoch, one) is None:
                return candidate
        in_epoch = {each.sample_id: why for each, why in self._in_epoch.get(epoch, {}).items()}
        known = {**self._always, **in_epoch}
        raise TooManyBadSamplesError(
            f"Sample {sample_id} is bad ({self.reason(epoch, sample)}), and so are all "
            f"{ATTEMPTS} substitutes that were tried. Bad: "
            f"{listed_reasons(known, self._source.names)}. {REMEDY}",
            sample_ids=tuple(sorted(known)),
        )

    def unseen(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices, int64, of the (shard, row) pairs whose headers aren't checked yet."""
        places = self._contents.places(rows)
        return np.flatnonzero((self._seen[places >> 3] & _bits(places)) == 0)

    def mark_seen(self, rows: NDArray[np.int64]) -> None:
        """Record that the headers of these (shard, row) pairs can be parsed.

        It takes one bit per sample. If two threads lose one, that header is checked again.
        """
        places = self._contents.places(rows)
        np.bitwise_or.at(self._seen, places >> 3, _bits(places))

    def forget_before(self, epoch: int) -> None:
        """Drop the records of earlier epochs."""
        for old in [e for e in list(self._in_epoch) if e < epoch]:
            del self._in_epoch[old]


def _bits(places: NDArray[np.int64]) -> NDArray[np.uint8]:
    bits: NDArray[np.uint8] = np.left_shift(1, places & 7).astype(np.uint8)
    return bits


NOTICE_IDS = 1000  # the most ids in a notice to the other ranks

_EPOCHS_KEPT = 4


@dataclass(eq=False, repr=False, kw_only=True)
class BadCount:
    """Counts and reports bad samples as batches are delivered, on the delivering thread.

    The caller provides each batch's position, and whether it begins an epoch.

    samples: different ones of an epoch, over all ranks. names: returns the names of samples; None
    if they have none. bad_samples: drops its records of earlier epochs. remedy: for a dataset with
    too many bad samples. max_bad: every rank stops if more than this share of the samples is bad in
    an epoch.
    """

    samples: int
    names: Namer | None
    bad_samples: BadSamples | None
    remedy: str = REMEDY
    max_bad: float
    membership: Membership
    report: QuarantineFile
    meter: Meter

    def __post_init__(self) -> None:
        self._reasons: dict[int, str] = {}  # of delivered bad samples, in any epoch
        self._counted: dict[int, set[int]] = {}  # ids that were published, by epoch
        self._stopped = False
        self._earlier: list[tuple[int, int]] = []  # positions and counts that add up to _before
        self._published: list[tuple[int, int]] = []  # those of this membership, when last read
        # In this epoch: in this process, before a restart, and over all ranks as last read.
        self._count, self._before, self._total = 0, 0, 0
        self._past: list[tuple[int, int]] = []  # where a batch began, and the count after it

    def check(self, cursor: Cursor) -> None:
        """Raise the error for which a rank asked all ranks to stop, if there is one.

        This is TooManyBadSamplesError or RankFailedError. A notice applies after the batch with
        which it was sent. Every rank still delivers that batch, even if it reads the notice
        earlier, because the others wait for it in their training step.
        """
        notice = self.membership.stop_notice()
        if notice is None:
            return
        if not self._stopped and (cursor.epoch, cursor.position) <= tuple(notice["last"]):
            return
        is_first, self._stopped = not self._stopped, True
        if is_first and "failed" not in notice:  # no rank waits for a failed one
            self.membership.end_together()
        raise self._error(notice)

    def count(self, at: Cursor, bad: Mapping[int, str], *, begins_epoch: bool) -> None:
        """Count and report a batch's bad samples; past the limit, ask every rank to stop.

        The ranks stop at their next batch. at: where the batch begins. bad: reasons by id, of this
        rank's own samples. A batch that is delivered again isn't counted again for the job.
        begins_epoch: this is the first batch of the epoch that is counted.
        """
        epoch = at.epoch
        if begins_epoch:
            self._count, self._before, self._total = 0, 0, 0
            self._past, self._earlier = [], []
            if self.bad_samples is not None:
                self.bad_samples.forget_before(epoch)
            while len(self._counted) > _EPOCHS_KEPT:
                del self._counted[next(iter(self._counted))]
        if not bad:
            return
        self._count += len(bad)
        self.meter.bad += len(bad)
        if self.meter.parts is not None:
            self.meter.parts.count_bad(bad)
        counted = self._counted.setdefault(epoch, set())
        new = [sample_id for sample_id in bad if sample_id not in counted]
        counted.update(new)
        first_ever = not self._reasons
        self._write({i: why for i, why in bad.items() if i not in self._reasons}, epoch)
        self._reasons.update(bad)
        if new:
            # Of several processes with the same rank, one publishes the count.
            mine = len(new) if self.membership.speaks_for_rank else 0
            self._total = self.membership.add(_counter(epoch), mine, place=at.position)
            self._past.append((at.position, self._total))
            total = self._total + self._before
            if total > self.max_bad * self.samples:
                self.membership.stop(self._notice(at, total))
        if first_ever:
            self._warn(*next(iter(bad.items())))

    def report_failure(self, error: Exception) -> None:
        """Notify the other ranks that this one can't continue, so that none waits for it."""
        self.membership.fail(error)

    # -- state

    def count_before(self, at: Cursor) -> int:
        """Return the bad samples of an epoch before a position, over all ranks, for a state.

        The first rank that asks publishes the count, and the others use it, so the count is the
        same on every rank, and none waits. Ranks without a common store agree only on the count of
        a restored state. A single rank uses its own count.
        """
        if at.position == 0:
            return 0
        if self.membership.world.size == 1:
            return self._count + self._before
        shared = self.membership.count_at(f"{at.epoch}-{at.position}", _counter(at.epoch))
        return self._before + (shared or 0)

    @property
    def known(self) -> int:
        """Bad samples of this epoch so far, as last read by this rank, without a request."""
        return self._before + max(self._count, self._total)

    def known_before(self, at: Cursor) -> int:
        """Return the bad samples of this epoch before a position that was already passed.

        The later ones are delivered, and counted, again. The count covers all ranks if their store
        still answers; otherwise it is the one that this rank had read at that position.
        """
        later = sum(count for place, count in self._earlier if place >= at.position)
        counts = self.membership.additions(_counter(at.epoch))
        if counts is not None:
            self._published = counts
            total = sum(count for place, count in counts if place < at.position)
            return self._before - later + total
        totals = [total for position, total in self._past if position < at.position]
        return self._before - later + max(totals, default=0)

    def take_over(self, other: BadCount) -> None:
        """Continue the counts of another object, which counts no more."""
        vars(self).update((k, v) for k, v in vars(other).items() if k.startswith("_"))

    def restore(self, bad: int, *, before: int = 0, begins: bool = True) -> None:
        """Continue an epoch of which `bad` samples were counted earlier; all ranks do so together.

        Published counts are dropped. begins: True among the same ranks; False after rejoining
        other ranks at the position `before`.
        """
        self._count, self._before, self._total = 0, bad, 0
        self._past = []
        self._counted.clear()
        self._stopped = False
        counts = [] if begins else self._earlier + self._published
        self._earlier = [each for each in counts if each[0] < before]
        self._published = []

    def _write(self, bad: Mapping[int, str], epoch: int) -> None:
        if not bad:
            return
        names = sample_names([*bad], self.names)
        found: list[dict[str, str | int]] = [
            {"id": i, "name": name, "reason": why, "epoch": epoch}
            for (i, why), name in zip(bad.items(), names, strict=True)
        ]
        self.report.append(found)
        self.meter.quarantine = self.report.path

    def _warn(self, sample_id: int, reason: str) -> None:
        listed = f", listed in {self.report.path}" if self.report.path else ""
        (name,) = sample_names([sample_id], self.names)
        warnings.warn(
            f"Sample {sample_id} is bad: {reason}{name and f' ({name})'}. Bad samples are replaced "
            f'by other samples (with pad="mask": valid=False){listed}. The job stops when more '
            f"than max_bad={self.max_bad} of an epoch are bad.",
            PenstockWarning,
            stacklevel=5,
        )

    def _notice(self, at: Cursor, total: int) -> dict[str, Any]:
        ids = sorted(self._counted[at.epoch])
        return {
            "rank": self.membership.world.rank,
            "epoch": at.epoch,
            "last": [at.epoch, at.position],
            "total": total,
            "ids": ids[:NOTICE_IDS],
            "reasons": {str(i): self._reasons[i] for i in ids[:MOST_NAMED]},
            "file": self.report.path,
        }

    def _error(self, notice: Mapping[str, Any]) -> PenstockError:
        if "failed" in notice:
            return rank_failure(notice)
        rank, epoch, total = int(notice["rank"]), int(notice["epoch"]), int(notice["total"])
        reasons = {int(i): str(why) for i, why in notice["reasons"].items()}
        mine = self._counted.get(epoch, set())
        reasons |= {i: self._reasons[i] for i in sorted(mine) if i in self._reasons}
        ids = tuple(sorted(mine | {int(i) for i in notice["ids"]}))
        files = [path for path in dict.fromkeys((notice["file"], self.report.path)) if path]
        more = f" All of them: {' and '.join(files)}." if files else ""
        found = "1 bad sample" if total == 1 else f"{total:,} bad samples"
        allowing = math.ceil(100 * total / self.samples) / 100
        return TooManyBadSamplesError(
            f"{found} in epoch {epoch} {'is' if total == 1 else 'are'} more than "
            f"max_bad={self.max_bad} of {self.samples:,} samples. Rank {rank} passed the limit, "
            "and every rank stops. Bad: "
            f"{listed_reasons(reasons, self.names) or 'found before this start'}.{more} "
            f"{self.remedy} For example, DataLoader(…, max_bad={allowing:g}) accepts "
            f"{allowing:.0%} of bad samples.",
            sample_ids=ids,
        )


def _counter(epoch: int) -> str:
    return f"bad-{epoch}"
