"""What could be changed where bytes are waited for: a disk, a remote, a cache that is too small."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.pipeline.report.change import Change

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.report.facts import LoaderFacts, TierFacts

# More of the requests than this refused, and the store's limits are what to change.
_THROTTLED_SHARE = 0.05
# Below this a shard is a request or two that are all latency: throughput levels off at 4 to 8 MiB a
# request (measured).
TINY_SHARD_BYTES = 1 << 20
# A small dataset has no other choice than a few small shards.
_FEW_SHARDS = 64
# Reading threads that are on a core for more of their time than this don't wait for a disk.
_COMPUTING_SHARE = 0.5
# Chunks decoded more often than this are worth a sentence.
_DECODED_AGAIN = 1.2
# Of the bytes, from a disk: less than that may be others' reads. And a second of waiting, where
# bytes aren't counted: no disk is slower.
COLD_SHARE = 0.2
_LEAST_DISK_BYTES_PER_S = 1 << 18
# Sleeping for more than this for each sample's bytes is waiting, whatever the system counts (file
# systems over a network aren't all counted); threads that share cores sleep less.
_LONG_SLEEP_S = 0.5e-3
_OTHERS = "what the other stages gave alone"
_NOTHING_FETCHED = "nothing has to be fetched any more"


def reads_compute(facts: LoaderFacts) -> bool:
    """Whether reading local samples takes cores rather than a disk: the reading threads are on a
    core for most of their time, or aren't what is waited for at all."""
    is_behind = not facts.decodes and facts.wait_read_s < facts.wait_s / 2
    return is_behind or facts.read_s > _COMPUTING_SHARE * facts.load_s


def waits_for_disk(facts: LoaderFacts) -> bool:
    """Whether the reading threads were seen to wait for a disk: it was read from, or they slept for
    long over files. What is in the page cache, or decoded, is waited for otherwise."""
    if reads_compute(facts):
        return False
    least = max(COLD_SHARE * facts.bytes_read, _LEAST_DISK_BYTES_PER_S * facts.wait_s)
    if facts.disk_bytes is None or facts.disk_bytes > least:
        return True
    slept_s = (facts.load_s - facts.read_s) / max(1, facts.samples)
    return facts.bytes_read > 0 and not _decoded(facts) and slept_s > _LONG_SLEEP_S


def _decoded(facts: LoaderFacts) -> int:
    """Bytes of chunks that were decoded."""
    return 0 if facts.chunks is None else facts.chunks.counts.decoded_bytes


def disk_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where batches wait for local samples."""
    waits = waits_for_disk(facts)
    if waits and facts.shards is not None and not facts.shards.are_files:
        yield from _tiny_shards(facts)
    yield from _decoded_again(facts)
    # What is cached of a remote folder lies in blobs of many samples.
    are_files = facts.shards is not None and facts.shards.are_files and facts.remote is None
    are_files &= facts.bytes_read > 0 or facts.disk_bytes is None  # the index has the labels
    pack = f"A pack (`penstock pack {facts.url or 'SRC'} DST`)"
    if not waits:
        advice = "Larger batches, or fewer fields (`fields=`), take less for a sample."
        if are_files:
            advice = f"{pack} has no files to open for each sample."
        elif _decoded(facts):
            advice = "Data whose chunks are smaller or quicker to decode would move it."
        yield Change(cause="slow-read", why=_no_disk_words(facts), advice=advice)
        return
    pack = f"{pack} on a local NVMe would move it."
    yield Change(
        cause="slow-disk",
        why="The samples are single files." if are_files else "",
        advice=pack
        if facts.shards is None or are_files
        else "A local NVMe for it (or `cache=DiskCache(...)` there), or memory for all of its "
        "bytes, would move it.",
        removes=True,
        basis=_OTHERS,
        assumes="reading takes no time then",
    )


def _no_disk_words(facts: LoaderFacts) -> str:
    """What reading takes that waits for no disk."""
    each_us = 1e6 * facts.read_s / max(facts.samples, 1)
    words = f"It isn't the disk: reading and checking takes {each_us:.2g} us of a core for each"
    words += " sample"
    if decoded := _decoded(facts):
        rate = decoded / max(facts.step_s + facts.wait_s, 1e-9) / 1e6
        words += f", and {format_size(decoded)} of chunks were decoded, {rate:,.2g} MB/s"
    if facts.disk_bytes is not None and not reads_compute(facts):
        words += f"; the system counted {format_size(facts.disk_bytes)} read from disks meanwhile"
    return f"{words}."


def _decoded_again(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where chunks are decoded again, as nothing has room to keep them."""
    chunks = facts.chunks
    if chunks is None or not chunks.counts.again or chunks.counts.ratio < _DECODED_AGAIN:
        return
    counts = chunks.counts
    needed = chunks.open_chunks * chunks.mean_bytes
    kept = counts.max_bytes + counts.most_disk_bytes
    files = (
        f" and {format_size(counts.most_disk_bytes)} of the cache folder"
        if counts.most_disk_bytes
        else ""
    )
    advice = f'Dataset(decoded_bytes="{-(-needed // 2**20):.0f}MiB")'
    if not chunks.file_bytes:
        advice += ", a cache=DiskCache(...) for what memory can't keep,"
    smaller = int(chunks.window * kept / max(needed, 1))
    advice += f" or order=Order(window={max(1, smaller)})" if smaller < chunks.window else ""
    yield Change(
        cause="decoded-again",
        why=f"Decoded {counts.ratio:.2g} x what was delivered: this rank's windows have "
        f"{chunks.open_chunks:.0f} chunks of {format_size(chunks.mean_bytes)}, and "
        f"{format_size(counts.max_bytes)} of memory{files} keep them.",
        advice=f"{advice} would end that.",
        factor=counts.ratio,
        basis="bytes decoded over bytes delivered, counted",
        assumes="decoding chunks is all that reading takes",
        is_anomaly=True,
    )


