"""Propose, for each limit, the changes that could remove it, with their predicted gains.

A gain follows from the run's own figures. It is a factor on the run's rate, from a stated model; or
the removal of the whole stage (`removes`), which leaves the other stages; or unknown. If a change
addresses something unusual (a slow core, progressive JPEGs, tiny shards, a small cache), the
diagnosis names that as the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache.base import format_size
from penstock.pipeline.report.run_facts import SLOW_CORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.pipeline.report.run_facts import Cause, ImageFigures, Limit, LoaderFacts, Stage

# A change that gains less isn't worth mentioning.
LEAST_GAIN = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A proposed change.

    why: a sentence about the finding; advice: a sentence about the remedy. factor: the gain on the
    run's rate, None if unknown; removes: the change removes the whole stage; basis: the figures
    from which the gain follows; assumes: the conditions for the gain, to be read after an "if".
    is_anomaly: the finding is unusual.
    """

    cause: Cause
    why: str = ""
    advice: str
    factor: float | None = None
    removes: bool = False
    basis: str = ""
    assumes: str = ""
    is_anomaly: bool = False


_STORE_RESULTS = (
    "store its results and read those instead: a column of a table, or .npy files next to the "
    "data, then `penstock pack`"
)


def map_changes(facts: LoaderFacts) -> Iterator[Change]:
    """Propose the first of the remedies for a slow Map that isn't in use yet."""
    slowest = facts.map
    assert slowest is not None
    share = min(1.0, slowest.seconds / facts.load_s) if facts.load_s else 1.0
    each_ms = 1e3 * slowest.seconds / max(facts.samples, 1)
    cores, processes = facts.usable_cores, slowest.processes
    batched = "" if slowest.batched else ", batched=True if it can take many samples at once"
    is_short = 0 < processes < cores
    where, advice = f"by {processes} processes on {cores} cores", f"Do it once{batched}: "
    if not processes:
        where = "in the reading threads"
        advice = f"processes={max(2, cores)} would call it in processes of its own{batched}; or "
    elif is_short:
        where = f"by {processes} processes; {cores} cores are usable"
        advice = f"processes={cores} would help{batched}; or "
    yield Change(
        cause="slow-map",
        why=f"{slowest.name} takes {share:.0%} of the time for reading: {each_ms:.2g} ms a sample, "
        f"{where}.",
        advice=f"{advice}{_STORE_RESULTS}.",
        factor=cores / processes if is_short else None,
        basis=f"{cores} cores for {processes}" if is_short else "",
        assumes="the function computes, and the cores are free" if is_short else "",
    )


# A smaller share of progressive images isn't reported unless their cost was measured.
_MANY_PROGRESSIVE = 0.1
# Images are oversized if they have this many times the pixels that they have at `pack_short`.
# Photographs of ImageNet's size have 2.5 times as many.
OVERSIZED = 4.0


def augment_changes(facts: LoaderFacts) -> Iterator[Change]:
    """Propose changes if augmenting is the larger part of the work."""
    share = facts.ceilings.decode_share if facts.ceilings is not None else None
    yield Change(
        cause="slow-augment",
        why="" if share is None else f"Decoding is only {share:.0%} of the work.",
        advice='Cheaper operations after the crop in augment=, or device="cuda" for them, would '
        "help.",
        factor=1 / share if share else None,
        basis="" if share is None else f"decoding is {share:.0%} of the work, measured",
        assumes="no other operation is left",
    )
    yield from _slow_core(facts)
    yield from _more_threads(facts)


def decode_changes(facts: LoaderFacts) -> Iterator[Change]:
    """Propose changes if decoding is the larger part of the work."""
    share = facts.ceilings.decode_share if facts.ceilings is not None else None
    if facts.images is not None and facts.images.seen:
        yield from _progressive(facts, facts.images, share)
        yield from _smaller(facts, facts.images, share)
    yield from _slow_core(facts)
    yield from _more_threads(facts)
    yield Change(
        cause="slow-decode",
        advice="Smaller images or a smaller crop would help."
        if facts.device.startswith("cuda")
        else 'More cores for this rank (num_workers=), device="cuda", or smaller images would '
        "help.",
    )


