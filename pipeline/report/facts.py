"""What a verdict is made from: figures of one run, as values. `diagnosis` judges them.

All that `Facts` holds is measured or stored; nothing here is a guess. `Statistics.facts` has what a
running loader knows of itself, `pipeline.bench.ceilings` adds what each stage can do alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from penstock.cache.base.counters import Traffic
    from penstock.pipeline.report.statistics import RemoteFacts

Limit = Literal[
    "nothing yet",
    "model",
    "python",
    "copy",
    "augment",
    "decode",
    "dataset",
    "disk",
    "remote",
    "cache",
]
"""The stage that holds the job back. python: the training loop, as it keeps Python's GIL."""

_GROWING = (
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
)

Stage = Literal["remote", "read", "decode", "augment", "copy", "python"]


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
        """Those that were measured."""
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
        """Of the time to decode and augment, the part that is decoding; None if not measured."""
        if self.decode is None or self.augment is None:
            return None
        if self.device == "cpu":  # CPU time drifts less than the clock's on a busy machine
            return min(1.0, self.decode.cpu_s_per_1000 / self.augment.cpu_s_per_1000)
        return min(1.0, self.augment.samples_per_s / self.decode.samples_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Images that the run has read, of which some were looked at.

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
class Shards:
    """Of the dataset. mean_bytes: of a shard. kind: "arrow", "tar" or "folder"."""

    count: int
    mean_bytes: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Usable cores and how fast each is for this process. numbers: as the system counts them;
    speeds: of a fixed piece of work, the fastest core 1.0, in the same order."""

    numbers: tuple[int, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One run. Times are seconds, the first batch left out (see `pipeline.Statistics`).

    samples, batches: handed out. step_s: outside of the loader; wait_s: in it; wait_read_s,
    wait_decode_s: the parts of wait_s that waited for bytes and for DALI. read_s, load_s: CPU time
    and time by the clock of the reading threads; fill_s: of the latter, decoding into memory.
    elapsed_s: all, the first batch among it.
    gil_late: share of the reading threads' tries to take Python's GIL that came late; gil_late_s:
    the mean time of those. decode_threads, usable_cores: of this rank. device: "cpu", "cuda:0".
    workers: torch's, of a torch dataset; None for a native one. url: the dataset's, for people.
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
    fill_s: float = 0.0
    gil_late: float = 0.0
    gil_late_s: float = 0.0
    workers: int | None = None
    remote: RemoteFacts | None = None
    shards: Shards | None = None
    pictures: Pictures | None = None
    cores: Cores | None = None
    ceilings: Ceilings | None = None

    @property
    def samples_per_s(self) -> float:
        busy_s = self.step_s + self.wait_s
        return self.samples / busy_s if busy_s else 0.0

    @property
    def wait_share(self) -> float:
        busy_s = self.step_s + self.wait_s
        return self.wait_s / busy_s if busy_s else 0.0

    def since(self, earlier: Facts) -> Facts:
        """What happened after `earlier`, of the same loader: so a warm-up doesn't count."""
        less = {name: getattr(self, name) - getattr(earlier, name) for name in _GROWING}
        remote = self.remote
        if remote is not None and earlier.remote is not None:
            remote = replace(remote, traffic=_less(remote.traffic, earlier.remote.traffic))
        return replace(self, remote=remote, **less)


def _less(traffic: Traffic, earlier: Traffic) -> Traffic:
    """request_s is a mean, and stays."""
    names = [field.name for field in fields(traffic) if field.name != "request_s"]
    return replace(traffic, **{n: getattr(traffic, n) - getattr(earlier, n) for n in names})