def remote_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where batches wait for the store."""
    remote = facts.remote
    assert remote is not None
    fetched, traffic = _fetched_words(facts, remote), remote.traffic
    yield from _tiny_shards(facts, fetched)
    yield from _decoded_again(facts)
    if traffic.throttled > _THROTTLED_SHARE * traffic.requests:
        yield Change(
            cause="throttled",
            why=f"{fetched} It throttled {traffic.throttled:,} of {traffic.requests:,} requests.",
            advice="A higher limit at the store, or `penstock warm` before the job, would move it.",
            removes=True,
            basis=_OTHERS,
            assumes=_NOTHING_FETCHED,
            is_anomaly=True,
        )
    elif not remote.max_bytes:
        yield Change(
            cause="no-cache",
            why=fetched,
            advice="cache=DiskCache(...) would keep what is fetched for the next epoch.",
            removes=True,
            basis=_OTHERS,
            assumes=_NOTHING_FETCHED,
        )
    else:
        yield Change(
            cause="slow-remote",
            why=fetched,
            advice="What is fetched stays in the cache for the next epoch; `penstock warm` before "
            "the job would move the first.",
            removes=True,
            basis=_OTHERS,
            assumes=_NOTHING_FETCHED,
        )


def peer_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where batches wait for other nodes' caches."""
    remote = facts.remote
    assert remote is not None
    traffic = remote.traffic
    rate = traffic.bytes_peers / max(facts.elapsed_s, 1e-9) / 1e6
    failed = (
        f"; {traffic.peer_failed:,} of {traffic.peer_requests:,} requests failed"
        if traffic.peer_failed
        else ""
    )
    yield Change(
        cause="slow-peers",
        why=f"{format_size(traffic.bytes_peers)} came from other nodes' caches so far, "
        f"{rate:.2g} MB/s{failed}.",
        advice="What came stays in this node's cache for the next epoch, as far as it keeps it; "
        "`penstock warm` before the job would move the first.",
        removes=True,
        basis=_OTHERS,
        assumes=_NOTHING_FETCHED,
    )


def _fetched_words(facts: LoaderFacts, remote: TierFacts) -> str:
    """What came, and how fast."""
    traffic = remote.traffic
    rate = traffic.bytes_remote / max(facts.elapsed_s, 1e-9) / 1e6
    return (
        f"{format_size(traffic.bytes_remote)} fetched so far: it gave {rate:.2g} MB/s over at most "
        f"{remote.connections} connections, 99 % of the requests within "
        f"{remote.request_p99_s:.2g} s."
    )


def _tiny_shards(facts: LoaderFacts, fetched: str = "") -> Iterator[Change]:
    shards = facts.shards
    if shards is None or shards.count < _FEW_SHARDS or shards.mean_bytes >= TINY_SHARD_BYTES:
        return
    size = format_size(int(shards.mean_bytes))
    found = f"The shards are tiny: {shards.count:,} of {size}"
    if shards.are_files:
        found = f"Every sample lies in objects of its own: {shards.count:,} of {size}"
    yield Change(
        cause="tiny-shards",
        why=f"{found}, and each takes requests and openings. {fetched}".rstrip(),
        advice=f"`penstock pack {facts.url or 'SRC'} DST --shard-bytes 64MiB` would move it.",
        removes=True,
        basis=_OTHERS,
        assumes="requests and openings are all that it takes",
        is_anomaly=True,
    )


def cache_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where the cache keeps too little of what the node reads."""
    remote = facts.remote
    assert remote is not None
    # Blocks of the file system and the indexes take a little more than the data.
    needed = remote.max_bytes + 1.02 * (remote.wanted_bytes - remote.kept_bytes)
    yield Change(
        cause="small-cache",
        why=f"It keeps {remote.kept_bytes / max(remote.wanted_bytes, 1):.0%} of the "
        f"{format_size(remote.wanted_bytes)} that this node reads.",
        advice=f'max_bytes="{-(-needed // 2**20):.0f}MiB" would end the fetching.',
        removes=True,
        basis=_OTHERS,
        assumes=_NOTHING_FETCHED,
        is_anomaly=True,
    )
