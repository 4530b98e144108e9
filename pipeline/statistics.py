"""What the loader measured about itself, and the one line that says what holds the job back.

Measured at two places only: where the training loop waits for a batch, and where bytes are read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cache.sizes import format_size

Limit = Literal["nothing yet", "model", "decode", "dataset", "disk", "remote"]

# Waits shorter than this share of the time move nothing: the accelerator is fed.
FED_WAIT_SHARE = 0.02
_WAITS_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of a loader. Times are seconds of this rank since the loader was built.

    samples, batches: handed out to the training loop.
    first_batch_s: from the first request to the first batch; it counts in no other field.
    step_s: spent outside the loader between two batches: the model's time.
    wait_s: spent in the loader, waiting for or handing over a batch; wait_share: of step_s +
    wait_s.
    wait_p50_s, wait_p99_s: of one batch, over the latest 4,096.
    wait_read_s, wait_decode_s: the part of wait_s that waited for bytes, and for DALI.
    read_s: thread time that reading, checking and drawing took; high with a low wait_read_s is
    fine.
    bytes_disk, bytes_remote: encoded bytes read from local files; bytes fetched from a remote
    store.
    samples_per_s: while iterating, the first batch left out; 0.0 before the second batch.
    bad: samples that were handed out replaced or marked, as they are bad; quarantine: the file that
    lists them, "" without one.
    limit, verdict: what holds the job back, and what would move it.
    """

    samples: int
    batches: int
    first_batch_s: float
    step_s: float
    wait_s: float
    wait_share: float
    wait_p50_s: float
    wait_p99_s: float
    wait_read_s: float
    wait_decode_s: float
    read_s: float
    bytes_disk: int
    bytes_remote: int
    samples_per_s: float
    decode_threads: int
    bad: int
    quarantine: str
    limit: Limit
    verdict: str

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples in {self.batches:,} batches, {self.samples_per_s:,.0f}/s; "
            f"waited {self.wait_share:.1%} of the time "
            f"(p50 {self.wait_p50_s * 1e3:.1f} ms, p99 {self.wait_p99_s * 1e3:.1f} ms a batch), "
            f"first batch after {self.first_batch_s:.2f} s; "
            f"read {format_size(self.bytes_disk)} from disk, {format_size(self.bytes_remote)} from "
            f"the remote{self._told_bad()}.\n{self.verdict}"
        )

    def _told_bad(self) -> str:
        if not self.bad:
            return ""
        return f"; {self.bad:,} bad samples" + (f" ({self.quarantine})" if self.quarantine else "")


@dataclass(slots=True)
class Meter:
    """Counters that the run adds to; one thread writes each of them."""

    decode_threads: int
    device: str
    samples: int = 0
    batches: int = 0
    counted_samples: int = 0
    first_batch_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    wait_read_s: float = 0.0
    wait_decode_s: float = 0.0
    read_s: float = 0.0
    bytes_disk: int = 0
    bytes_remote: int = 0
    bad: int = 0
    quarantine: str = ""
    workers: int | None = None  # torch's, of a torch dataset; None: a native one
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=_WAITS_KEPT))

    def delivered(self, samples: int, *, wait_s: float, read_s: float, decode_s: float) -> None:
        """Count one batch. read_s, decode_s: the parts of wait_s spent on bytes and on DALI."""
        self.samples += samples
        self.batches += 1
        if self.batches == 1:
            self.first_batch_s = wait_s
            return
        self.counted_samples += samples
        self.wait_s += wait_s
        self.wait_read_s += read_s
        self.wait_decode_s += decode_s
        self.waits.append(wait_s)

    def snapshot(self) -> Statistics:
        busy_s = self.step_s + self.wait_s
        share = self.wait_s / busy_s if busy_s else 0.0
        rate = self.counted_samples / busy_s if busy_s else 0.0
        waits = np.array(self.waits or [0.0])
        limit = self._limit(share)
        return Statistics(
            samples=self.samples,
            batches=self.batches,
            first_batch_s=self.first_batch_s,
            step_s=self.step_s,
            wait_s=self.wait_s,
            wait_share=share,
            wait_p50_s=float(np.quantile(waits, 0.5)),
            wait_p99_s=float(np.quantile(waits, 0.99)),
            wait_read_s=self.wait_read_s,
            wait_decode_s=self.wait_decode_s,
            read_s=self.read_s,
            bytes_disk=self.bytes_disk,
            bytes_remote=self.bytes_remote,
            samples_per_s=rate,
            decode_threads=self.decode_threads,
            bad=self.bad,
            quarantine=self.quarantine,
            limit=limit,
            verdict=self._verdict(limit, share, rate),
        )

    def _limit(self, wait_share: float) -> Limit:
        if self.batches < 2:
            return "nothing yet"
        if wait_share < FED_WAIT_SHARE:
            return "model"
        if self.workers is not None:
            return "decode" if self.wait_decode_s > self.wait_read_s else "dataset"
        if self.wait_read_s <= self.wait_decode_s:
            return "decode"
        return "remote" if self.bytes_remote else "disk"

    def _verdict(self, limit: Limit, share: float, rate: float) -> str:
        waited = f"the training step waits {share:.1%} of the time"
        threads = f"{self.decode_threads} decode thread{'s' * (self.decode_threads != 1)}"
        workers = f"with {self.workers} workers" if self.workers else "in the training process"
        where = "on the GPU" if self.device.startswith("cuda") else f"with {threads}"
        return {
            "nothing yet": "Too early to tell: fewer than two batches were handed out.",
            "model": f"The model is the limit: {waited}. A faster input side would change nothing.",
            "decode": f"Decoding and augmenting is the limit: {waited} at {rate:,.0f} samples/s "
            f"{where}. "
            + (
                "Smaller images or a smaller crop would move it."
                if self.device.startswith("cuda")
                else 'More cores for this rank (num_workers=), device="cuda", or smaller images '
                "would move it."
            ),
            "dataset": f"The dataset's own code is the limit: {waited} at {rate:,.0f} samples/s, "
            f"read {workers}. More num_workers=, or a native dataset (`penstock pack`) that "
            "DALI decodes, would move it.",
            "disk": f"Reading is the limit: {waited}, most of that for bytes from the disk. "
            "A pack (`penstock pack`) on a local NVMe would move it.",
            "remote": f"The remote is the limit: {waited}, most of that for "
            f"{format_size(self.bytes_remote)} fetched so far. What is fetched stays in cache=, so "
            "the next epoch reads it from disk.",
        }[limit]
