"""What each stage of a batch's road can do alone, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
