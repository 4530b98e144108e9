"""A batch on its way through a graph: cut into sub-batches, in flight, and decoded.

Usually a batch is one sub-batch, which is one run of DALI. A sample that doesn't decode fails its
whole run, so while samples fail batches are cut smaller (`Caution`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.augment.culprits import check_machine, cut, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from penstock.augment.draws import Draws
    from penstock.readers.types import EncodedBatch

# After a failure so many batches are fed as runs of so few samples. At 1 % bad samples a run of 128
# fails 72 times of 100 and a run of 16 15 times, and what was decoded beside a bad one is lost.
CAREFUL_BATCHES = 64
CAREFUL_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """What a graph makes of a batch. images: (n, channels, height, width). bad: rows that are
    zeros, and why."""

    images: torch.Tensor
    bad: dict[int, str]


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Rows of one run. inputs: what DALI reads until the run was taken."""

    rows: list[int]
    inputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class BatchInFlight:
    """A batch that DALI works on. marks: rows left out and why; runs: of the others."""

    batch: EncodedBatch
    draws: Draws
    marks: dict[int, str]
    runs: list[SubBatch]


@dataclass(frozen=True, slots=True)
class FailedRun:
    """Rows of a run that failed, and why; None if they weren't tried yet. Not the error: its
    traceback would hold the batch in a cycle."""

    rows: list[int]
    reason: str | None


class Caution:
    """Decides how batches are cut into sub-batches: small ones while samples fail, else one."""

    def __init__(self) -> None:
        self._batches = 0  # to be cut small yet
        self._suspects: set[int] = set()  # ids that once failed: another window may yet decode

    def heighten(self) -> None:
        """A run has failed: the next batches are cut small."""
        self._batches = CAREFUL_BATCHES

    def suspect(self, ids: Iterable[int]) -> None:
        """These samples failed: from now on each of them is a sub-batch of its own."""
        self._suspects.update(ids)

    def cut(self, batch: EncodedBatch, marks: dict[int, str]) -> list[list[int]]:
        """The rows of each sub-batch, without those in marks. DALI knows no empty one."""
        rows = [row for row in range(len(batch.encoded)) if row not in marks]
        alone: list[int] = []
        if self._suspects:
            ids = batch.ids.tolist()
            alone = [row for row in rows if ids[row] in self._suspects]
            rows = [row for row in rows if ids[row] not in self._suspects]
        size = CAREFUL_SAMPLES if self._batches else max(1, len(rows))
        self._batches = max(0, self._batches - 1)
        return [*cut(rows, size), *cut(alone, 1)]


def select_rows(batch: EncodedBatch, draws: Draws, rows: list[int]) -> tuple[EncodedBatch, Draws]:
    """These rows of a batch and of its draws; all of them are the same objects."""
    if len(rows) == len(batch.encoded):
        return batch, draws
    encoded = [batch.encoded[row] for row in rows]
    some = replace(batch, ids=batch.ids[rows], encoded=encoded, dims=batch.dims[rows])
    return some, {name: values[rows] for name, values in draws.items()}


def failure_reason(error: RuntimeError) -> str:
    """The reason of a run that failed. Raises DeviceError where no sample is to blame."""
    check_machine(error, remedy="a smaller batch, or a smaller prefetch_factor")
    return reason_of(error)
