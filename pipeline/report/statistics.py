"""The table of a loader's counters, whose `str` names the limit of the job.

Each field of `Statistics` is declared once, with its meaning and its source; the counts of the
cache are those of its own table, `Traffic`. From these rows follow the values (`Meter.snapshot`),
the exports to Prometheus and TensorBoard (`metrics`) and the documentation
(`help(penstock.Statistics)`).
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from penstock.cache.base import Traffic, format_size
from penstock.pipeline.report.run_facts import LoaderFacts, MapFacts, ResidentFacts, TierFacts
from penstock.readers.formats import DecodedCounts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.pipeline.report.job_statistics import JobStatistics
    from penstock.pipeline.report.part_counts import PartStatistics
    from penstock.pipeline.report.run_facts import Cause, Limit


def _row(text: str, *, of: type | None = None, name: str = "", grows: bool = False) -> Any:
    """Declare a row. of: the table that has the value; None is the loader's `Meter`. name: of the
    field there, if it is another one."""
    return field(metadata={"text": text, "grows": grows, "of": of, "name": name})


def _count(text: str) -> Any:
    """Declare a counter of the loader's `Meter`."""
    return _row(text, grows=True)


def _same(table: type, name: str) -> Any:
    """Declare a row as another table declares it."""
    (row,) = (each for each in fields(table) if each.name == name)
    return field(metadata={**row.metadata, "of": table, "name": name})


