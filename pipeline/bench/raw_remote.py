"""What a remote gives when its bytes are only fetched: no cache, no samples, nothing checked."""

from __future__ import annotations

import time
from itertools import cycle, islice
from typing import TYPE_CHECKING

from penstock.cache.fetch.object_range import ObjectRange
from penstock.pipeline.report.ceilings import Rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.remote_shards import RemoteShards
    from penstock.readers.source import Source

_FIRST_BYTES, _FIRST_COUNT = 16 << 10, 64  # what hardly any remote takes long for


def raw_remote(dataset: Source, *, seconds: float) -> Rate | None:
    """The best that a group of requests gave in about so many seconds; None for a local dataset.
    Where several lie end to end, the first remote is asked.

    Requests begin small and grow, in bytes and in number, while they are answered quickly: up to
    the loader's own ranges (8 MiB), or the objects. Raises FetchError.
    """
    remote, contents = dataset.remote_shards, dataset.contents
    if remote is None:
        return None
    fetcher, best, size, count = remote.remotes[0].fetcher, None, _FIRST_BYTES, _FIRST_COUNT
    until = time.perf_counter() + seconds
    sample_bytes = float(contents.shard_bytes.sum()) / contents.samples
    while best is None or time.perf_counter() < until:
        spans = list(islice(_spans(remote, len(contents.sizes), size), count))
        began, cpu_s = time.perf_counter(), time.process_time()
        fetcher.fetch(spans, _drop)
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        got = sum(span.end - span.start for span in spans)
        rate = Rate(
            samples_per_s=got / sample_bytes / took_s,
            bytes_per_s=got / took_s,
            cpu_s_per_1000=1000 * cpu_s * sample_bytes / got,
        )
        if best is None or rate.bytes_per_s > best.bytes_per_s:
            best = rate
        if took_s < seconds / 4:
            size = min(2 * size, fetcher.policy.range_bytes)
            count = min(2 * count, fetcher.policy.max_connections)
    return best


def _spans(remote: RemoteShards, shards: int, size_bytes: int) -> Iterator[ObjectRange]:
    """Ranges of one shard of the first remote after the other, over and over."""
    for shard in cycle(range(shards)):
        found = remote.find(shard)
        for segment in found[1].segments if found and found[0] is remote.remotes[0] else ():
            for start in range(0, segment.size_bytes, size_bytes):
                yield ObjectRange(
                    path=segment.path,
                    start=segment.start + start,
                    end=segment.start + min(start + size_bytes, segment.size_bytes),
                    version=segment.version,
                )


def _drop(_number: int, _answer: object) -> None:
    """The bytes aren't for keeping."""
