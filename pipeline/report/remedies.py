"""Propose, for each limit, the changes that could remove it, with their predicted gains.

A gain follows from the run's own figures. It is a factor on the run's rate, from a stated model; or
the removal of the whole stage (`removes`), which leaves the other stages; or unknown. If a change
addresses something unusual (a slow core, progressive JPEGs, tiny shards, a small cache), the
diagnosis names that as the cause.

A change is one function. Its docstring has the change's texts, with the facts as `f`; the function
returns the values that they name, or None if the change wouldn't help.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from penstock.cache.base import format_size
from penstock.pipeline.report.docstring_texts import texts_of
from penstock.pipeline.report.run_facts import SLOW_CORE, Cause, Limit, LoaderFacts, Stage

# A change that gains less isn't worth mentioning.
LEAST_GAIN = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A proposed change.

    why: a sentence about the finding; advice: a sentence about the remedy. factor: the gain on the
    run's rate, None if unknown; is_most: the factor is an upper limit, which ranks the changes and
    predicts nothing; removes: the change removes the whole stage; basis: the figures from which the
    gain follows; assumes: the conditions for the gain, to be read after an "if".
    is_anomaly: the finding is unusual.
    """

    cause: Cause
    why: str = ""
    advice: str = ""
    factor: float | None = None
    is_most: bool = False
    removes: bool = False
    basis: str = ""
    assumes: str = ""
    is_anomaly: bool = False


Propose = Callable[[LoaderFacts], Change | None]
Values = dict[str, Any]
_FIELDS = frozenset(field.name for field in fields(Change))


def _change(
    cause: Cause, **given: Any
) -> Callable[[Callable[[LoaderFacts], Values | None]], Propose]:
    """Make a change of a function that returns the values of its texts.

    The function's docstring is `why`; its lines `advice:`, `basis:` and `assumes:` are those texts.
    given: other fields of the change. A returned value that is named as a field replaces it.
    """

    def decorate(find: Callable[[LoaderFacts], Values | None]) -> Propose:
        why, texts = texts_of(find)
        texts["why"] = why

        def propose(f: LoaderFacts) -> Change | None:
            values = find(f)
            if values is None:
                return None
            filled = {n: text.format(f=f, **values) for n, text in texts.items() if n not in values}
            own = {name: value for name, value in values.items() if name in _FIELDS}
            return Change(**{"cause": cause, **given, **filled, **own})

        return propose

    return decorate


# --- the user's function, augmenting and decoding -------------------------------------------------


@_change("slow-map")
def _slow_map(f: LoaderFacts) -> Values:
    """{f.map.name} takes {share:.0%} of the time for reading: {each_ms:.4g} ms a sample, {where}.

    advice: {advised}store its results and read those instead: a column of a table, or .npy files
        next to the data, then `penstock pack`.
    """
    assert f.map is not None
    cores, processes = f.usable_cores, f.map.processes
    batched = "" if f.map.batched else ", batched=True if it can take many samples at once"
    values: Values = {
        "share": min(1.0, f.map.seconds / f.load_s) if f.load_s else 1.0,
        "each_ms": 1e3 * f.map.seconds / max(f.samples, 1),
        "where": f"by {processes} processes on {cores} cores",
        "advised": f"Do it once{batched}: ",
    }
    if not processes:
        own = f"processes={max(2, cores)} would call it in processes of its own{batched}; or "
        return values | {"where": "in the reading threads", "advised": own}
    if processes >= cores:
        return values
    return values | {
        "advised": f"processes={cores} would help{batched}; or ",
        "factor": cores / processes,
        "basis": f"{cores} cores for {processes}",
        "assumes": "the function computes, and the cores are free",
    }


# A smaller share of progressive images isn't reported unless their cost was measured.
_MANY_PROGRESSIVE = 0.1
# Images are oversized if they have this many times the pixels that they have at `pack_short`.
# Photographs of ImageNet's size have 2.5 times as many.
OVERSIZED = 4.0


