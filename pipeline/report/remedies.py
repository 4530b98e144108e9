"""Propose, for each limit, the changes that could remove it, with their predicted gains.

Gains follow from the run's own figures: a gain is a factor on the run's rate from a stated model,
or the whole stage (`removes`: what remains are the other stages), or unknown. Where one of the
changes of a stage comes from something out of the ordinary (a slow core, progressive JPEGs, tiny
shards, a small cache), the diagnosis names that as the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache.base import format_size
from penstock.pipeline.report.run_facts import SLOW_CORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.pipeline.report.run_facts import (
        Cause,
        ImageFigures,
        Limit,
        LoaderFacts,
        TierFacts,
    )

# A change that gains less isn't worth a sentence.
LEAST_GAIN = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to change. why: a sentence on what was found; advice: what to do. factor: on the
    run's rate, None if unknown; removes: it takes the whole stage away; basis: the figures that
    come from; assumes: what has to be so for the gain to come true, behind an "if". is_anomaly:
    what was found is out of the ordinary."""

    cause: Cause
    why: str = ""
    advice: str
    factor: float | None = None
    removes: bool = False
    basis: str = ""
    assumes: str = ""
    is_anomaly: bool = False


_STORE_RESULTS = (
    "store what it returns and read that in its place: a column of a table, or .npy files beside "
    "the data, then `penstock pack`"
)


def map_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where a Map is waited for, the first that is left to do."""
    found = facts.map
    assert found is not None
    share = min(1.0, found.seconds / facts.load_s) if facts.load_s else 1.0
    each_ms = 1e3 * found.seconds / max(facts.samples, 1)
    why = (
        f"{found.name} is {share:.0%} of the time that goes into reading: {each_ms:.2g} ms a sample"
    )
    cores = facts.usable_cores
    batched = "" if found.batched else ", batched=True if it can take many samples at once"
    if not found.processes:
        yield Change(
            cause="slow-map",
            why=f"{why}, in the reading threads.",
            advice=f"processes={max(2, cores)} would call it in processes of its own{batched}; or "
            f"{_STORE_RESULTS}.",
        )
    elif found.processes < cores:
        yield Change(
            cause="slow-map",
            why=f"{why}, by {found.processes} processes; {cores} cores are usable.",
            advice=f"processes={cores} would move it{batched}; or {_STORE_RESULTS}.",
            factor=cores / found.processes,
            basis=f"{cores} cores for {found.processes}",
            assumes="the function computes, and the cores are free",
        )
    else:
        yield Change(
            cause="slow-map",
            why=f"{why}, by {found.processes} processes on {cores} cores.",
            advice=f"Do it once{batched}: {_STORE_RESULTS}.",
        )


# With fewer progressive images than this it doesn't matter what they cost, where that isn't known.
_MANY_PROGRESSIVE = 0.1
# Images are oversized with so many times the pixels that they have at `pack_short`: photographs of
# ImageNet's size have 2.5 times.
OVERSIZED = 4.0


def augment_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where augmenting is the larger part of the work."""
    share = facts.ceilings.decode_share if facts.ceilings is not None else None
    yield Change(
        cause="slow-augment",
        why="" if share is None else f"Decoding is only {share:.0%} of the work.",
        advice='Cheaper operations behind the crop in augment=, or device="cuda" for them, would '
        "move it.",
        factor=1 / share if share else None,
        basis="" if share is None else f"decoding is {share:.0%} of the work, measured",
        assumes="none of them is left",
    )
    yield from _slow_core(facts)
    yield from _more_threads(facts)


