"""Describe one run of a loader as values, from which `diagnosis` derives the verdict.

All values of `LoaderFacts` are measured or stored; none is a guess. `Statistics.facts` holds what a
running loader measures about itself; `pipeline.bench.ceilings` adds `Ceilings`, the rate that each
stage reaches alone. `Limit` and `Cause` list the names that a verdict uses.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from penstock.cache.base import Traffic, counter, gauge

if TYPE_CHECKING:
    from penstock.readers.formats import DecodedCounts

# fmt: off
Limit = Literal[
    "nothing yet", "model", "python", "copy", "augment", "decode", "dataset", "map", "disk",
    "remote", "peers", "cache",
]
"""The stage that limits the job. python: the training loop, because it holds Python's GIL. map: a
function of the user's in the recipe. peers: the other nodes' caches and the links to them."""

Cause = Literal[
    "", "slow-model", "gil", "slow-copy", "slow-augment", "slow-decode", "slow-core", "oversized",
    "progressive", "dataset-code", "slow-map", "slow-disk", "slow-read", "decoded-again",
    "tiny-shards", "slow-remote", "slow-peers", "throttled", "no-cache", "small-cache",
]
"""The reason for a limit; "" while the limit is "nothing yet"."""
# fmt: on

Stage = Literal["remote", "read", "decode", "augment", "copy", "python"]
"""A stage of a batch whose speed can be measured alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The speed of a stage that runs alone. bytes_per_s: encoded bytes; cpu_s_per_1000: CPU seconds
    of this process per thousand samples."""

    samples_per_s: float
    bytes_per_s: float
    cpu_s_per_1000: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveCost:
    """The measured cost of decoding this dataset's progressive JPEGs on the job's device.

    times: decoding time relative to baseline JPEGs. images: progressive JPEGs that were decoded.
    of_twins: True if they were compared with the same images rewritten as baseline JPEGs without
    loss; False if with the dataset's own baseline images, pixel by pixel.
    """

    times: float
    images: int
    of_twins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The rate that each stage reaches alone; None for a stage that isn't part of the job.

    device: the device that decodes. remote: fetch ranges of objects and drop them. read: read and
    check encoded samples in the loader's order; of a remote dataset, those in the cache.
    decode: decode samples in memory to the windows that the recipe requests. augment: the same with
    all other operations of the recipe. copy: copy a batch's encoded bytes to the GPU. python:
    everything but reading and decoding. progressive: the cost of progressive JPEGs, which are part
    of decoding; None also if there was nothing to compare them with.
    """

    device: str = "cpu"
    remote: Rate | None = None
    read: Rate | None = None
    decode: Rate | None = None
    augment: Rate | None = None
    copy: Rate | None = None
    python: Rate | None = None
    progressive: ProgressiveCost | None = None

    def stages(self) -> dict[Stage, Rate]:
        """Return the rates of the stages that were measured."""
        rates = {name: getattr(self, name) for name in get_args(Stage)}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def decode_share(self) -> float | None:
        """Return the share of decoding in the time to decode and augment; None if not measured."""
        if self.decode is None or self.augment is None:
            return None
        if self.device == "cpu":  # on a busy machine, CPU time varies less than wall-clock time
            return min(1.0, self.decode.cpu_s_per_1000 / self.augment.cpu_s_per_1000)
        return min(1.0, self.augment.samples_per_s / self.decode.samples_per_s)


