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


@dataclass(frozen=True, slots=True, kw_only=True)
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
        if batch_size < 1:
            raise ConfigError(
                f"batch_size: got {batch_size}, wanted 1 or more. {self.name} was published with "
                f"{self.batch_size}."
            )
        return self.step_s * (batch_size / self.batch_size)

    @property
    def samples_per_s(self) -> float:
        """The samples per second that the accelerator consumes if it never waits."""
        return self.batch_size / self.step_s

    @property
    def bytes_per_s(self) -> float:
        """The encoded bytes per second that the accelerator consumes if it never waits."""
        return self.samples_per_s * self.sample_bytes


def _table(*accelerators: Accelerator) -> dict[str, Accelerator]:
    return {accelerator.name: accelerator for accelerator in accelerators}


ACCELERATORS = _table(
    Accelerator(name="h100-resnet50", step_s=0.224, batch_size=400, sample_bytes=114_660),
    Accelerator(
        name="h100-unet3d", step_s=0.323, batch_size=7, sample_bytes=146_600_628, has_images=False
    ),
    Accelerator(
        name="h100-cosmoflow",
        step_s=0.0035,
        batch_size=1,
        sample_bytes=2_828_486,
        samples=524_288,
        has_images=False,
    ),
    Accelerator(name="a100-resnet50", step_s=0.435, batch_size=400, sample_bytes=114_660),
    Accelerator(
        name="a100-unet3d", step_s=0.636, batch_size=7, sample_bytes=146_600_628, has_images=False
    ),
    Accelerator(
        name="a100-cosmoflow",
        step_s=0.00551,
        batch_size=1,
        sample_bytes=2_828_486,
        samples=524_288,
        has_images=False,
    ),
    Accelerator(
        name="b200-unet3d",
        step_s=0.162,
        batch_size=7,
        sample_bytes=146_600_628,
        samples=7_200,
        has_images=False,
    ),
    Accelerator(
        name="b200-retinanet",
        step_s=0.04755,
        batch_size=24,
        sample_bytes=322_957,
        samples=1_170_301,
    ),
    Accelerator(
        name="b200-flux", step_s=1.35, batch_size=48, sample_bytes=2_164_832, samples=4_296 * 288
    ),
    # A batch of 240 gives a step of half a second.
    Accelerator(name="dgx-pod", step_s=0.5, batch_size=240, sample_bytes=500_000, samples=300_000),
)


def accelerator(name: str) -> Accelerator:
    """Return the accelerator of that name. Raises ConfigError with all names for another one."""
    try:
        return ACCELERATORS[name]
    except KeyError:
        raise ConfigError(
            f"--accelerator: got {name!r}, wanted one of {', '.join(ACCELERATORS)}. Pass one of "
            "these, or the length of a step (--step-ms)."
        ) from None
