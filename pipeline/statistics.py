"""What the loader measured about itself, and the one line that says what holds the job back.

Measured at two places only: where the training loop waits for a batch, and where bytes are read.
What the tiers did is the cache's own count (`cache.counters`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from cache.counters import Traffic
from cache.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.resident import ResidentFacts

Limit = Literal["nothing yet", "model", "decode", "dataset", "disk", "remote", "cache"]

# Waits shorter than this share of the time move nothing: the accelerator is fed.
FED_WAIT_SHARE = 0.02
_WAITS_KEPT = 4096
# More of the requests than this refused, and the store's limits are what to change.
_THROTTLED_SHARE = 0.05
# A cache that keeps less of what the node reads than this is too small for it.
_KEPT_SHARE = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFacts:
    """What is known of a remote dataset's tiers. traffic: since the dataset was opened.

    connections: in use at most; request_p99_s: of recent requests. wanted_bytes: what this node
    reads in an epoch; kept_bytes: of that, what the cache keeps for the job; max_bytes: the cache's
    limit, 0 without a cache of the user's.
    """

    traffic: Traffic
    connections: int
    request_p99_s: float
    wanted_bytes: int
    kept_bytes: int
    max_bytes: int


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
    load_s: time that the reading threads spent on that by the clock, waits among it.
    bytes_disk: encoded bytes read from local files, a cache's among them.
    bytes_memory: decoded bytes that came from memory (`resident=`) in place of reading and
    decoding; resident_hits: of how many samples; resident_bytes: of images that are kept there.

    All zero for a local dataset, else counted since the dataset was opened in this process:
    bytes_remote: received from the store, metadata too; bytes_filled: of those, kept in the cache;
    bytes_passed: handed on without being kept. hits, misses, hit_ratio: samples whose bytes were on
    the local disk when they were asked for, or not; hit_ratio is 1.0 before the first.
    requests; retries, hedges: of those, sent again after a failure, or as the first was late;
    throttled: answered with 429 or 503. refetched: objects fetched again as their bytes were wrong.
    remote_wait_s: time that reading threads waited for the store.
    cache_bytes: of what this node reads in an epoch, what the cache keeps for this job;
    cache_max_bytes: the cache's limit.

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
    load_s: float
    bytes_disk: int
    bytes_memory: int
    resident_hits: int
    resident_bytes: int
    bytes_remote: int
    bytes_filled: int
    bytes_passed: int
    hits: int
    misses: int
    hit_ratio: float
    requests: int
    retries: int
    hedges: int
    throttled: int
    refetched: int
    remote_wait_s: float
    cache_bytes: int
    cache_max_bytes: int
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
            f"the remote{self._told_resident()}{self._told_bad()}.{self._told_tiers()}\n"
            f"{self.verdict}"
        )

    def _told_tiers(self) -> str:
        if not self.requests and not self.cache_max_bytes:
            return ""
        refetched = f", {self.refetched:,} objects refetched" if self.refetched else ""
        kept = f"; the cache keeps {format_size(self.cache_bytes)}" if self.cache_max_bytes else ""
        return (
            f"\nRemote: {self.requests:,} requests ({self.retries:,} retries, {self.hedges:,} "
            f"hedges, {self.throttled:,} throttled{refetched}), {format_size(self.bytes_filled)} "
            f"into the cache, {format_size(self.bytes_passed)} past it; waited "
            f"{self.remote_wait_s:.1f} s. Hits: {self.hit_ratio:.1%} of the samples{kept}."
        )

    def _told_resident(self) -> str:
        if not self.resident_bytes:
            return ""
        return (
            f"; {self.resident_hits:,} samples came from memory, which keeps "
            f"{format_size(self.resident_bytes)} of decoded images"
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
    load_s: float = 0.0
    bytes_disk: int = 0
    remote: Callable[[], RemoteFacts] | None = None  # of a remote dataset
    resident: Callable[[], ResidentFacts] | None = None  # where images stay in memory
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
        facts = self.remote() if self.remote is not None else None
        resident = self.resident() if self.resident is not None else None
        traffic = facts.traffic if facts is not None else Traffic(bytes_disk=self.bytes_disk)
        limit = self._limit(share, facts, fill_s=resident.fill_s if resident else 0.0)
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
            load_s=self.load_s,
            bytes_disk=traffic.bytes_disk,
            bytes_memory=resident.bytes_memory if resident else 0,
            resident_hits=resident.hits if resident else 0,
            resident_bytes=resident.size_bytes if resident else 0,
            bytes_remote=traffic.bytes_remote,
            bytes_filled=traffic.bytes_filled,
            bytes_passed=traffic.bytes_passed,
            hits=traffic.hits,
            misses=traffic.misses,
            hit_ratio=traffic.hit_ratio,
            requests=traffic.requests,
            retries=traffic.retries,
            hedges=traffic.hedges,
            throttled=traffic.throttled,
            refetched=traffic.refetched,
            remote_wait_s=traffic.remote_wait_s,
            cache_bytes=facts.kept_bytes if facts is not None else 0,
            cache_max_bytes=facts.max_bytes if facts is not None else 0,
            samples_per_s=rate,
            decode_threads=self.decode_threads,
            bad=self.bad,
            quarantine=self.quarantine,
            limit=limit,
            verdict=self._verdict(limit, share, rate, facts),
        )

    def _limit(self, wait_share: float, facts: RemoteFacts | None, *, fill_s: float = 0.0) -> Limit:
        if self.batches < 2:
            return "nothing yet"
        if wait_share < FED_WAIT_SHARE:
            return "model"
        if self.workers is not None:
            return "decode" if self.wait_decode_s > self.wait_read_s else "dataset"
        # Reading threads that decode into memory wait for no disk.
        if self.wait_read_s <= self.wait_decode_s or fill_s > self.load_s / 2:
            return "decode"
        # By what the reading threads waited for: a job may fetch all the time and wait for a disk.
        if facts is None or facts.traffic.remote_wait_s < self.load_s / 2:
            return "disk"
        is_small = facts.max_bytes > 0 and facts.kept_bytes < _KEPT_SHARE * facts.wanted_bytes
        # Until all that it keeps was read once, the rest isn't what the job waits for.
        passes = facts.traffic.bytes_passed > facts.traffic.bytes_filled
        return "cache" if is_small and passes else "remote"

    def _verdict(
        self, limit: Limit, share: float, rate: float, facts: RemoteFacts | None = None
    ) -> str:
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
            f"{self._told_remote(facts)}",
            "cache": f"The cache's size is the limit: {waited}, most of that for the remote. "
            f"{_told_cache(facts)}",
        }[limit]

    def _told_remote(self, facts: RemoteFacts | None) -> str:
        """What came, how fast, and the one change that would move it."""
        if facts is None:
            return "its bytes."
        traffic, elapsed_s = facts.traffic, self.first_batch_s + self.step_s + self.wait_s
        came = (
            f"{format_size(traffic.bytes_remote)} fetched so far: it gave "
            f"{traffic.bytes_remote / max(elapsed_s, 1e-9) / 1e6:.0f} MB/s over at most "
            f"{facts.connections} connections, 99 % of the requests within "
            f"{facts.request_p99_s:.2g} s. "
        )
        if traffic.throttled > _THROTTLED_SHARE * traffic.requests:
            return (
                f"{came}It throttled {traffic.throttled:,} of {traffic.requests:,} requests: a "
                "higher limit at the store, or `penstock warm` before the job, would move it."
            )
        if not facts.max_bytes:
            return f"{came}cache=DiskCache(...) would keep what is fetched for the next epoch."
        return (
            f"{came}What is fetched stays in the cache for the next epoch; `penstock warm` before "
            "the job would move the first."
        )


def _told_cache(facts: RemoteFacts | None) -> str:
    if facts is None:
        return ""
    # Blocks of the file system and the indexes take a little more than the data.
    needed = facts.max_bytes + 1.02 * (facts.wanted_bytes - facts.kept_bytes)
    return (
        f"It keeps {facts.kept_bytes / max(facts.wanted_bytes, 1):.0%} of the "
        f'{format_size(facts.wanted_bytes)} that this node reads; max_bytes="'
        f'{-(-needed // 2**20):.0f}MiB" would end the fetching.'
    )
