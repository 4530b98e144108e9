"""Hold a snapshot of a loader's measurements; its `str` names the limit of the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.cache.base import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.pipeline.report.job_statistics import JobStatistics
    from penstock.pipeline.report.run_facts import Cause, Limit, LoaderFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The measurements of one loader so far. Times are seconds of this rank since it was built.

    samples, batches: delivered to the training loop.
    first_batch_s: wait for the first batch; no other field includes it.
    step_s: time outside the loader between two batches, which is the model's.
    wait_s: time in the loader, waiting for a batch; wait_share: wait_s / (step_s + wait_s).
    wait_p50_s, wait_p99_s: quantiles of the wait for one batch, over the latest 4,096.
    wait_read_s, wait_decode_s: the parts of wait_s spent waiting for bytes and for DALI.
    read_s: CPU time of the reading threads; high values are fine while wait_read_s is low.
    load_s: wall-clock time of the reading threads, waits included.
    map_s: the part of load_s spent in functions of the recipe's Maps or waiting for their
    processes.
    bytes_disk: encoded bytes read from local files, cached files included.
    bytes_memory: decoded bytes that came from memory (`resident=`) instead of being read and
    decoded; resident_hits: samples that did; resident_bytes: size of the images kept in memory.
    decoded_bytes: decoded size of chunks (Zarr, Parquet, …) since this process opened the dataset;
    delivered_bytes: the part of them that went into samples; the ratio is 1 if each chunk was
    decoded once and used completely. chunks_decoded: number of chunks decoded; chunks_again: those
    decoded again because there was no room to keep them. chunks_memory_bytes, chunks_disk_bytes:
    the most that was kept in memory and in the cache folder.

    The following are 0 for a local dataset; otherwise they count since this process opened the
    dataset.
    bytes_remote: received from the store, metadata included; bytes_peers: received from other
    nodes' caches; bytes_filled: of both, those written to the cache; bytes_passed: delivered
    without being cached.
    peer_requests: to other nodes; peer_failed: of those, without an answer or with a wrong one.
    hits, misses: samples whose bytes were, or were not, on the local disk when they were requested;
    hit_ratio: hits / (hits + misses), 1.0 before the first sample.
    requests: to the store; retries, hedges: of those, repeated after a failure, or sent a second
    time because the first was late; throttled: answered with 429 or 503. refetched: objects fetched
    again because their bytes were wrong.
    remote_wait_s: time that reading threads waited for the store.
    cache_bytes: of the bytes that this node reads in an epoch, those that the cache keeps for this
    job; cache_max_bytes: the cache's limit.

    samples_per_s: rate while iterating, without the first batch; 0.0 before the second batch.
    left_out: samples that indexing or packing left out of the dataset, by reason; for a part or a
    concatenation of datasets, those of all of them.
    bad: bad samples for which a replacement or a marked sample was delivered; quarantine: the file
    that lists them, "" without one.
    gil_late: share of the reading threads' attempts to take Python's GIL that came late because
    another thread held it.
    limit, cause: the stage that limits the job, and the reason; verdict: both as sentences, with
    the change that would help most. facts: the values from which they were derived.
    job: the waits that all processes of the job publish once a minute and at the end of an epoch,
    with the slowest process; None without a process group.
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
    map_s: float
    bytes_disk: int
    bytes_memory: int
    resident_hits: int
    resident_bytes: int
    decoded_bytes: int
    delivered_bytes: int
    chunks_decoded: int
    chunks_again: int
    chunks_memory_bytes: int
    chunks_disk_bytes: int
    bytes_remote: int
    bytes_peers: int
    peer_requests: int
    peer_failed: int
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
    facts: LoaderFacts = field(repr=False)
    job: JobStatistics | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples in {self.batches:,} batches, {self.samples_per_s:,.0f}/s; "
            f"waited {self.wait_share:.1%} of the time "
            f"(p50 {self.wait_p50_s * 1e3:.1f} ms, p99 {self.wait_p99_s * 1e3:.1f} ms a batch), "
            f"first batch after {self.first_batch_s:.2f} s; "
            f"read {format_size(self.bytes_disk)} from local files, "
            f"{format_size(self.bytes_remote)} from the remote{self._peers_text()}"
            f"{self._resident_text()}{self._bad_text()}."
            f"{self._chunks_text()}{self._tiers_text()}\n"
            f"{self.verdict}" + (f"\n{self.job}" if self.job is not None else "")
        )

    def _chunks_text(self) -> str:
        if not self.chunks_decoded:
            return ""
        times = self.decoded_bytes / max(1, self.delivered_bytes)
        on_disk = self.chunks_disk_bytes
        files = f" and {format_size(on_disk)} in the cache folder" if on_disk else ""
        return (
            f"\nChunks: {self.chunks_decoded:,} decoded ({self.chunks_again:,} again), "
            f"{format_size(self.decoded_bytes)}, {times:.2g} x what was delivered; at most "
            f"{format_size(self.chunks_memory_bytes)} kept in memory{files}."
        )

    def _tiers_text(self) -> str:
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

    def _peers_text(self) -> str:
        if not self.peer_requests:
            return ""
        failed = f" ({self.peer_failed:,} requests failed)" if self.peer_failed else ""
        return f", {format_size(self.bytes_peers)} from other nodes{failed}"

    def _resident_text(self) -> str:
        if not self.resident_bytes:
            return ""
        return (
            f"; {self.resident_hits:,} samples came from memory, which keeps "
            f"{format_size(self.resident_bytes)} of decoded images"
        )

    def _bad_text(self) -> str:
        left_out = sum(self.left_out.values())
        omitted = f"; {left_out:,} samples are left out of the dataset" if left_out else ""
        if not self.bad:
            return omitted
        path = f" ({self.quarantine})" if self.quarantine else ""
        return f"; {self.bad:,} bad samples{path}{omitted}"