SLOW_CORE = 0.67
"""A core below this share of the fastest core's speed is slow: one other program halves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """The store and the cache of a remote dataset, measured.

    traffic: since the dataset was opened. connections: the most that may be in use; request_p99_s:
    of recent requests. wanted_bytes: bytes that this node reads in an epoch.
    """

    traffic: Traffic
    connections: int
    request_p99_s: float
    wanted_bytes: int
    kept_bytes: int = gauge(
        "of the bytes that the node reads in an epoch, those that the cache keeps for this job"
    )
    max_bytes: int = gauge("the cache's limit; 0 without a cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentFacts:
    """The images that `resident=` keeps in memory.

    samples: in memory; max_bytes: room for pixels. fill_s: wall-clock time that reading threads
    spent on decoding whole images and copying them.
    """

    samples: int
    max_bytes: int
    fill_s: float
    size_bytes: int = gauge("size of the decoded images kept in memory (`resident=`)")
    hits: int = counter("samples that came from memory without being read and decoded")
    bytes_memory: int = counter("decoded bytes that came from memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class MapFacts:
    """The time that the functions of a recipe's Maps take. name, processes, batched: of the slowest
    Map."""

    name: str
    seconds: float = counter(
        "the part of load_s spent in functions of the recipe's Maps or waiting for their processes"
    )
    processes: int
    batched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFigures:
    """Figures of the images that a run read, from a sample of them.

    seen: images in the sample. mean_bytes: encoded size; mean_pixels: upright height times width.
    progressive: share of progressive JPEGs. out_short: shorter side of the images that the recipe
    delivers, in pixels. pack_short: shorter side that a pack for this output would have.
    mean_short_pixels: mean pixels if the shorter sides were reduced to `pack_short`.
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
    """The number and mean size of a dataset's shards. are_files: each sample has files or objects
    of its own. fields: of a batch, 0 if unknown."""

    count: int
    mean_bytes: float
    are_files: bool
    fields: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """The part of a mixture that took most of this rank's reading time. load_share: of that time;
    sample_share: of the samples that were read."""

    name: str
    load_share: float
    sample_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """Figures of data in chunks, each of which is decoded as a whole.

    counts: since the dataset was opened. open_chunks: chunks that this rank's windows mix at a
    time; window: of the plan. file_bytes: room for decoded chunks in the cache folder, 0 without
    one.
    """

    counts: DecodedCounts
    open_chunks: float
    window: int
    file_bytes: int

    @property
    def mean_bytes(self) -> float:
        """Return the mean decoded size of a chunk so far."""
        return self.counts.decoded_bytes / max(1, self.counts.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSpeeds:
    """The usable cores and their speeds. numbers: of the cores, as the system counts them; speeds:
    at a fixed piece of work, in the same order; the fastest core has 1.0."""

    numbers: tuple[int, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """The facts of one run of a loader. Times are seconds, without the first batch (see
    `penstock.Statistics`).

    gil_late: share of the reading threads' late attempts to take Python's GIL; gil_late_s: their
    mean delay. decode_threads, usable_cores: of this rank. device: such as "cpu" or "cuda:0".
    workers: worker processes of a torch dataset; None for a native dataset. url: the dataset's, ""
    if a command can't take it. map: None without Maps. chunks: None if samples are decoded one by
    one. part: None without a mixture. bytes_read: doesn't count tables. disk_bytes: as the system
    counts them for this process; None if unknown. trains: False for a loop that only takes batches.
    decodes: True if DALI has images to decode.
    """

    samples: int = counter("samples delivered")
    batches: int = counter("batches delivered")
    step_s: float = counter("time outside the loader")
    wait_s: float = counter("time in the loader")
    wait_read_s: float = counter("waiting for bytes")
    wait_decode_s: float = counter("waiting for DALI")
    read_s: float = counter("CPU time of the reading threads")
    load_s: float = counter("wall-clock time of the reading threads")
    elapsed_s: float = counter("all time, the first batch included")
    decode_threads: int
    usable_cores: int
    device: str
    url: str = ""
    bytes_read: int = counter("bytes of the samples from all tiers")
    disk_bytes: int | None = counter("bytes read from disks", default=None)
    trains: bool = True
    decodes: bool = True
    fill_s: float = counter("time spent on decoding into memory", default=0.0)
    gil_late: float = 0.0
    gil_late_s: float = 0.0
    workers: int | None = None
    remote: TierFacts | None = None
    shards: ShardFigures | None = None
    images: ImageFigures | None = None
    map: MapFacts | None = None
    chunks: ChunkFacts | None = None
    part: PartFacts | None = None
    cores: CoreSpeeds | None = None
    ceilings: Ceilings | None = None

    @property
    def source(self) -> str:
        """The dataset's URL as an argument of a shell command, which would expand braces."""
        return shlex.quote(self.url) if self.url else "SRC"

    @property
    def on_gpu(self) -> bool:
        """True if a GPU decodes the images."""
        return self.device.startswith("cuda")

    @property
    def decode_share(self) -> float | None:
        """The share of decoding in the time to decode and augment; None if it wasn't measured."""
        return None if self.ceilings is None else self.ceilings.decode_share

    @property
    def samples_per_s(self) -> float:
        busy_s = self.step_s + self.wait_s
        return self.samples / busy_s if busy_s else 0.0

    @property
    def wait_share(self) -> float:
        busy_s = self.step_s + self.wait_s
        return self.wait_s / busy_s if busy_s else 0.0