_PARTS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics(Traffic):
    """The measurements of one loader so far. Times are seconds of this rank since it was built.

    Counts of the store and the cache (those of `Traffic`, and cache_bytes and cache_max_bytes) are
    0 for a local dataset, except bytes_disk; they and those of chunks begin when this process opens
    the dataset. limit, cause: the stage that limits the job, and the reason; verdict: both as
    sentences, with the change that would help most. facts: the values from which they were derived.
    job: the waits that all processes of the job publish once a minute and at the end of an epoch,
    with the slowest process; None without a process group. left_out: samples that indexing or
    packing left out of the dataset, by reason; for a part or a concatenation of datasets, those of
    all of them. parts: of a mixture, the counts of each part by its name; empty for other datasets.
    """

    samples: int = _count('samples delivered to the training loop, with the padding of pad="mask"')
    batches: int = _count("batches delivered to the training loop")
    first_batch_s: float = _row("wait for the first batch; no other field includes it")
    step_s: float = _count(
        "time between two batches outside the loader, which is the model's, and in device_augment="
    )
    wait_s: float = _count("time in the loader, waiting for a batch")
    wait_share: float = _row("wait_s / (step_s + wait_s)", of=LoaderFacts)
    wait_p50_s: float = _row("median of the wait for one batch, over the latest 4,096")
    wait_p99_s: float = _row("99 % quantile of the wait for one batch, over the latest 4,096")
    wait_read_s: float = _count("the part of wait_s spent waiting for bytes")
    wait_decode_s: float = _count("the part of wait_s spent waiting for DALI")
    read_s: float = _count(
        "CPU time of the reading threads; a lot is fine while wait_read_s is low"
    )
    load_s: float = _count("wall-clock time of the reading threads, waits included")
    map_s: float = _same(MapFacts, "seconds")
    bytes_memory: int = _same(ResidentFacts, "bytes_memory")
    resident_hits: int = _same(ResidentFacts, "hits")
    resident_bytes: int = _same(ResidentFacts, "size_bytes")
    decoded_bytes: int = _same(DecodedCounts, "decoded_bytes")
    delivered_bytes: int = _same(DecodedCounts, "delivered_bytes")
    chunks_decoded: int = _same(DecodedCounts, "chunks")
    chunks_again: int = _same(DecodedCounts, "again")
    chunks_memory_bytes: int = _same(DecodedCounts, "most_memory_bytes")
    chunks_disk_bytes: int = _same(DecodedCounts, "most_disk_bytes")
    hit_ratio: float = _row("hits / (hits + misses); 1.0 before the first sample", of=Traffic)
    cache_bytes: int = _same(TierFacts, "kept_bytes")
    cache_max_bytes: int = _same(TierFacts, "max_bytes")
    samples_per_s: float = _row(
        "rate while iterating, without the first batch; 0.0 before the second", of=LoaderFacts
    )
    decode_threads: int = _row("decode threads of this rank")
    bad: int = _count("bad samples that were replaced, or delivered with valid=False")
    quarantine: str = _row('the file that lists the bad samples, "" without one')
    gil_late: float = _row(
        "share of the reading threads' attempts to take Python's GIL that came late, because "
        "another thread held it",
        of=LoaderFacts,
    )
    limit: Limit
    cause: Cause
    verdict: str
    facts: LoaderFacts = field(repr=False)
    job: JobStatistics | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, PartStatistics] = field(default_factory=dict)

    def __str__(self) -> str:
        line = (
            f"{self.samples:,} samples in {self.batches:,} batches, {self.samples_per_s:,.0f}/s; "
            f"waited {self.wait_share:.1%} of the time (p50 {self.wait_p50_s * 1e3:.1f} ms, p99 "
            f"{self.wait_p99_s * 1e3:.1f} ms a batch), first batch after {self.first_batch_s:.2f} "
            f"s; read {format_size(self.bytes_disk)} from local files, "
            f"{format_size(self.bytes_remote)} from the remote"
        )
        if self.peer_requests:
            failed = f" ({self.peer_failed:,} requests failed)" if self.peer_failed else ""
            line += f", {format_size(self.bytes_peers)} from other nodes{failed}"
        if self.resident_bytes:
            kept = f"{format_size(self.resident_bytes)} of decoded images"
            line += f"; {self.resident_hits:,} samples came from memory, which keeps {kept}"
        if self.bad:
            path = f" ({self.quarantine})" if self.quarantine else ""
            line += f"; {self.bad:,} bad samples{path}"
        if left_out := sum(self.left_out.values()):
            samples = "1 sample is" if left_out == 1 else f"{left_out:,} samples are"
            line += f"; {samples} left out of the dataset"
        lines = [f"{line}."]
        if self.chunks_decoded:
            size, memory, disk = map(
                format_size, (self.decoded_bytes, self.chunks_memory_bytes, self.chunks_disk_bytes)
            )
            files = f" and {disk} in the cache folder" if self.chunks_disk_bytes else ""
            ratio = self.decoded_bytes / max(1, self.delivered_bytes)
            lines.append(
                f"Chunks: {self.chunks_decoded:,} decoded ({self.chunks_again:,} again), {size}, "
                f"{ratio:.2g} x what was delivered; at most {memory} kept in memory{files}."
            )
        if self.requests or self.cache_max_bytes:
            refetched = f", {self.refetched:,} objects refetched" if self.refetched else ""
            keeps = f"; the cache keeps {format_size(self.cache_bytes)}"
            lines.append(
                f"Remote: {self.requests:,} requests ({self.retries:,} retries, {self.hedges:,} "
                f"hedges, {self.throttled:,} throttled{refetched}), "
                f"{format_size(self.bytes_filled)} into the cache, "
                f"{format_size(self.bytes_passed)} past it; waited {self.remote_wait_s:.1f} s. "
                f"Hits: {self.hit_ratio:.1%} of the samples{keeps if self.cache_max_bytes else ''}."
            )
        if self.parts:
            some = list(self.parts.items())[:_PARTS_SHOWN]
            more = len(self.parts) - len(some)
            shown = "; ".join(f'"{name}": {part}' for name, part in some)
            lines.append(f"Parts: {shown}{f'; and {more:,} more' if more else ''}.")
        lines += [self.verdict, *([] if self.job is None else [str(self.job)])]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the text with its verdict in bold, and all counters."""
        from penstock.readers import table_html

        verdict = html.escape(self.verdict)
        text = html.escape(str(self)).replace(verdict, f"<b>{verdict}</b>").replace("\n", "<br>")
        rows = [
            (row.name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}", about)
            for row in fields(self)
            if isinstance(value := getattr(self, row.name), int | float)
            for about in [row.metadata.get("text", "")]
        ]
        return f"{text}<details><summary>All counters</summary>{table_html(rows)}</details>"


def read_rows(tables: Mapping[type | None, Any]) -> dict[str, Any]:
    """Return the values of all rows. tables: by their class; of one that is None, all values are
    0."""
    values = dict[str, Any]()
    for row in fields(Statistics):
        if row.metadata:
            table = tables[row.metadata.get("of", Traffic)]
            name = row.metadata.get("name") or row.name
            values[row.name] = 0 if table is None else getattr(table, name)
    return values


Statistics.__doc__ = f"{Statistics.__doc__}\n" + "\n".join(
    f"    {row.name}: {row.metadata['text']}." for row in fields(Statistics) if row.metadata
)