@_change("slow-augment", assumes="no other operation is left")
def _slow_augment(f: LoaderFacts) -> Values:
    """Decoding is only {share:.0%} of the work.

    advice: Cheaper operations after the crop in augment=, or device="cuda" for them, would help.
    basis: decoding is {share:.0%} of the work, measured
    """
    share = f.decode_share
    return {"share": share, "factor": 1 / share} if share else {"why": "", "basis": ""}


@_change("slow-decode")
def _slow_decode(f: LoaderFacts) -> Values:
    """advice: More cores for this rank (num_workers=), device="cuda", or smaller images would
    help.
    """
    return {"advice": "Smaller images or a smaller crop would help."} if f.on_gpu else {}


@_change("slow-decode", assumes="threads share the work evenly and the cores are free")
def _more_threads(f: LoaderFacts) -> Values | None:
    """{f.usable_cores} cores are usable.

    advice: num_workers={f.usable_cores} would help.
    basis: {f.usable_cores} cores for {f.decode_threads}
    """
    if f.on_gpu or f.decode_threads >= f.usable_cores:
        return None
    return {"factor": f.usable_cores / f.decode_threads}


def _faster_decoding(f: LoaderFacts, time_share: float) -> Values:
    """Return the gain if decoding takes `time_share` of its time, by Amdahl's law (Validity of the
    single processor approach, AFIPS 1967), and on what it is based."""
    share = 1.0 if f.decode_share is None else f.decode_share
    factor = 1 / (1 - share + share * time_share)
    if f.decode_share is not None:
        part = f"decoding is {share:.0%} of the work, measured"
        return {"factor": factor, "part": part}
    part = "at most: the time for augmenting wasn't measured"
    return {"factor": factor, "part": part, "is_most": True}


@_change("progressive", is_anomaly=True)
def _progressive(f: LoaderFacts) -> Values | None:
    """{f.images.progressive:.0%} of the images are progressive JPEGs ({f.images.seen} inspected),
    which take {longer}.

    advice: `penstock pack {f.source} DST --baseline` rewrites them without loss.
    basis: {cost.times:.2g} times for each of them, measured; {part}
    assumes: the other images are like those inspected
    """
    if f.images is None:
        return None
    cost = f.ceilings.progressive if f.ceilings is not None else None
    if cost is None:
        longer = "longer to decode than baseline ones; `penstock bench` measures how much longer"
        is_many = f.images.progressive >= _MANY_PROGRESSIVE
        return {"longer": longer, "basis": "", "assumes": ""} if is_many else None
    gain = _faster_decoding(f, 1 / (1 + f.images.progressive * (cost.times - 1)))
    if gain["factor"] < LEAST_GAIN:
        return None
    baseline = "the same images as baseline ones" if cost.of_twins else "the baseline ones"
    longer = f"{cost.times:.2g} times as long to decode as {baseline} ({cost.images} measured)"
    return {**gain, "cost": cost, "longer": longer}


@_change("oversized")
def _smaller(f: LoaderFacts) -> Values | None:
    """The images are {kind}: {megapixels:.2g} megapixels on average ({f.images.seen} inspected) for
    an output of {f.images.out_short} pixels.

    advice: `penstock pack {f.source} DST --short-side {f.images.pack_short}` writes smaller ones. A
        crop of them that is shorter than {f.images.out_short} pixels is enlarged: if the recipe
        crops small parts, pass a larger side.
    basis: {ratio:.2g} times fewer pixels; {part}
    assumes: the time to decode is proportional to the pixels
    """
    if f.images is None:
        return None
    ratio = f.images.mean_pixels / f.images.mean_short_pixels
    gain = _faster_decoding(f, 1 / ratio)
    if gain["factor"] < LEAST_GAIN:
        return None
    values = {**gain, "ratio": ratio, "megapixels": f.images.mean_pixels / 1e6}
    if ratio >= OVERSIZED:
        return {**values, "kind": "oversized", "is_anomaly": True}
    return {**values, "kind": "larger than needed", "cause": "slow-decode"}