def decode_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where decoding is."""
    share = facts.ceilings.decode_share if facts.ceilings is not None else None
    if facts.images is not None and facts.images.seen:
        yield from _progressive(facts, facts.images, share)
        yield from _smaller(facts, facts.images, share)
    yield from _slow_core(facts)
    yield from _more_threads(facts)
    yield Change(
        cause="slow-decode",
        advice="Smaller images or a smaller crop would move it."
        if facts.device.startswith("cuda")
        else 'More cores for this rank (num_workers=), device="cuda", or smaller images would move '
        "it.",
    )


def _more_threads(facts: LoaderFacts) -> Iterator[Change]:
    if facts.device.startswith("cuda") or facts.decode_threads >= facts.usable_cores:
        return
    yield Change(
        cause="slow-decode",
        why=f"{facts.usable_cores} cores are usable.",
        advice=f"num_workers={facts.usable_cores} would move it.",
        factor=facts.usable_cores / facts.decode_threads,
        basis=f"{facts.usable_cores} cores for {facts.decode_threads}",
        assumes="threads share the work evenly and the cores are free",
    )


def _share_words(share: float | None) -> str:
    """What a change of decoding alone leaves as it is."""
    if share is None:
        return "at most: what augmenting takes wasn't measured"
    return f"decoding is {share:.0%} of the work, measured"


def _assumed_words(share: float | None) -> str:
    """What a gain by less decoding assumes where nobody has measured its part of the work."""
    return "decoding is all of the work and " if share is None else ""


def _speedup(time_share: float, *, of_work: float | None) -> float:
    """Amdahl's law: the part `of_work` of the time takes `time_share` of what it took.

    G. M. Amdahl, Validity of the single processor approach, AFIPS 1967."""
    part = 1.0 if of_work is None else of_work
    return 1 / (1 - part + part * time_share)


def _progressive(facts: LoaderFacts, images: ImageFigures, share: float | None) -> Iterator[Change]:
    measured = facts.ceilings.progressive if facts.ceilings is not None else None
    found = (
        f"{images.progressive:.0%} of the images are progressive JPEGs ({images.seen} looked "
        "at), which take"
    )
    change = Change(
        cause="progressive",
        why=f"{found} longer to decode than baseline ones; `penstock bench` measures by how much.",
        advice=f"`penstock pack {facts.url or 'SRC'} DST --baseline` rewrites them without loss.",
        is_anomaly=True,
    )
    if measured is None:
        if images.progressive >= _MANY_PROGRESSIVE:
            yield change
        return
    cost = 1 + images.progressive * (measured.times - 1)
    factor = _speedup(1 / cost, of_work=share)
    if factor < LEAST_GAIN:
        return
    beside = "the same images as baseline ones" if measured.of_twins else "the baseline ones here"
    yield replace(
        change,
        why=f"{found} {measured.times:.2g} times as long to decode as {beside} "
        f"({measured.images} measured).",
        factor=factor,
        basis=f"{measured.times:.2g} times for each of them, measured; {_share_words(share)}",
        assumes=f"{_assumed_words(share)}the other images are like those looked at",
    )


def _smaller(facts: LoaderFacts, images: ImageFigures, share: float | None) -> Iterator[Change]:
    ratio = images.mean_pixels / images.mean_short_pixels
    factor = _speedup(1 / ratio, of_work=share)
    if factor < LEAST_GAIN:
        return
    is_oversized = ratio >= OVERSIZED
    kind = "oversized" if is_oversized else "larger than needed"
    yield Change(
        cause="oversized" if is_oversized else "slow-decode",
        why=f"The images are {kind}: {images.mean_pixels / 1e6:.2g} megapixels in the mean "
        f"({images.seen} looked at) for an output of {images.out_short} pixels.",
        advice=f"`penstock pack {facts.url or 'SRC'} DST --short-side {images.pack_short}` keeps "
        "what a crop of that size can show.",
        factor=factor,
        basis=f"{ratio:.2g} times fewer pixels; {_share_words(share)}",
        assumes=f"{_assumed_words(share)}the time to decode goes with the pixels",
        is_anomaly=is_oversized,
    )


def _slow_core(facts: LoaderFacts) -> Iterator[Change]:
    """Threads that share their work lose what the slow cores are slower by, where there are no
    other cores to go to."""
    if facts.cores is None or facts.device.startswith("cuda"):
        return
    speeds = facts.cores.speeds
    threads = min(facts.decode_threads, len(speeds))
    factor = threads / min(sum(speeds), threads)
    if factor < LEAST_GAIN or min(speeds) >= SLOW_CORE:
        return
    speed, number = min(zip(speeds, facts.cores.numbers, strict=True))
    yield Change(
        cause="slow-core",
        why=f"Core {number} is slow: it does {speed:.0%} of the work of the fastest in the same "
        "time.",
        advice="Stop or move what else runs there (`ps -eLo psr,pid,pcpu,comm` tells the core of "
        "each thread).",
        factor=factor,
        basis=f"{len(speeds)} cores do the work of {sum(speeds):.1f}, measured",
        assumes="all cores are as fast as the fastest then",
        is_anomaly=True,
    )


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


def changes_for(limit: Limit, facts: LoaderFacts) -> list[Change]:
    """What could be changed, one at least. limit: not "nothing yet"."""
    return list(_CHANGES[limit](facts))


def _model(_: LoaderFacts) -> Iterator[Change]:
    yield Change(
        cause="slow-model",
        advice="A faster input side would change nothing.",
        removes=True,
        assumes="the model takes no time",
    )


def _python(facts: LoaderFacts) -> Iterator[Change]:
    yield Change(
        cause="gil",
        why=f"It holds Python's GIL: {facts.gil_late:.0%} of the reading threads' tries to take it "
        f"came late, by {facts.gil_late_s * 1e3:.1f} ms.",
        advice="Move what computes in Python between two batches to a process of its own, or to "
        "native code that lets the GIL go.",
        removes=True,
        assumes="the training loop takes no time",
        is_anomaly=True,
    )


def _dataset(_: LoaderFacts) -> Iterator[Change]:
    yield Change(
        cause="dataset-code",
        advice="More num_workers=, or a native dataset (`penstock pack`), whose images "
        "DALI decodes, would move it.",
    )


def _copy(_: LoaderFacts) -> Iterator[Change]:
    yield Change(
        cause="slow-copy",
        advice="Smaller images (`penstock pack --short-side`) have fewer bytes to copy.",
    )


_CHANGES: dict[Limit, Callable[[LoaderFacts], Iterator[Change]]] = {
    "model": _model,
    "python": _python,
    "copy": _copy,
    "augment": augment_changes,
    "decode": decode_changes,
    "dataset": _dataset,
    "map": map_changes,
    "disk": disk_changes,
    "remote": remote_changes,
    "peers": peer_changes,
    "cache": cache_changes,
}
