"""The DLIO-style jobs, and the pace of each on this disk. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import ConfigError
from penstock.pipeline.bench import SETTLE_BATCHES, Accelerator, accelerator

if TYPE_CHECKING:
    from benchmarks.dlio_data import Kind
    from benchmarks.dlio_task import Work

# The job asks for so much of what the disk was measured to give, k times slower if need be.
DISK_SHARE = 0.5
# And where decoding is the limit, of what Penstock was measured to decode without a step.
DECODE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioWorkload:
    """A job.

    samples: generated on this machine. note: for readers of the result. batch_size, sample_bytes:
    None for the published values; a step scales with its batch.
    """

    name: str
    accelerator: str
    kind: Kind
    work: Work
    samples: int
    batch_size: int | None = None
    sample_bytes: int | None = None
    note: str

    @property
    def pace(self) -> Accelerator:
        return accelerator(self.accelerator)

    @property
    def batch(self) -> int:
        return self.batch_size or self.pace.batch_size

    @property
    def step_s(self) -> float:
        """The published step time, scaled to this batch."""
        return self.pace.step_for(self.batch)

    @property
    def size(self) -> int:
        """Bytes of a sample."""
        return self.sample_bytes or self.pace.sample_bytes

    @property
    def bytes_per_s(self) -> float:
        """Demand of a job that never waits, at the published pace."""
        return self.batch / self.step_s * self.size


_WHOLE = "Whole arrays are handed out, as tensors (DLIO's readers hand out a window of 2 MB)."
_NOT_DECODED = (
    "As DLIO's readers: all bytes are read (Penstock compares their checksums, torch's side looks "
    "at nothing), none are decoded; labels are handed out."
)
WORKLOADS: tuple[DlioWorkload, ...] = (
    DlioWorkload(
        name="resnet50",
        accelerator="h100-resnet50",
        kind="jpeg",
        work="bytes",
        samples=16_000,
        note=_NOT_DECODED,
    ),
    DlioWorkload(
        name="resnet50-decode",
        accelerator="h100-resnet50",
        kind="jpeg",
        work="decode",
        samples=16_000,
        batch_size=100,
        note="Decoded and augmented (ImageNet's training recipe, 224 pixels, float32) on the CPU.",
    ),
    DlioWorkload(
        name="unet3d",
        accelerator="h100-unet3d",
        kind="npz",
        work="arrays",
        samples=84,
        note=f"A .npz a sample, of an array x and a label y. {_WHOLE}",
    ),
    DlioWorkload(
        name="unet3d-b200",
        accelerator="b200-unet3d",
        kind="npz",
        work="arrays",
        samples=84,
        note=f"A .npz a sample, of an array x and a label y. {_WHOLE}",
    ),
    DlioWorkload(
        name="cosmoflow",
        accelerator="h100-cosmoflow",
        kind="npy",
        work="arrays",
        samples=1_800,
        note="A .npy a sample, where DLIO has a TFRecord. Whole samples are handed out.",
    ),
    DlioWorkload(
        name="retinanet",
        accelerator="b200-retinanet",
        kind="jpeg",
        work="detect",
        samples=4_800,
        note="Decoded to 800 x 800 pixels and mirrored at random (uint8) on the CPU.",
    ),
    DlioWorkload(
        name="flux",
        accelerator="b200-flux",
        kind="parquet",
        work="columns",
        samples=1_440,
        note="Parquet files of 288 rows, row groups of 16, uncompressed; all columns of a sample "
        "are handed out as tensors, 48 samples a batch.",
    ),
    DlioWorkload(
        name="dgx-pod",
        accelerator="dgx-pod",
        kind="jpeg",
        work="bytes",
        samples=4_560,
        note=_NOT_DECODED,
    ),
)
NAMES = tuple(workload.name for workload in WORKLOADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of a job on this machine.

    raw_bytes_per_s: rate of this disk in requests of a sample's size, without the page cache.
    decode_samples_per_s: Penstock's decoding rate without a step; 0 if nothing is decoded. k:
    factor by which steps are longer than published. required_bytes_per_s: demand of a job that
    never waits.
    """

    raw_bytes_per_s: float
    decode_samples_per_s: float
    k: float
    step_s: float
    required_bytes_per_s: float


def pace_of(workload: DlioWorkload, *, raw_bytes_per_s: float, decode_samples_per_s: float) -> Pace:
    """Return the pace at which the job demands the stated share of the rate of the disk and of the
    decoder. Pure."""
    if raw_bytes_per_s <= 0:
        raise ConfigError(f"The disk gave {raw_bytes_per_s} bytes/s; a pace needs more than 0.")
    slower = workload.bytes_per_s / (DISK_SHARE * raw_bytes_per_s)
    if decode_samples_per_s:
        published = workload.batch / workload.step_s
        slower = max(slower, published / (DECODE_SHARE * decode_samples_per_s))
    k = 1.0 if slower <= 1 else _two_digits_up(slower)
    return Pace(
        raw_bytes_per_s=raw_bytes_per_s,
        decode_samples_per_s=decode_samples_per_s,
        k=k,
        step_s=k * workload.step_s,
        required_bytes_per_s=workload.bytes_per_s / k,
    )


def _two_digits_up(value: float) -> float:
    """Round up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / unit - 1e-9) * unit, 9)


def measured_seconds(
    workload: DlioWorkload, step_s: float, *, samples: int, most_s: float
) -> float:
    """Return how long a run may be measured without reading a sample twice, warm-up
    included. Pure."""
    steps = samples // workload.batch - SETTLE_BATCHES - 2
    if steps < 2:
        raise ConfigError(
            f"{workload.name}: {samples} samples in batches of {workload.batch} leave {steps} "
            f"steps to measure behind {SETTLE_BATCHES} that settle, wanted 2. Make more samples."
        )
    return min(most_s, steps * step_s)