def _more_threads(facts: LoaderFacts) -> Iterator[Change]:
    if facts.device.startswith("cuda") or facts.decode_threads >= facts.usable_cores:
        return
    yield Change(
        cause="slow-decode",
        why=f"{facts.usable_cores} cores are usable.",
        advice=f"num_workers={facts.usable_cores} would help.",
        factor=facts.usable_cores / facts.decode_threads,
        basis=f"{facts.usable_cores} cores for {facts.decode_threads}",
        assumes="threads share the work evenly and the cores are free",
    )


def _of_decoding(share: float | None) -> tuple[str, str]:
    """Return the basis of a gain by faster decoding, which is a share of the work, and what it
    assumes if that wasn't measured."""
    if share is None:
        unknown = "at most: the time for augmenting wasn't measured"
        return unknown, "decoding is all of the work and "
    return f"decoding is {share:.0%} of the work, measured", ""


def _speedup(time_share: float, *, of_work: float | None) -> float:
    """Return the gain if the part `of_work` of the time shrinks to `time_share` of itself.

    This is Amdahl's law (Validity of the single processor approach, AFIPS 1967).
    """
    part = 1.0 if of_work is None else of_work
    return 1 / (1 - part + part * time_share)


def _progressive(facts: LoaderFacts, images: ImageFigures, share: float | None) -> Iterator[Change]:
    measured = facts.ceilings.progressive if facts.ceilings is not None else None
    finding = (
        f"{images.progressive:.0%} of the images are progressive JPEGs ({images.seen} inspected), "
        "which take"
    )
    change = Change(
        cause="progressive",
        why=f"{finding} longer to decode than baseline ones; `penstock bench` measures how much "
        "longer.",
        advice=f"`penstock pack {facts.source} DST --baseline` rewrites them without loss.",
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
    part, assumes = _of_decoding(share)
    baseline = "the same images as baseline ones" if measured.of_twins else "the baseline ones"
    yield replace(
        change,
        why=f"{finding} {measured.times:.2g} times as long to decode as {baseline} "
        f"({measured.images} measured).",
        factor=factor,
        basis=f"{measured.times:.2g} times for each of them, measured; {part}",
        assumes=f"{assumes}the other images are like those inspected",
    )


def _smaller(facts: LoaderFacts, images: ImageFigures, share: float | None) -> Iterator[Change]:
    ratio = images.mean_pixels / images.mean_short_pixels
    factor = _speedup(1 / ratio, of_work=share)
    if factor < LEAST_GAIN:
        return
    is_oversized = ratio >= OVERSIZED
    kind = "oversized" if is_oversized else "larger than needed"
    part, assumes = _of_decoding(share)
    yield Change(
        cause="oversized" if is_oversized else "slow-decode",
        why=f"The images are {kind}: {images.mean_pixels / 1e6:.2g} megapixels on average "
        f"({images.seen} inspected) for an output of {images.out_short} pixels.",
        advice=f"`penstock pack {facts.source} DST --short-side {images.pack_short}` keeps "
        "the detail that a crop of that size can show.",
        factor=factor,
        basis=f"{ratio:.2g} times fewer pixels; {part}",
        assumes=f"{assumes}the time to decode is proportional to the pixels",
        is_anomaly=is_oversized,
    )


def _slow_core(facts: LoaderFacts) -> Iterator[Change]:
    """Propose to free a slow core, if the decode threads have no other cores to use."""
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
        why=f"Core {number} is slow: it does {speed:.0%} of the fastest core's work in the same "
        "time.",
        advice="Stop or move the other programs on it (`ps -eLo psr,pid,pcpu,comm` lists the core "
        "of each thread).",
        factor=factor,
        basis=f"{len(speeds)} cores do the work of {sum(speeds):.1f}, measured",
        assumes="all cores are then as fast as the fastest",
        is_anomaly=True,
    )


