"""Decide if an error is a sample's fault, choose substitutes, and count and report bad samples.

This applies only if the user asked for it (`max_bad=`). Any error of the dataset then counts as a
bad sample, except errors that no sample's bytes can cause.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache import (
    BadSampleError,
    CorruptShardError,
    PenstockError,
    PenstockWarning,
    TooManyBadSamplesError,
)
from penstock.cache.base import machine_remedy
from penstock.pipeline.plan import ATTEMPTS, substitute
from penstock.pipeline.report import QuarantineFile
from penstock.pipeline.torch_data.mark import description_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.pipeline.plan import World
    from penstock.pipeline.report import Meter
    from penstock.pipeline.torch_data.mark import Mark
    from penstock.pipeline.torch_data.worker import BadRow

_REASON_CHARACTERS = 300
# Errors of the program, the machine or the network.
_NOT_A_SAMPLE_FAULT: tuple[type[BaseException], ...] = (
    NameError,
    ImportError,
    SyntaxError,
    NotImplementedError,
    torch.OutOfMemoryError,
    RecursionError,
    ConnectionError,
    TimeoutError,
    PermissionError,
    StopIteration,
)


def is_sample_fault(error: Exception) -> bool:
    """Return True if an error raised while a sample was read shows that the sample is bad."""
    if isinstance(error, BadSampleError | CorruptShardError):
        return True
    if isinstance(error, (PenstockError, *_NOT_A_SAMPLE_FAULT)):
        return False
    return machine_remedy(error) is None


def reason_of(error: Exception) -> str:
    """Return the reason why a sample is bad, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, BadSampleError) and text:
        return text[:_REASON_CHARACTERS]
    return f"{type(error).__name__}: {text}".removesuffix(": ")[:_REASON_CHARACTERS]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Substitutes:
    """The samples that may replace a bad one: functions of seed, epoch and sample id, as with
    native data.

    starts, sizes: first index and samples of each part, int64, shape (parts,).
    """

    seed: int
    starts: Any
    sizes: Any

    @classmethod
    def among(cls, sizes: Sequence[int], *, seed: int) -> Substitutes:
        """Return the substitutes of a dataset in parts of these sizes."""
        ends = np.cumsum(np.asarray(sizes, np.int64))
        return cls(seed=seed, starts=ends - sizes, sizes=np.asarray(sizes, np.int64))

    def of(self, sample_id: int, *, epoch: int) -> Iterator[int]:
        """Yield the samples to try, in order."""
        for attempt in range(ATTEMPTS):
            candidate = substitute(
                sample_id,
                attempt,
                seed=self.seed,
                epoch=epoch,
                starts=self.starts,
                sizes=self.sizes,
            )
            if candidate != sample_id:
                yield candidate


_MOST_NAMED = 10


class BadTally:
    """Counts and reports bad samples as batches are delivered.

    The delivering thread calls it. The mark holds the epoch's count; this object holds the reasons.
    """

    def __init__(self, dataset: Any, *, max_bad: float, meter: Meter) -> None:
        """max_bad: the share of this rank's samples of an epoch that may be bad."""
        self._dataset = dataset
        self._max_bad = max_bad
        self._meter = meter
        self._known: dict[int, str] = {}  # reasons of bad samples, in any epoch
        self._of_epoch: dict[int, str] = {}
        self._epoch = -1
        self._report: QuarantineFile | None = None

    def check(self, mark: Mark, world: World) -> None:
        """Raise TooManyBadSamplesError if an epoch has had more bad samples than allowed."""
        own = len(self._dataset) / world.size
        if mark.bad <= self._max_bad * own:
            return
        known = self._of_epoch if self._epoch == mark.epoch else {}
        named = "; ".join(f"{i} ({known[i]})" for i in sorted(known)[:_MOST_NAMED])
        more = len(known) - _MOST_NAMED
        file = f" All of them: {self._meter.quarantine}." if self._meter.quarantine else ""
        raise TooManyBadSamplesError(
            f"{mark.bad} bad samples in epoch {mark.epoch} are more than max_bad={self._max_bad} "
            f"of the {own:,.0f} samples of rank {world.rank}'s share of "
            f"{description_of(self._dataset)}. Bad: {named or 'found before this start'}"
            f"{f'; and {more} more' if more > 0 else ''}.{file} See the reasons; then remove them "
            "from the dataset, or raise max_bad=.",
            sample_ids=tuple(sorted(known)),
        )

    def count(self, bad: Sequence[BadRow], *, epoch: int, world: World) -> int:
        """Count and report the bad samples of a delivered batch, and return their number."""
        if epoch != self._epoch:
            self._epoch, self._of_epoch = epoch, {}
        new = {row.sample_id: row.reason for row in bad if row.sample_id not in self._known}
        self._of_epoch |= {row.sample_id: row.reason for row in bad}
        self._meter.bad += len(bad)
        is_first = not self._known
        self._known |= new
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
            [{"id": i, "name": "", "reason": reason, "epoch": epoch} for i, reason in bad.items()]
        )
        self._meter.quarantine = self._report.path

    def _warn(self, row: BadRow) -> None:
        where = f", listed in {self._meter.quarantine}" if self._meter.quarantine else ""
        warnings.warn(
            f"Sample {row.sample_id} of {description_of(self._dataset)} is bad: {row.reason}. Bad "
            'samples are replaced by other samples (and marked valid=False with pad="mask")'
            f"{where}. The loader stops if more than max_bad={self._max_bad} of an epoch are bad.",
            PenstockWarning,
            stacklevel=6,
        )
