"""What the loader measured about itself, and the one line that says what holds the job back.

Measured at two places only: where the training loop waits for a batch, and where bytes are read.
What the tiers did is the cache's own count (`cache.base.counters`). What follows from all that is
told by `diagnosis`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.counters import Traffic
from penstock.cache.base.sizes import format_size
from penstock.pipeline.report.cores import core_speeds
from penstock.pipeline.report.diagnosis import diagnose
from penstock.pipeline.report.facts import Facts
from penstock.pipeline.report.probes import ReadProbe

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline.feed.resident.images import ResidentFacts
    from penstock.pipeline.report.advice import Cause
    from penstock.pipeline.report.facts import Cores, Limit, Shards

_WAITS_KEPT = 4096
# Looking at the cores takes 0.2 s, and what else runs on them seldom changes.
_CORES_EVERY_S = 300.0


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
    gil_late: share of the reading threads' tries to take Python's GIL that came late, as somebody
    kept it.
    limit, cause: the stage that holds the job back, and what is behind it; verdict: both in words,
    and what would move it. facts: what that follows from.
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
    gil_late: float
    limit: Limit
    cause: Cause
    verdict: str
    facts: Facts = field(repr=False)

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
    """Counters that the run adds to; one thread writes each of them.

    decode_threads, usable_cores: of this rank. url, shards: of a native dataset; output: height and
    width that its recipe hands out, None without images.
    """

    decode_threads: int
    device: str
    usable_cores: int = 1
    url: str = ""
    shards: Shards | None = None
    output: tuple[int, int] | None = None
    probe: ReadProbe = field(default_factory=ReadProbe)
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
    cores: Cores | None = None
    cores_due_s: float = 0.0
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
        remote = self.remote() if self.remote is not None else None
        resident = self.resident() if self.resident is not None else None
        traffic = remote.traffic if remote is not None else Traffic(bytes_disk=self.bytes_disk)
        facts = self._facts(remote, fill_s=resident.fill_s if resident else 0.0)
        diagnosis = diagnose(facts)
        if diagnosis.limit == "decode" and facts.device == "cpu":
            facts = replace(facts, cores=self._cores())
            diagnosis = diagnose(facts)
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
            cache_bytes=remote.kept_bytes if remote is not None else 0,
            cache_max_bytes=remote.max_bytes if remote is not None else 0,
            samples_per_s=rate,
            decode_threads=self.decode_threads,
            bad=self.bad,
            quarantine=self.quarantine,
            gil_late=facts.gil_late,
            limit=diagnosis.limit,
            cause=diagnosis.cause,
            verdict=diagnosis.verdict,
            facts=facts,
        )

    def _facts(self, remote: RemoteFacts | None, *, fill_s: float) -> Facts:
        late, late_s = self.probe.gil()
        return Facts(
            samples=self.counted_samples,
            batches=max(0, self.batches - 1),
            step_s=self.step_s,
            wait_s=self.wait_s,
            wait_read_s=self.wait_read_s,
            wait_decode_s=self.wait_decode_s,
            read_s=self.read_s,
            load_s=self.load_s,
            fill_s=fill_s,
            elapsed_s=self.first_batch_s + self.step_s + self.wait_s,
            decode_threads=self.decode_threads,
            usable_cores=self.usable_cores,
            device=self.device,
            url=self.url,
            gil_late=late,
            gil_late_s=late_s,
            workers=self.workers,
            remote=remote,
            shards=self.shards,
            pictures=self.probe.pictures(self.output) if self.output else None,
        )

    def _cores(self) -> Cores:
        """How fast the cores are, looked at now and then."""
        now = time.monotonic()
        if self.cores is None or now >= self.cores_due_s:
            self.cores, self.cores_due_s = core_speeds(), now + _CORES_EVERY_S
        return self.cores