# If the store throttles more than this share of the requests, its limits are the cause.
_THROTTLED_SHARE = 0.05
# The requests for a smaller shard are mostly latency: throughput levels off at 4 to 8 MiB a request
# (measured).
TINY_SHARD_BYTES = 1 << 20
# With fewer shards, the dataset is small, so its shards have to be.
_FEW_SHARDS = 64
# Reading threads that are on a core for more than this share of their time don't wait for a disk.
_COMPUTING_SHARE = 0.5
# Chunks decoded more often than this on average are reported.
_DECODED_AGAIN = 1.2
# A run waits for a disk if more than this share of its bytes came from one; less may be other
# programs' reads. If its bytes aren't counted, the second limit holds: no disk is slower.
COLD_SHARE = 0.2
_LEAST_DISK_BYTES_PER_S = 1 << 18
# Reading threads that sleep longer than this per sample wait, even if the system counts no bytes
# (it doesn't count those of all network file systems). Threads that share cores sleep less.
_LONG_SLEEP_S = 0.5e-3
_OTHERS = "the rates of the other stages alone"
_NO_FETCHING: dict[str, Any] = {
    "removes": True,
    "basis": _OTHERS,
    "assumes": "nothing has to be fetched any more",
}


def reads_compute(facts: LoaderFacts) -> bool:
    """Return True if reading local samples takes cores rather than a disk.

    The reading threads are then on a core for most of their time, or the training loop waits for
    something else.
    """
    is_behind = not facts.decodes and facts.wait_read_s < facts.wait_s / 2
    return is_behind or facts.read_s > _COMPUTING_SHARE * facts.load_s


def waits_for_disk(facts: LoaderFacts) -> bool:
    """Return True if the reading threads waited for a disk.

    The system then counted bytes read from disks, or the threads slept for long while they read
    files that aren't decoded chunks.
    """
    if reads_compute(facts):
        return False
    least = max(COLD_SHARE * facts.bytes_read, _LEAST_DISK_BYTES_PER_S * facts.wait_s)
    if facts.disk_bytes is None or facts.disk_bytes > least:
        return True
    slept_s = (facts.load_s - facts.read_s) / max(1, facts.samples)
    return facts.bytes_read > 0 and not _decoded(facts) and slept_s > _LONG_SLEEP_S


def _decoded(facts: LoaderFacts) -> int:
    """Return the bytes of the chunks that were decoded."""
    return 0 if facts.chunks is None else facts.chunks.counts.decoded_bytes


def disk_changes(facts: LoaderFacts) -> Iterator[Change]:
    """Propose changes if batches wait for local samples."""
    waits = waits_for_disk(facts)
    if waits and facts.shards is not None and not facts.shards.are_files:
        yield from _tiny_shards(facts)
    yield from _decoded_again(facts)
    # The cache stores a remote folder in blobs of many samples.
    are_files = facts.shards is not None and facts.shards.are_files and facts.remote is None
    are_files &= facts.bytes_read > 0 or facts.disk_bytes is None  # labels come from the index
    pack = f"A pack (`penstock pack {facts.source} DST`)"
    if not waits:
        advice = "Larger batches or fewer fields (`fields=`) take less time per sample."
        if are_files:
            advice = f"{pack} has no files to open for each sample."
        elif _decoded(facts):
            advice = "Chunks that are smaller or faster to decode would help."
        yield Change(cause="slow-read", why=_describe_reading(facts), advice=advice)
        return
    pack = f"{pack} on a local NVMe would help."
    yield Change(
        cause="slow-disk",
        why="The samples are single files." if are_files else "",
        advice=pack
        if facts.shards is None or are_files
        else "A local NVMe for it (or `cache=DiskCache(...)` there), or memory for all of its "
        "bytes, would help.",
        removes=True,
        basis=_OTHERS,
        assumes="reading then takes no time",
    )