@_change("slow-core", is_anomaly=True, assumes="all cores are then as fast as the fastest")
def _slow_core(f: LoaderFacts) -> Values | None:
    """Core {number} is slow: it does {speed:.0%} of the fastest core's work in the same time.

    advice: Stop or move the other programs on it (`ps -eLo psr,pid,pcpu,comm` lists the core of
        each thread).
    basis: {cores} cores do the work of {work:.1f}, measured
    """
    if f.cores is None or f.on_gpu:
        return None
    speeds, work = f.cores.speeds, sum(f.cores.speeds)
    # The decode threads have no other cores to use.
    threads = min(f.decode_threads, len(speeds))
    factor = threads / min(work, threads)
    if factor < LEAST_GAIN or min(speeds) >= SLOW_CORE:
        return None
    speed, number = min(zip(speeds, f.cores.numbers, strict=True))
    return {"factor": factor, "speed": speed, "number": number, "cores": len(speeds), "work": work}


# --- reading and fetching -------------------------------------------------------------------------

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
_REMOVES: dict[str, Any] = {"removes": True, "basis": "the rates of the other stages alone"}
_NO_FETCHING = _REMOVES | {"assumes": "nothing has to be fetched any more"}


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


def _are_files(f: LoaderFacts) -> bool:
    """Return True if a file is opened for each sample. The cache stores a remote folder in blobs of
    many samples, and labels come from the index."""
    are_files = f.shards is not None and f.shards.are_files and f.remote is None
    return are_files and (f.bytes_read > 0 or f.disk_bytes is None)


@_change("slow-read")
def _slow_read(f: LoaderFacts) -> Values | None:
    """It isn't the disk: reading and checking takes {each_us:.4g} us of a core per
    sample{chunks}{disk}.

    advice: Larger batches{fewer} take less time per sample.
    """
    if waits_for_disk(f):
        return None
    several = f.shards is None or f.shards.fields != 1
    values = {
        "each_us": 1e6 * f.read_s / max(f.samples, 1),
        "fewer": " or fewer fields (`fields=`)" if several else "",
        "chunks": "",
        "disk": "",
    }
    if f.disk_bytes is not None and not reads_compute(f):
        disk = format_size(f.disk_bytes)
        values["disk"] = f"; the system counted {disk} read from disks meanwhile"
    if decoded := _decoded(f):
        size, rate = map(format_size, (decoded, decoded / max(f.step_s + f.wait_s, 1e-9)))
        values["chunks"] = f", and {size} of chunks were decoded, {rate}/s"
        values["advice"] = "Chunks that are smaller or faster to decode would help."
    if _are_files(f):
        values["advice"] = f"{_a_pack(f)} has no files to open for each sample."
    return values


def _a_pack(f: LoaderFacts) -> str:
    return f"A pack (`penstock pack {f.source} DST`)"


@_change("slow-disk", **_REMOVES, assumes="reading then takes no time")
def _slow_disk(f: LoaderFacts) -> Values | None:
    """advice: A local NVMe for it (or `cache=DiskCache(...)` there), or memory for all of its
    bytes, would help.
    """
    if not waits_for_disk(f):
        return None
    why = "The samples are single files." if _are_files(f) else ""
    if f.shards is None or _are_files(f):
        return {"why": why, "advice": f"{_a_pack(f)} on a local NVMe would help."}
    return {}


@_change(
    "decoded-again",
    is_anomaly=True,
    basis="bytes decoded over bytes delivered, counted",
    assumes="reading does nothing but decode chunks",
)
def _decoded_again(f: LoaderFacts) -> Values | None:
    """{factor:.2g} x the delivered bytes were decoded: this rank's windows have
    {f.chunks.open_chunks:.0f} chunks of {chunk}, and {memory} of memory{folder} keep them.

    advice: Dataset(decoded_bytes="{needed}MiB"){cache}{window} would end that.
    """
    chunks = f.chunks
    if chunks is None or not chunks.counts.again or chunks.counts.ratio < _DECODED_AGAIN:
        return None
    counts, needed = chunks.counts, chunks.open_chunks * chunks.mean_bytes
    on_disk = counts.most_disk_bytes
    smaller = int(chunks.window * (counts.max_bytes + on_disk) / max(needed, 1))
    cache = ", a cache=DiskCache(...) for the chunks that memory can't keep,"
    window = f" or order=Order(window={max(1, smaller)})"
    return {
        "factor": counts.ratio,
        "chunk": format_size(chunks.mean_bytes),
        "memory": format_size(counts.max_bytes),
        "folder": f" and {format_size(on_disk)} of the cache folder" if on_disk else "",
        "needed": math.ceil(needed / 2**20),
        "cache": "" if chunks.file_bytes else cache,
        "window": window if smaller < chunks.window else "",
    }


