"""Describe one run of a loader as values, from which `diagnosis` derives the verdict.

All that `LoaderFacts` holds is measured or stored; nothing here is a guess. `Statistics.facts`
has what a running loader knows of itself; `pipeline.bench.ceilings` adds `Ceilings`, the rate
that each stage reaches alone. `Limit` and `Cause` are the words of the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from penstock.cache.base import Traffic
    from penstock.readers.formats import DecodedCounts

Limit = Literal[
    "nothing yet",
    "model",
    "python",
    "copy",
    "augment",
    "decode",
    "dataset",
    "map",
    "disk",
    "remote",
    "peers",
    "cache",
]
"""The stage that holds the job back. python: the training loop, as it keeps Python's GIL. map: a
function of the user's in the recipe. peers: the other nodes' caches, and the links to them."""

Cause = Literal[
    "",
    "slow-model",
    "gil",
    "slow-copy",
    "slow-augment",
    "slow-decode",
    "slow-core",
    "oversized",
    "progressive",
    "dataset-code",
    "slow-map",
    "slow-disk",
    "slow-read",
    "decoded-again",
    "tiny-shards",
    "slow-remote",
    "slow-peers",
    "throttled",
    "no-cache",
    "small-cache",
]
"""What is behind a limit; "" before there is anything to judge."""

Stage = Literal["remote", "read", "decode", "augment", "copy", "python"]
"""A stage of a batch's road whose speed can be measured alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a stage does alone. bytes_per_s: encoded bytes; cpu_s_per_1000: CPU seconds of this
    process a thousand samples."""

    samples_per_s: float
    bytes_per_s: float
    cpu_s_per_1000: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveCost:
    """What decoding progressive JPEGs of this dataset takes, on the job's device, measured.

    times: as long as a baseline JPEG. images: progressive ones that were decoded. of_twins: beside
    the same images rewritten without loss; else beside the dataset's baseline images, by pixels.
    """

    times: float
    images: int
    of_twins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What each stage does alone, measured beside the run; None: it isn't part of this job.

    device: that decodes. remote: ranges of its objects, fetched and dropped. read: encoded samples
    in the loader's order, checked; of a remote dataset those in the cache. is_cold: it had to wait
    for the disk. decode: encoded samples in memory to pixels of the windows that the recipe asks
    for. augment: the same with all else that the recipe does. copy: a batch's encoded bytes to the
    GPU. python: all but reading and decoding. progressive: no stage, but what decoding is made of;
    None also where nothing could be compared.
    """

    device: str = "cpu"
    remote: Rate | None = None
    read: Rate | None = None
    is_cold: bool = False
    decode: Rate | None = None
    augment: Rate | None = None
    copy: Rate | None = None
    python: Rate | None = None
    progressive: ProgressiveCost | None = None

    def stages(self) -> dict[Stage, Rate]:
        """The stages that were measured."""
        found: dict[Stage, Rate | None] = {
            "remote": self.remote,
            "read": self.read,
            "decode": self.decode,
            "augment": self.augment,
            "copy": self.copy,
            "python": self.python,
        }
        return {name: rate for name, rate in found.items() if rate is not None}

    @property
    def decode_share(self) -> float | None:
        """The share of decoding in the time to decode and augment; None if not measured."""
        if self.decode is None or self.augment is None:
            return None
        if self.device == "cpu":  # CPU time drifts less than the clock's on a busy machine
            return min(1.0, self.decode.cpu_s_per_1000 / self.augment.cpu_s_per_1000)
        return min(1.0, self.augment.samples_per_s / self.decode.samples_per_s)


SLOW_CORE = 0.67
"""A core below this share of the fastest one's speed is slow: one other program there halves it."""

