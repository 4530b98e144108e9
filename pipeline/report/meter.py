"""Count what a loader delivers and how long the training loop waits for it.

Time is measured at two places only: where the training loop waits for a batch, and where bytes
are read. The cache counts its own traffic (`cache.base.counters`).
"""

from __future__ import annotations

import resource
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import Traffic
from penstock.pipeline.report.probes import ReadProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.pipeline.report.diagnosis import Diagnosis
    from penstock.pipeline.report.job_statistics import JobStatistics
    from penstock.pipeline.report.run_facts import (
        ChunkFacts,
        CoreSpeeds,
        LoaderFacts,
        MapFacts,
        ResidentFacts,
        ShardFigures,
        TierFacts,
    )
    from penstock.pipeline.report.statistics import Statistics

_WAITS_KEPT = 4096
_TRAFFIC_FIELDS = (
    "bytes_remote",
    "bytes_peers",
    "peer_requests",
    "peer_failed",
    "bytes_filled",
    "bytes_passed",
    "hits",
    "misses",
    "hit_ratio",
    "requests",
    "retries",
    "hedges",
    "throttled",
    "refetched",
    "remote_wait_s",
)
"""Of the traffic, as it is told."""
BLOCK_BYTES = 512
"""Of ru_inblock, by getrusage(2)."""
# Looking at the cores takes 0.2 s, and what else runs on them seldom changes.
_CORES_EVERY_S = 300.0


def _disk_bytes() -> int:
    """Bytes that this process has had to read from disks."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * BLOCK_BYTES


@dataclass(slots=True)
class Meter:
    """The counters of one loader, which its engine adds to; one thread writes each of them.

    decode_threads, usable_cores: of this rank. url: of a native dataset; output: height and
    width that its recipe hands out, None without images. decodes: whether DALI has any to decode.
    """

    decode_threads: int
    device: str
    usable_cores: int = 1
    url: str = ""
    shards: Callable[[], ShardFigures] | None = None  # of a native dataset
    output: tuple[int, int] | None = None
    decodes: bool = True
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
    counted_bytes: int = 0
    disk_mark: int = 0
    remote: Callable[[], TierFacts] | None = None  # of a remote dataset
    resident: Callable[[], ResidentFacts] | None = None  # where images stay in memory
    map: Callable[[], MapFacts] | None = None  # where the recipe has Maps
    chunks: Callable[[], ChunkFacts] | None = None  # where chunks are decoded as a whole
    job: Callable[[], JobStatistics | None] | None = None  # where other processes tell theirs
    bad: int = 0
    quarantine: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)
    workers: int | None = None  # torch's, of a torch dataset; None: a native one
    cores: CoreSpeeds | None = None
    cores_due_s: float = 0.0
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=_WAITS_KEPT))

    def count_batch(
        self, samples: int, *, wait_s: float, read_s: float, decode_s: float, size_bytes: int = 0
    ) -> None:
        """Count one batch. read_s, decode_s: the parts of wait_s spent on bytes and on DALI.
        size_bytes: that were read for it."""
        self.samples += samples
        self.batches += 1
        if self.batches == 1:
            self.first_batch_s, self.disk_mark = wait_s, _disk_bytes()
            return
        self.counted_samples += samples
        self.counted_bytes += size_bytes
        self.wait_s += wait_s
        self.wait_read_s += read_s
        self.wait_decode_s += decode_s
        self.waits.append(wait_s)

    def snapshot(self, *, briefly: bool = False) -> Statistics:
        """The statistics as of now, with the verdict that follows from them. briefly: without what
        takes a while, the cores and the other processes."""
        # Here: a loader that nobody asks starts without the modules that judge.
        from penstock.pipeline.report.statistics import Statistics
        from penstock.readers.formats import DecodedCounts

        waits = np.array(self.waits or [0.0])
        remote = self.remote() if self.remote is not None else None
        resident = self.resident() if self.resident is not None else None
        traffic = remote.traffic if remote is not None else Traffic(bytes_disk=self.bytes_disk)
        facts = self._facts(remote, fill_s=resident.fill_s if resident else 0.0)
        facts, diagnosis = self._judged(facts, briefly=briefly)
        counts = facts.chunks.counts if facts.chunks is not None else DecodedCounts()
        return Statistics(
            samples=self.samples,
            batches=self.batches,
            first_batch_s=self.first_batch_s,
            step_s=self.step_s,
            wait_s=self.wait_s,
            wait_share=facts.wait_share,
            wait_p50_s=float(np.quantile(waits, 0.5)),
            wait_p99_s=float(np.quantile(waits, 0.99)),
            wait_read_s=self.wait_read_s,
            wait_decode_s=self.wait_decode_s,
            read_s=self.read_s,
            load_s=self.load_s,
            map_s=facts.map.seconds if facts.map else 0.0,
            bytes_disk=traffic.bytes_disk,
            **{name: getattr(traffic, name) for name in _TRAFFIC_FIELDS},
            bytes_memory=resident.bytes_memory if resident else 0,
            resident_hits=resident.hits if resident else 0,
            resident_bytes=resident.size_bytes if resident else 0,
            decoded_bytes=counts.decoded_bytes,
            delivered_bytes=counts.delivered_bytes,
            chunks_decoded=counts.chunks,
            chunks_again=counts.again,
            chunks_memory_bytes=counts.most_memory_bytes,
            chunks_disk_bytes=counts.most_disk_bytes,
            cache_bytes=remote.kept_bytes if remote is not None else 0,
            cache_max_bytes=remote.max_bytes if remote is not None else 0,
            samples_per_s=facts.samples_per_s,
            decode_threads=self.decode_threads,
            bad=self.bad,
            quarantine=self.quarantine,
            left_out=self.left_out,
            gil_late=facts.gil_late,
            limit=diagnosis.limit,
            cause=diagnosis.cause,
            verdict=diagnosis.verdict,
            facts=facts,
            job=self.job() if self.job is not None and not briefly else None,
        )

    def _judged(self, facts: LoaderFacts, *, briefly: bool) -> tuple[LoaderFacts, Diagnosis]:
        """What holds the run back, and the facts with what had to be looked at for that."""
        from penstock.pipeline.report.diagnosis import diagnose

        diagnosis = diagnose(facts)
        if diagnosis.limit == "decode" and facts.device == "cpu" and not briefly:
            facts = replace(facts, cores=self._cores())
            diagnosis = diagnose(facts)
        return facts, diagnosis

    def _facts(self, remote: TierFacts | None, *, fill_s: float) -> LoaderFacts:
        from penstock.pipeline.report.run_facts import LoaderFacts

        late, late_s = self.probe.gil()
        return LoaderFacts(
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
            bytes_read=self.counted_bytes,
            disk_bytes=_disk_bytes() - self.disk_mark,
            decodes=self.decodes,
            gil_late=late,
            gil_late_s=late_s,
            workers=self.workers,
            remote=remote,
            shards=self.shards() if self.shards is not None else None,
            images=self.probe.images(self.output) if self.output else None,
            map=self.map() if self.map is not None else None,
            chunks=self.chunks() if self.chunks is not None else None,
        )

    def _cores(self) -> CoreSpeeds:
        """How fast the cores are, looked at now and then."""
        from penstock.pipeline.report.core_speeds import core_speeds

        now = time.monotonic()
        if self.cores is None or now >= self.cores_due_s:
            self.cores, self.cores_due_s = core_speeds(), now + _CORES_EVERY_S
        return self.cores