def _fetched(f: LoaderFacts) -> str:
    """Describe what was fetched from the remote; "" for a local dataset."""
    if f.remote is None:
        return ""
    size_bytes = f.remote.traffic.bytes_remote
    size, rate = map(format_size, (size_bytes, size_bytes / max(f.elapsed_s, 1e-9)))
    return (
        f"{size} were fetched so far, {rate}/s over at most {f.remote.connections} connections, "
        f"99 % of the requests within {f.remote.request_p99_s:.2g} s."
    )


@_change("slow-remote", **_NO_FETCHING)
def _slow_remote(f: LoaderFacts) -> Values:
    """{fetched}

    advice: The fetched bytes stay in the cache for the next epoch; `penstock warm` before the job
        would speed up the first.
    """
    assert f.remote is not None
    traffic, fetched = f.remote.traffic, _fetched(f)
    if traffic.throttled > _THROTTLED_SHARE * traffic.requests:
        why = (
            f"{fetched} The store throttled {traffic.throttled:,} of {traffic.requests:,} requests."
        )
        advice = "A higher limit at the store, or `penstock warm` before the job, would help."
        return {"cause": "throttled", "why": why, "advice": advice, "is_anomaly": True}
    if f.remote.max_bytes:
        return {"fetched": fetched}
    advice = "cache=DiskCache(...) would keep the fetched bytes for the next epoch."
    return {"cause": "no-cache", "fetched": fetched, "advice": advice}


@_change("slow-peers", **_NO_FETCHING)
def _slow_peers(f: LoaderFacts) -> Values:
    """{size} came from other nodes' caches so far, {rate}/s{failed}.

    advice: The part of them that this node's cache keeps stays for the next epoch; `penstock warm`
        before the job would speed up the first.
    """
    assert f.remote is not None
    traffic = f.remote.traffic
    failed = f"; {traffic.peer_failed:,} of {traffic.peer_requests:,} requests failed"
    return {
        "size": format_size(traffic.bytes_peers),
        "rate": format_size(traffic.bytes_peers / max(f.elapsed_s, 1e-9)),
        "failed": failed if traffic.peer_failed else "",
    }


@_change(
    "tiny-shards",
    is_anomaly=True,
    **_REMOVES,
    assumes="requesting and opening shards takes all of the time",
)
def _tiny_shards(f: LoaderFacts) -> Values | None:
    """{finding}: {f.shards.count:,} of {size}, and each has to be requested and opened.{fetched}

    advice: `penstock pack {f.source} DST --shard-bytes 64MiB` would help.
    """
    shards = f.shards
    if shards is None or shards.count < _FEW_SHARDS or shards.mean_bytes >= TINY_SHARD_BYTES:
        return None
    each = "Every sample has objects of its own"
    return {
        "finding": each if shards.are_files else "The shards are tiny",
        "size": format_size(int(shards.mean_bytes)),
        "fetched": f" {_fetched(f)}".rstrip(),
    }


def _tiny_local_shards(f: LoaderFacts) -> Change | None:
    is_slow = waits_for_disk(f) and f.shards is not None and not f.shards.are_files
    return _tiny_shards(f) if is_slow else None