_COUNTED_FIELDS = (
    "samples",
    "batches",
    "step_s",
    "wait_s",
    "wait_read_s",
    "wait_decode_s",
    "read_s",
    "load_s",
    "fill_s",
    "elapsed_s",
    "bytes_read",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """What is known of the tiers of a remote dataset: its store and its cache.

    traffic: since the dataset was opened. connections: in use at most; request_p99_s: of recent
    requests. wanted_bytes: what this node reads in an epoch; kept_bytes: of that, what the cache
    keeps for the job; max_bytes: the cache's limit, 0 without a cache of the user's.
    """

    traffic: Traffic
    connections: int
    request_p99_s: float
    wanted_bytes: int
    kept_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentFacts:
    """What `resident=` keeps in memory.

    samples, size_bytes: in memory; max_bytes: room for pixels. fill_s: by the clock, that reading
    threads spent on decoding whole images and copying them. hits: samples fed from memory without
    being read; bytes_memory: of their decoded images.
    """

    samples: int
    size_bytes: int
    max_bytes: int
    fill_s: float
    hits: int
    bytes_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MapFacts:
    """What the functions of a recipe's Maps take.

    seconds: by the clock, that reading threads spent on them, waits for processes among it. name,
    processes, batched: of the one that took most.
    """

    name: str
    seconds: float
    processes: int
    batched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFigures:
    """What the images are like that the run has read; some of them were looked at.

    seen: how many. mean_bytes: encoded; mean_pixels: upright height times width. progressive: share
    of them that are progressive JPEGs. out_short: shorter side that the recipe hands out, pixels.
    mean_short_pixels: pixels that they would have with their shorter side cut to `pack_short`.
    """

    seen: int
    mean_bytes: float
    mean_pixels: float
    progressive: float
    out_short: int
    pack_short: int
    mean_short_pixels: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFigures:
    """How many shards the dataset has, and of which size. mean_bytes: of a shard. are_files:
    samples lie in files or objects of their own."""

    count: int
    mean_bytes: float
    are_files: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """What chunks that are decoded as a whole take.

    counts: since the dataset was opened. open_chunks: that the windows of this rank mix at a time;
    window: of the plan. file_bytes: what chunks may take of the cache folder; 0 without one.
    """

    counts: DecodedCounts
    open_chunks: float
    window: int
    file_bytes: int

    @property
    def mean_bytes(self) -> float:
        """Of a chunk, as decoded so far."""
        return self.counts.decoded_bytes / max(1, self.counts.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSpeeds:
    """Usable cores and how fast each is for this process. numbers: as the system counts them;
    speeds: of a fixed piece of work, the fastest core 1.0, in the same order."""

    numbers: tuple[int, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """What is known of one run of a loader. Times are seconds, the first batch left out (see
    `penstock.Statistics`).

    samples, batches: handed out. step_s: outside of the loader; wait_s: in it; wait_read_s,
    wait_decode_s: the parts of wait_s that waited for bytes and for DALI. read_s, load_s: CPU time
    and time by the clock of the reading threads; fill_s: of the latter, decoding into memory.
    elapsed_s: all, the first batch among it.
    gil_late: share of the reading threads' tries to take Python's GIL that came late; gil_late_s:
    the mean time of those. decode_threads, usable_cores: of this rank. device: "cpu", "cuda:0".
    workers: torch's, of a torch dataset; None for a native one. url: the dataset's, for people.
    map: what the recipe's Maps take; None without any. chunks: what decoding chunks takes; None
    where samples can be had alone. bytes_read: of the samples, from wherever they came, as far as
    that is counted (not of tables). disk_bytes: that this process had to read from disks, as the
    system counts them; None: unknown. trains: False where a loop only takes batches. decodes:
    whether there are images, which DALI decodes.
    """

    samples: int
    batches: int
    step_s: float
    wait_s: float
    wait_read_s: float
    wait_decode_s: float
    read_s: float
    load_s: float
    elapsed_s: float
    decode_threads: int
    usable_cores: int
    device: str
    url: str = ""
    bytes_read: int = 0
    disk_bytes: int | None = None
    trains: bool = True
    decodes: bool = True
    fill_s: float = 0.0
    gil_late: float = 0.0
    gil_late_s: float = 0.0
    workers: int | None = None
    remote: TierFacts | None = None
    shards: ShardFigures | None = None
    images: ImageFigures | None = None
    map: MapFacts | None = None
    chunks: ChunkFacts | None = None
    cores: CoreSpeeds | None = None
    ceilings: Ceilings | None = None

    @property
    def samples_per_s(self) -> float:
        busy_s = self.step_s + self.wait_s
        return self.samples / busy_s if busy_s else 0.0

    @property
    def wait_share(self) -> float:
        busy_s = self.step_s + self.wait_s
        return self.wait_s / busy_s if busy_s else 0.0

    def since(self, earlier: LoaderFacts) -> LoaderFacts:
        """What happened after `earlier`, of the same loader: so a warm-up doesn't count."""
        less = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTED_FIELDS}
        remote = self.remote
        if remote is not None and earlier.remote is not None:
            remote = replace(remote, traffic=_traffic_since(remote.traffic, earlier.remote.traffic))
        map = self.map
        if map is not None and earlier.map is not None:
            map = replace(map, seconds=map.seconds - earlier.map.seconds)
        chunks = self.chunks
        if chunks is not None and earlier.chunks is not None:
            chunks = replace(chunks, counts=chunks.counts.since(earlier.chunks.counts))
        if self.disk_bytes is not None and earlier.disk_bytes is not None:
            less["disk_bytes"] = self.disk_bytes - earlier.disk_bytes
        return replace(self, remote=remote, map=map, chunks=chunks, **less)


def _traffic_since(traffic: Traffic, earlier: Traffic) -> Traffic:
    """request_s is a mean, and stays."""
    names = [field.name for field in fields(traffic) if field.name != "request_s"]
    return replace(traffic, **{n: getattr(traffic, n) - getattr(earlier, n) for n in names})
