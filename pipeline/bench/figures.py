"""What was measured, as values: the figures of one run, and a figure over several rounds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A median over the rounds and the lowest and highest round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What one run gave. Its first batch and what filled the read-ahead are left out unless said.

    samples, batches, seconds: of the measured part; bytes: encoded bytes of its samples.
    samples_per_s, bytes_per_s, cpu_s_per_1000: of the measured part; the CPU time of this process
    and its children. first_batch_s: from before the loader is built to its first batch, imports
    not counted.
    wait_p50_s, wait_p99_s, wait_share: of the steps' waits for a batch. step_s: median measured
    length of the emulated step, 0 without one. au: accelerator utilisation in per cent, see
    `pipeline.plan.sizing.au`; 0 without a step. bytes_by_tier: bytes from "remote", "peers",
    "disk" and "memory" while it ran.
    """

    samples: int
    batches: int
    seconds: float
    bytes: int
    cpu_s: float
    first_batch_s: float
    wait_p50_s: float
    wait_p99_s: float
    wait_share: float
    step_s: float
    au: float
    bytes_by_tier: Mapping[str, int]

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000 * self.cpu_s / self.samples if self.samples else 0.0