@_change("small-cache", is_anomaly=True, **_NO_FETCHING)
def _small_cache(f: LoaderFacts) -> Values:
    """It keeps {kept:.0%} of the {wanted} that this node reads.

    advice: max_bytes="{needed}MiB" would end the fetching.
    """
    remote = f.remote
    assert remote is not None
    # File system blocks and indexes take a little more room than the data.
    needed = remote.max_bytes + 1.02 * (remote.wanted_bytes - remote.kept_bytes)
    return {
        "kept": remote.kept_bytes / max(remote.wanted_bytes, 1),
        "wanted": format_size(remote.wanted_bytes),
        "needed": math.ceil(needed / 2**20),
    }


# --- the other stages -----------------------------------------------------------------------------


@_change("slow-model", removes=True, assumes="the model takes no time")
def _slow_model(_: LoaderFacts) -> Values:
    """advice: A faster input side would change nothing."""
    return {}


@_change("dataset-code")
def _dataset_code(f: LoaderFacts) -> Values:
    """advice: {advised}. If Penstock reads its files, `penstock.Dataset` needs no workers."""
    if (f.workers or 0) < f.usable_cores:
        return {"advised": f"num_workers={f.usable_cores} would help"}
    shared = f"{f.usable_cores} core{'s' * (f.usable_cores != 1)}"
    return {
        "advised": "More workers would help only if they wait for a disk or a network: "
        f"{f.workers} already share {shared}. Otherwise its code has to get faster"
    }


@_change("slow-copy")
def _slow_copy(_: LoaderFacts) -> Values:
    """advice: Smaller images (`penstock pack --short-side`) have fewer bytes to copy."""
    return {}


@_change("gil", is_anomaly=True, removes=True, assumes="the training loop takes no time")
def _gil(f: LoaderFacts) -> Values:
    """It holds Python's GIL: {f.gil_late:.0%} of the reading threads' attempts to take it came
    late, by {late_ms:.1f} ms.

    advice: Move Python computations between two batches to a process of its own, or to native code
        that releases the GIL.
    """
    return {"late_ms": 1e3 * f.gil_late_s}


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One limit of a job, as the verdict names and explains it.

    subject: begins the verdict. changes: at least one of them proposes a change. stage: the one
    with whose ceiling a run's rate is compared. changed: the stages whose ceilings a change raises;
    the others bound its gain. gain: the assumption behind a gain by a factor. waits_for: what the
    loop waits for most of the time.
    """

    subject: str
    changes: tuple[Propose, ...]
    stage: Stage | None = None
    changed: tuple[Stage, ...] = ()
    gain: str = "no other stage becomes the limit"
    waits_for: str = ""


_OF_DECODING: tuple[Propose, ...] = (
    _progressive,
    _smaller,
    _slow_core,
    _more_threads,
    _slow_decode,
)
_IMAGES: tuple[Stage, ...] = ("decode", "augment")
_REMOTE = "bytes from the remote"
LIMITS: dict[Limit, LimitRow] = {
    "model": LimitRow("The model", (_slow_model,)),
    "python": LimitRow("The training loop's Python", (_gil,)),
    "copy": LimitRow("The copy to the device", (_slow_copy,), "copy", ("copy",)),
    "augment": LimitRow(
        "Augmenting",
        (_slow_augment, _slow_core, _more_threads),
        "augment",
        _IMAGES,
        "decoding is the limit then",
    ),
    # A run also augments, so it never reaches the rate of decoding alone.
    "decode": LimitRow(
        "Decoding and augmenting", _OF_DECODING, "augment", _IMAGES, "decoding stays the limit"
    ),
    "dataset": LimitRow("The dataset's own code", (_dataset_code,)),
    "map": LimitRow("Your function in the recipe", (_slow_map,)),
    "disk": LimitRow(
        "Reading",
        (_tiny_local_shards, _decoded_again, _slow_read, _slow_disk),
        "read",
        ("read",),
        waits_for="bytes from the disk",
    ),
    "remote": LimitRow(
        "The remote", (_tiny_shards, _decoded_again, _slow_remote), "remote", waits_for=_REMOTE
    ),
    "peers": LimitRow(
        "The link to the other nodes", (_slow_peers,), waits_for="bytes from other nodes' caches"
    ),
    "cache": LimitRow("The cache's size", (_small_cache,), "remote", waits_for=_REMOTE),
}
