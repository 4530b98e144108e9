"""Remember bad samples, choose their substitutes, and count them over all ranks against `max_bad`.

What holds in every epoch is remembered from one epoch to the next: wrong bytes, a header that can't
be parsed, an image that is decoded whole. Damage that only some random windows reach is remembered
for its epoch alone, because a restart would not know more either.

The count is published as batches are delivered, and no rank waits for it. Past the limit every rank
stops at its next batch, with the list.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import (
    JobStoreError,
    PenstockError,
    PenstockWarning,
    RankFailedError,
    TooManyBadSamplesError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.pipeline.members import LoaderChannel
    from penstock.pipeline.plan import Cursor
    from penstock.pipeline.report import Meter, QuarantineFile
    from penstock.readers import Source

MOST_NAMED = 10  # bad samples that one message names
REMEDY = (
    "Look at why; then leave them out (dataset.subset), or mend or delete them in the source and "
    "make its index or its pack from it again; or raise max_bad=."
)


def listed_reasons(reasons: Mapping[int, str]) -> str:
    """The first bad samples with their reasons, for a message."""
    named = "; ".join(f"{i} ({reasons[i]})" for i in sorted(reasons)[:MOST_NAMED])
    more = len(reasons) - MOST_NAMED
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
        from penstock.pipeline.plan import ATTEMPTS, substitute  # reached for bad samples alone

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
            f"{ATTEMPTS} substitutes that were tried. Bad: {listed_reasons(known)}. {REMEDY}",
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


NOTICE_IDS = 1000  # ids that a notice to the other ranks names at most

_EPOCHS_KEPT = 4


class BadCount:
    """Counts and reports bad samples as batches are handed out; the thread that does so calls.

    It counts for the epoch of the batches that it is told of; which batch that is, and whether it
    begins an epoch, its caller says.
    """

    def __init__(
        self,
        dataset: Source,
        bad_samples: BadSamples,
        *,
        max_bad: float,
        agreement: LoaderChannel,
        report: QuarantineFile,
        meter: Meter,
    ) -> None:
        """max_bad: share of the dataset's samples, per epoch and over all ranks, past which every
        rank stops."""
        self._dataset = dataset
        self._bad_samples = bad_samples
        self._samples = dataset.contents.samples
        self._max_bad = max_bad
        self._agreement = agreement
        self._report = report
        self._meter = meter
        self._met: dict[int, str] = {}  # handed out, in any epoch
        self._counted: dict[int, set[int]] = {}  # by epoch: told to all ranks
        self._stopped = False
        self._restored = 0  # times: each begins the counts anew, on all ranks
        self._earlier: list[tuple[int, int]] = []  # places and counts that _before is made of
        self._found: list[tuple[int, int]] = []  # those of this membership, when last asked
        # In this epoch: in this process, before a restart, and over all ranks as told last.
        self._count, self._before, self._told = 0, 0, 0
        self._past: list[tuple[int, int]] = []  # where a batch began, and the count behind it

    def check(self, cursor: Cursor) -> None:
        """Raise what a rank told all to stop for: TooManyBadSamplesError, RankFailedError.

        A notice holds for what comes after the batch that it was sent with: that one every rank
        hands out, also a rank that hears of it before, as the others wait for it in their step.
        """
        notice = self._agreement.stop_notice()
        if notice is None:
            return
        if not self._stopped and (cursor.epoch, cursor.position) <= tuple(notice["last"]):
            return
        is_first, self._stopped = not self._stopped, True
        if (
            is_first and "failed" not in notice
        ):  # others stop here too; a failed rank isn't waited for
            self._agreement.end_together()
        raise self._error(notice)

    def count(self, at: Cursor, bad: Mapping[int, str], *, begins_epoch: bool) -> None:
        """Count, report and, past the limit, tell every rank to stop at the next batch.

        at: where the batch begins. bad: this rank's own samples of it, id -> reason. Again for the
        same batch, it counts nothing twice for the job. begins_epoch: none of the epoch is counted
        yet.
        """
        epoch = at.epoch
        if begins_epoch:
            self._count, self._before, self._told = 0, 0, 0
            self._past, self._earlier = [], []
            self._forget_before(epoch)
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
            mine = len(new) if self._agreement.speaks_for_rank else 0  # else another tells
            self._told = self._agreement.add(_counter(epoch), mine)
            if mine and (store := self._agreement.store) is not None:
                from penstock.pipeline.members import publish_count

                with contextlib.suppress(JobStoreError):  # the next question says so
                    publish_count(
                        store, self._places(epoch), total=self._told, place=at.position, count=mine
                    )
            self._past.append((at.position, self._told))
            total = self._told + self._before
            if total > self._max_bad * self._samples:
                self._agreement.stop(self._notice(at, total))
        if first_ever:
            self._warn(*next(iter(bad.items())))

    def failed(self, error: Exception) -> None:
        """Tell the other ranks that this one can't go on, so that none waits for it."""
        self._agreement.fail(f"{type(error).__name__}: {error}")

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
        shared = self._agreement.count_at(f"{at.epoch}-{at.position}", _counter(at.epoch))
        return self._before + (shared or 0)

    @property
    def known(self) -> int:
        """Bad samples of this epoch so far, as far as this rank heard, without asking."""
        return self._before + max(self._count, self._told)

    def known_before(self, at: Cursor) -> int:
        """Bad samples of this epoch before a place, of an earlier one than now: those behind it
        come again, and count then.

        Over all ranks that handed that out, as far as their store still answers; else as far as
        this rank heard when it was there.
        """
        store = self._agreement.store
        behind = sum(count for place, count in self._earlier if place >= at.position)
        if store is not None:
            from penstock.pipeline.members import published_counts

            with contextlib.suppress(JobStoreError):
                total = self._agreement.add(_counter(at.epoch), 0)
                found = published_counts(store, self._places(at.epoch), total=total)
                if found is not None:
                    self._found = found
                    total = sum(count for place, count in found if place < at.position)
                    return self._before - behind + total
        heard = [told for position, told in self._past if position < at.position]
        return self._before - behind + max(heard, default=0)

    def _places(self, epoch: int) -> str:
        return f"places-{self._restored}-{_counter(epoch)}"

    def take_over(self, other: BadCount) -> None:
        """Go on where another one was, which counts no more."""
        self._met, self._counted, self._stopped = other._met, other._counted, other._stopped
        self._count, self._before, self._told = other._count, other._before, other._told
        self._past, self._restored = other._past, other._restored
        self._earlier, self._found = other._earlier, other._found

    def restore(self, bad: int, *, before: int = 0, begins: bool = True) -> None:
        """Go on in the middle of an epoch of which so many were counted before. All ranks do so
        together, and what was told to all is forgotten. begins: among the same ranks as before;
        else before: the position there."""
        self._count, self._before, self._told = 0, bad, 0
        self._past = []
        self._counted.clear()
        self._stopped = False
        self._restored += 1
        told = [] if begins else self._earlier + self._found
        self._earlier, self._found = [one for one in told if one[0] < before], []
        if begins:
            self._agreement.begin()

    def _forget_before(self, epoch: int) -> None:
        self._bad_samples.forget_before(epoch)
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
            f'samples (pad="mask": valid=False){where}. The job stops when more than '
            f"max_bad={self._max_bad} of an epoch are bad.",
            PenstockWarning,
            stacklevel=5,
        )

    def _notice(self, at: Cursor, total: int) -> dict[str, Any]:
        ids = sorted(self._counted[at.epoch])
        return {
            "rank": self._agreement.rank,
            "epoch": at.epoch,
            "last": [at.epoch, at.position],
            "total": total,
            "ids": ids[:NOTICE_IDS],
            "reasons": {str(i): self._met[i] for i in ids[:MOST_NAMED]},
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
        more = f" All of them: {' and '.join(files)}." if files else ""
        return TooManyBadSamplesError(
            f"{total} bad samples in epoch {epoch} are more than max_bad={self._max_bad} of "
            f"{self._samples:,} samples. Rank {rank} passed the limit, and every rank stops. Bad: "
            f"{listed_reasons(reasons)}.{more} {REMEDY}",
            sample_ids=ids,
        )


def _counter(epoch: int) -> str:
    return f"bad-{epoch}"
