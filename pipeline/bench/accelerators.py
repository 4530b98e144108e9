"""List the accelerators that a benchmark emulates, with the time of a training step on each.

A benchmark of storage or loaders needs no accelerator: a step is a wait of the length that was
measured on a real one (DLIO; MLPerf Storage). The steps, batch sizes and mean sample sizes of
b200-*, h100-* and a100-* come from MLPerf Storage's published workloads
(github.com/mlcommons/storage, configs/dlio/workload/<model>_<accelerator>.yaml:
train.computation_time, reader.batch_size, dataset.record_length_bytes; its record lengths vary,
ours are the means), version 3.0 for the B200 and 2.0 for the others. dgx-pod is a job of 300,000
images of 0.5 MB at 480 images/s, for which storage of NVIDIA's DGX PODs is planned; no batch size
was published for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cache import ConfigError


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator that trains one model.

    step_s: seconds of a training step over batch_size samples; sample_bytes: mean encoded size of
    a sample; samples: size of the published dataset, 0 if the tester chooses it; has_images: True
    for images, which must be decoded, False for arrays.
    """

    name: str
    step_s: float
    batch_size: int
    sample_bytes: int
    samples: int = 0
    has_images: bool = True

    def step_for(self, batch_size: int) -> float:
        """Return the seconds of a step for a batch size; they are proportional to it."""
        return self.step_s * (batch_size / self.batch_size)

    @property
    def samples_per_s(self) -> float:
        """The samples per second that the accelerator consumes if it never waits."""
        return self.batch_size / self.step_s

    @property
    def bytes_per_s(self) -> float:
        """The encoded bytes per second that the accelerator consumes if it never waits."""
        return self.samples_per_s * self.sample_bytes


_PUBLISHED = {  # name: (step_s, batch_size, sample_bytes, samples, has_images)
    "h100-resnet50": (0.224, 400, 114_660, 0, True),
    "h100-unet3d": (0.323, 7, 146_600_628, 0, False),
    "h100-cosmoflow": (0.0035, 1, 2_828_486, 524_288, False),
    "a100-resnet50": (0.435, 400, 114_660, 0, True),
    "a100-unet3d": (0.636, 7, 146_600_628, 0, False),
    "a100-cosmoflow": (0.00551, 1, 2_828_486, 524_288, False),
    "b200-unet3d": (0.162, 7, 146_600_628, 7_200, False),
    "b200-retinanet": (0.04755, 24, 322_957, 1_170_301, True),
    "b200-flux": (1.35, 48, 2_164_832, 4_296 * 288, True),
    "dgx-pod": (0.5, 240, 500_000, 300_000, True),  # a batch of 240 gives a step of half a second
}
ACCELERATORS = {name: Accelerator(name, *published) for name, published in _PUBLISHED.items()}


def accelerator(name: str) -> Accelerator:
    """Return the accelerator of that name. Raises ConfigError with all names for another one."""
    try:
        return ACCELERATORS[name]
    except KeyError:
        raise ConfigError(
            f"--accelerator: got {name!r}, wanted one of {', '.join(ACCELERATORS)}. Pass one of "
            "these, or the length of a step (--step-ms)."
        ) from None
