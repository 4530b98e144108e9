"""Count what a loader delivers and how long the training loop waits for it.

Time is measured at two places only: where the training loop waits for a batch, and where bytes
are read. The cache counts its own traffic (`cache.base.counters`).
"""

from __future__ import annotations

import resource
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.cache.base import Traffic
from penstock.pipeline.report import probes
from penstock.pipeline.report.probes import ReadProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.pipeline.report import run_facts
    from penstock.pipeline.report.job_statistics import JobStatistics
    from penstock.pipeline.report.part_counts import PartMeter
    from penstock.pipeline.report.statistics import Statistics

T = TypeVar("T")

_WAITS_KEPT = 4096
_BLOCK_BYTES = 512  # of a unit of ru_inblock (getrusage(2))
# Measuring the cores takes 0.2 s, and the other programs on them seldom change.
_CORES_EVERY_S = 300.0


# The attributes of a meter that are fields of LoaderFacts, too.
_FACTS = (
    *("step_s", "wait_s", "wait_read_s", "wait_decode_s", "read_s", "load_s"),
    *("decode_threads", "usable_cores", "device", "url", "decodes", "workers"),
)


# The attributes that a loader's next meter continues.
_COUNTS = (
    *("samples", "batches", "counted_samples", "first_batch_s", "step_s", "wait_s", "waits"),
    *("wait_read_s", "wait_decode_s", "read_s", "load_s", "bytes_disk", "counted_bytes"),
    *("disk_mark", "bad", "quarantine"),
)


def _disk_bytes() -> int:
    """Return the bytes that the system has read from disks for this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * _BLOCK_BYTES


@dataclass(slots=True)
class Meter:
    """The counters of one loader. Its engine increments them, and one thread writes each of them.

    decode_threads, usable_cores: of this rank. url: of a native dataset; output: height and width
    of the images that its recipe delivers, None without images. decodes: True if DALI has images to
    decode. The callables return facts for the verdict; each is None if its feature isn't in use.
    """

    decode_threads: int
    device: str
    usable_cores: int = 1
    url: str = ""
    shards: Callable[[], run_facts.ShardFigures] | None = None  # a native dataset
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
    remote: Callable[[], run_facts.TierFacts] | None = None  # a remote dataset
    resident: Callable[[], run_facts.ResidentFacts] | None = None  # resident images
    map: Callable[[], run_facts.MapFacts] | None = None  # the recipe's Maps
    chunks: Callable[[], run_facts.ChunkFacts] | None = None  # data in chunks
    job: Callable[[], JobStatistics | None] | None = None  # several processes
    parts: PartMeter | None = None  # a mixture
    bad: int = 0
    quarantine: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)
    workers: int | None = None  # worker processes of a torch dataset; None for a native one
    cores: run_facts.CoreSpeeds | None = None
    cores_due_s: float = 0.0
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=_WAITS_KEPT))

    def count_batch(
        self, samples: int, *, wait_s: float, read_s: float, decode_s: float, size_bytes: int = 0
    ) -> None:
        """Count one delivered batch.

        read_s, decode_s: the parts of wait_s spent waiting for bytes and for DALI. size_bytes: the
        encoded bytes that were read for it.
        """
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
        """Return the statistics as of now, with their verdict.

        briefly: neither measure the cores nor read what the other processes published, because both
        take a while.
        """
        # Imported late: most loaders start and deliver without the modules of the verdict.
        from penstock.pipeline.report import diagnose, run_facts
        from penstock.pipeline.report.statistics import Statistics, read_rows
        from penstock.readers.formats import DecodedCounts

        remote, resident = _called(self.remote), _called(self.resident)
        late, late_s = self.probe.gil()
        facts = run_facts.LoaderFacts(
            **{name: getattr(self, name) for name in _FACTS},
            samples=self.counted_samples,
            batches=max(0, self.batches - 1),
            fill_s=resident.fill_s if resident else 0.0,
            elapsed_s=self.first_batch_s + self.step_s + self.wait_s,
            bytes_read=self.counted_bytes,
            disk_bytes=_disk_bytes() - self.disk_mark,
            gil_late=late,
            gil_late_s=late_s,
            remote=remote,
            shards=_called(self.shards),
            images=self.probe.images(self.output) if self.output else None,
            map=_called(self.map),
            chunks=_called(self.chunks),
            part=None if self.parts is None else self.parts.slowest(),
        )
        diagnosis = diagnose(facts)
        if diagnosis.limit == "decode" and facts.device == "cpu" and not briefly:
            facts = replace(facts, cores=self._cores())
            diagnosis = diagnose(facts)
        tables: dict[type | None, Any] = {
            None: self,
            run_facts.LoaderFacts: facts,
            Traffic: Traffic(bytes_disk=self.bytes_disk) if remote is None else remote.traffic,
            run_facts.TierFacts: remote,
            run_facts.ResidentFacts: resident,
            DecodedCounts: None if facts.chunks is None else facts.chunks.counts,
            run_facts.MapFacts: facts.map,
        }
        return Statistics(
            **read_rows(tables),
            limit=diagnosis.limit,
            cause=diagnosis.cause,
            verdict=diagnosis.verdict,
            facts=facts,
            job=None if briefly else _called(self.job),
            left_out=self.left_out,
            parts={} if self.parts is None else self.parts.table(),
        )

    def take_over(self, other: Meter) -> None:
        """Continue the counts of another meter of the same loader, which counts no more."""
        for name in _COUNTS:
            setattr(self, name, getattr(other, name))
        if self.parts is not None and other.parts is not None:
            self.parts.take_over(other.parts)

    @property
    def wait_p50_s(self) -> float:
        """The median of the latest waits."""
        return float(np.quantile(np.array(self.waits or [0.0]), 0.5))

    @property
    def wait_p99_s(self) -> float:
        """The 99 % quantile of the latest waits."""
        return float(np.quantile(np.array(self.waits or [0.0]), 0.99))

    def _cores(self) -> run_facts.CoreSpeeds:
        """Return the speeds of the cores, measured at most every `_CORES_EVERY_S`."""
        now = time.monotonic()
        if self.cores is None or now >= self.cores_due_s:
            self.cores, self.cores_due_s = probes.core_speeds(), now + _CORES_EVERY_S
        return self.cores


def _called(facts: Callable[[], T] | None) -> T | None:
    """Return the facts of a feature; None if it isn't in use."""
    return None if facts is None else facts()
