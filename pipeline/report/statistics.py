"""Snapshot what a loader has measured of itself; its `str` says what holds the job back."""

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
    """What a loader has measured about itself so far.

    Times are seconds of this rank since the loader was built.
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
    map_s: of that, in the functions of the recipe's Maps, or waiting for their processes.
    bytes_disk: encoded bytes read from local files, a cache's among them.
    bytes_memory: decoded bytes that came from memory (`resident=`) in place of reading and
    decoding; resident_hits: of how many samples; resident_bytes: of images that are kept there.
    decoded_bytes: of chunks that are decoded as a whole (Zarr, Parquet, …), since the dataset was
    opened in this process; delivered_bytes: the part of them that samples were made of; their ratio
    is 1 where each chunk was decoded once and used up. chunks_decoded: how many; chunks_again: of
    those, as there was no room to keep them. chunks_memory_bytes, chunks_disk_bytes: kept in memory
    and in the cache folder, at most.

    All zero for a local dataset, else counted since the dataset was opened in this process:
    bytes_remote: received from the store, metadata too; bytes_peers: from other nodes' caches;
    bytes_filled: of both, kept in the cache; bytes_passed: handed on without being kept.
    peer_requests: to other nodes; peer_failed: of those, without an answer or with a wrong one.
    hits, misses, hit_ratio: samples whose bytes were on
    the local disk when they were asked for, or not; hit_ratio is 1.0 before the first.
    requests; retries, hedges: of those, sent again after a failure, or as the first was late;
    throttled: answered with 429 or 503. refetched: objects fetched again as their bytes were wrong.
    remote_wait_s: time that reading threads waited for the store.
    cache_bytes: of what this node reads in an epoch, what the cache keeps for this job;
    cache_max_bytes: the cache's limit.

    samples_per_s: while iterating, the first batch left out; 0.0 before the second batch.
    left_out: samples that the dataset leaves out since it was indexed or packed, by reason; of the
    datasets that a part or several end to end are made of, all.
    bad: samples that were handed out replaced or marked, as they are bad; quarantine: the file that
    lists them, "" without one.
    gil_late: share of the reading threads' tries to take Python's GIL that came late, as somebody
    kept it.
    limit, cause: the stage that holds the job back, and what is behind it; verdict: both in words,
    and what would move it. facts: what that follows from.
    job: what all processes of the job told of their waits, once a minute and at epochs' ends: who
    is slowest, and why; None without a process group.
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
        told = f"; {left_out:,} samples are left out of the dataset" if left_out else ""
        if not self.bad:
            return told
        where = f" ({self.quarantine})" if self.quarantine else ""
        return f"; {self.bad:,} bad samples{where}{told}"