def _describe_reading(facts: LoaderFacts) -> str:
    """Describe the cost of reading that doesn't wait for a disk."""
    each_us = 1e6 * facts.read_s / max(facts.samples, 1)
    text = f"It isn't the disk: reading and checking takes {each_us:.2g} us of a core per sample"
    if decoded := _decoded(facts):
        rate = decoded / max(facts.step_s + facts.wait_s, 1e-9) / 1e6
        text += f", and {format_size(decoded)} of chunks were decoded, {rate:,.2g} MB/s"
    if facts.disk_bytes is not None and not reads_compute(facts):
        text += f"; the system counted {format_size(facts.disk_bytes)} read from disks meanwhile"
    return f"{text}."


def _decoded_again(facts: LoaderFacts) -> Iterator[Change]:
    """Propose changes if chunks are decoded again because there is no room to keep them."""
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
        advice += ", a cache=DiskCache(...) for the chunks that memory can't keep,"
    smaller = int(chunks.window * kept / max(needed, 1))
    advice += f" or order=Order(window={max(1, smaller)})" if smaller < chunks.window else ""
    yield Change(
        cause="decoded-again",
        why=f"{counts.ratio:.2g} x the delivered bytes were decoded: this rank's windows have "
        f"{chunks.open_chunks:.0f} chunks of {format_size(chunks.mean_bytes)}, and "
        f"{format_size(counts.max_bytes)} of memory{files} keep them.",
        advice=f"{advice} would end that.",
        factor=counts.ratio,
        basis="bytes decoded over bytes delivered, counted",
        assumes="reading does nothing but decode chunks",
        is_anomaly=True,
    )


def remote_changes(facts: LoaderFacts) -> Iterator[Change]:
    """Propose changes if batches wait for the store."""
    remote = facts.remote
    assert remote is not None
    traffic = remote.traffic
    rate = traffic.bytes_remote / max(facts.elapsed_s, 1e-9) / 1e6
    fetched = (
        f"{format_size(traffic.bytes_remote)} were fetched so far, {rate:.2g} MB/s over at most "
        f"{remote.connections} connections, 99 % of the requests within "
        f"{remote.request_p99_s:.2g} s."
    )
    yield from _tiny_shards(facts, fetched)
    yield from _decoded_again(facts)
    is_throttled = traffic.throttled > _THROTTLED_SHARE * traffic.requests
    cause: Cause = "slow-remote"
    advice = (
        "The fetched bytes stay in the cache for the next epoch; `penstock warm` before the job "
        "would speed up the first."
    )
    if is_throttled:
        cause = "throttled"
        advice = "A higher limit at the store, or `penstock warm` before the job, would help."
        fetched += f" The store throttled {traffic.throttled:,} of {traffic.requests:,} requests."
    elif not remote.max_bytes:
        cause = "no-cache"
        advice = "cache=DiskCache(...) would keep the fetched bytes for the next epoch."
    yield Change(cause=cause, why=fetched, advice=advice, is_anomaly=is_throttled, **_NO_FETCHING)


def peer_changes(facts: LoaderFacts) -> Iterator[Change]:
    """Propose changes if batches wait for other nodes' caches."""
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
        advice="The part of them that this node's cache keeps stays for the next epoch; "
        "`penstock warm` before the job would speed up the first.",
        **_NO_FETCHING,
    )


def _tiny_shards(facts: LoaderFacts, fetched: str = "") -> Iterator[Change]:
    shards = facts.shards
    if shards is None or shards.count < _FEW_SHARDS or shards.mean_bytes >= TINY_SHARD_BYTES:
        return
    size = format_size(int(shards.mean_bytes))
    finding = f"The shards are tiny: {shards.count:,} of {size}"
    if shards.are_files:
        finding = f"Every sample has objects of its own: {shards.count:,} of {size}"
    yield Change(
        cause="tiny-shards",
        why=f"{finding}, and each has to be requested and opened. {fetched}".rstrip(),
        advice=f"`penstock pack {facts.source} DST --shard-bytes 64MiB` would help.",
        removes=True,
        basis=_OTHERS,
        assumes="requesting and opening shards takes all of the time",
        is_anomaly=True,
    )


