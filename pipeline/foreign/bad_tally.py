"""How many bad samples of a torch dataset others stood in for, and when it is enough."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import PenstockWarning, TooManyBadSamplesError
from penstock.pipeline.foreign.dataset_state import description_of
from penstock.pipeline.report.quarantine import QuarantineFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.foreign.faults import BadRow
    from penstock.pipeline.foreign.mark import Mark
    from penstock.pipeline.plan.world import World
    from penstock.pipeline.report.meter import Meter

_NAMED = 10


class BadTally:
    """Counts and reports bad samples as batches are handed out; the thread that does so calls.

    How many there were in the epoch stands in the mark; here is what they were.
    """

    def __init__(self, dataset: Any, *, max_bad: float, meter: Meter) -> None:
        """max_bad: share of this rank's samples of an epoch, past which it stops."""
        self._dataset = dataset
        self._max_bad = max_bad
        self._meter = meter
        self._met: dict[int, str] = {}  # in any epoch
        self._of_epoch: dict[int, str] = {}
        self._epoch = -1
        self._report: QuarantineFile | None = None

    def check(self, mark: Mark, world: World) -> None:
        """Raise TooManyBadSamplesError once an epoch has had more than is allowed."""
        own = len(self._dataset) / world.size
        if mark.bad <= self._max_bad * own:
            return
        known = self._of_epoch if self._epoch == mark.epoch else {}
        named = "; ".join(f"{i} ({known[i]})" for i in sorted(known)[:_NAMED])
        more = len(known) - _NAMED
        file = f" All of them: {self._meter.quarantine}." if self._meter.quarantine else ""
        raise TooManyBadSamplesError(
            f"{mark.bad} bad samples in epoch {mark.epoch} are more than max_bad={self._max_bad} "
            f"of the {own:,.0f} samples of rank {world.rank}'s share of "
            f"{description_of(self._dataset)}. Bad: {named or 'met before this start'}"
            f"{f'; and {more} more' if more > 0 else ''}.{file} Look at why; then leave them out "
            "of the dataset, or raise max_bad=.",
            sample_ids=tuple(sorted(known)),
        )

    def count(self, bad: Sequence[BadRow], *, epoch: int, world: World) -> int:
        """Count and report the bad samples of a batch that is handed out; how many there are."""
        if epoch != self._epoch:
            self._epoch, self._of_epoch = epoch, {}
        new = {row.sample_id: row.reason for row in bad if row.sample_id not in self._met}
        self._of_epoch |= {row.sample_id: row.reason for row in bad}
        self._meter.bad += len(bad)
        is_first = not self._met
        self._met |= new
        if new:
            self._write(new, epoch, world)
            if is_first:
                self._warn(bad[0])
        return len(bad)

    def _write(self, bad: dict[int, str], epoch: int, world: World) -> None:
        if self._report is None:
            name = f"{type(self._dataset).__name__}-{world.file_label}.jsonl"
            self._report = QuarantineFile(None, name=name)
        self._report.append(
            [{"id": i, "name": "", "reason": why, "epoch": epoch} for i, why in bad.items()]
        )
        self._meter.quarantine = self._report.path

    def _warn(self, row: BadRow) -> None:
        where = f", listed in {self._meter.quarantine}" if self._meter.quarantine else ""
        warnings.warn(
            f"Sample {row.sample_id} of {description_of(self._dataset)} is bad: {row.reason}. It "
            'and others like it are replaced by other samples (pad="mask": and marked '
            f"valid=False){where}. The loader stops when more than max_bad={self._max_bad} of an "
            "epoch are bad.",
            PenstockWarning,
            stacklevel=6,
        )