def cache_changes(facts: LoaderFacts) -> Iterator[Change]:
    """Propose changes if the cache keeps too little of what the node reads."""
    remote = facts.remote
    assert remote is not None
    # File system blocks and indexes take a little more room than the data.
    needed = remote.max_bytes + 1.02 * (remote.wanted_bytes - remote.kept_bytes)
    yield Change(
        cause="small-cache",
        why=f"It keeps {remote.kept_bytes / max(remote.wanted_bytes, 1):.0%} of the "
        f"{format_size(remote.wanted_bytes)} that this node reads.",
        advice=f'max_bytes="{-(-needed // 2**20):.0f}MiB" would end the fetching.',
        is_anomaly=True,
        **_NO_FETCHING,
    )


_MODEL = Change(
    cause="slow-model",
    advice="A faster input side would change nothing.",
    removes=True,
    assumes="the model takes no time",
)
_DATASET = Change(
    cause="dataset-code",
    advice="A larger num_workers=, or a native dataset (`penstock pack`), whose images DALI "
    "decodes, would help.",
)
_COPY = Change(
    cause="slow-copy",
    advice="Smaller images (`penstock pack --short-side`) have fewer bytes to copy.",
)


def python_changes(facts: LoaderFacts) -> Iterator[Change]:
    """Propose to move Python code out of the training process."""
    yield Change(
        cause="gil",
        why=f"It holds Python's GIL: {facts.gil_late:.0%} of the reading threads' attempts to take "
        f"it came late, by {facts.gil_late_s * 1e3:.1f} ms.",
        advice="Move Python computations between two batches to a process of its own, or to "
        "native code that releases the GIL.",
        removes=True,
        assumes="the training loop takes no time",
        is_anomaly=True,
    )


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One limit of a job, as the verdict names and explains it.

    subject: begins the verdict. changes: proposes at least one change. stage: the one with whose
    ceiling a run's rate is compared. changed: the stages whose ceilings a change raises; the others
    bound its gain. gain: the assumption behind a gain by a factor. waits_for: what the loop waits
    for most of the time.
    """

    subject: str
    changes: Callable[[LoaderFacts], Iterable[Change]]
    stage: Stage | None = None
    changed: tuple[Stage, ...] = ()
    gain: str = "no other stage becomes the limit"
    waits_for: str = ""


_DECODING: tuple[Stage, ...] = ("decode", "augment")
LIMITS: dict[Limit, LimitRow] = {
    "model": LimitRow("The model", lambda _: [_MODEL]),
    "python": LimitRow("The training loop's Python", python_changes),
    "copy": LimitRow("The copy to the device", lambda _: [_COPY], "copy", changed=("copy",)),
    "augment": LimitRow(
        "Augmenting", augment_changes, "augment", _DECODING, "decoding is the limit then"
    ),
    # A run also augments, so it never reaches the rate of decoding alone.
    "decode": LimitRow(
        "Decoding and augmenting", decode_changes, "augment", _DECODING, "decoding stays the limit"
    ),
    "dataset": LimitRow("The dataset's own code", lambda _: [_DATASET]),
    "map": LimitRow("Your function in the recipe", map_changes),
    "disk": LimitRow(
        "Reading", disk_changes, "read", changed=("read",), waits_for="bytes from the disk"
    ),
    "remote": LimitRow("The remote", remote_changes, "remote", waits_for="bytes from the remote"),
    "peers": LimitRow(
        "The link to the other nodes", peer_changes, waits_for="bytes from other nodes' caches"
    ),
    "cache": LimitRow(
        "The cache's size", cache_changes, "remote", waits_for="bytes from the remote"
    ),
}
