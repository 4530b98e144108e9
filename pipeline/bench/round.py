"""One round of a loader, as values: its batches, what it cost, what its tensors were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a loader's tensors look like, to tell whether two loaders do the same work.

    samples, label_mean, label_deviation: how many were looked at; of their labels.
    spread: deviation of the images' own means, of the channel where it is largest: what chance does
    to a mean over few images.
    mean, deviation: of each channel over all pixels, in normalised units.
    detail: mean absolute difference of horizontal neighbours; a resize without antialiasing raises
    it.
    """

    shape: tuple[int, ...]
    dtype: str
    label_dtype: str
    samples: int
    label_mean: float
    label_deviation: float
    spread: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    detail: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSize:
    """How many batches a round has.

    looked: taken at first; their pixels are looked at.
    settle: taken next, more than any loader keeps ready, so that the timed ones come at the rate at
    which they are made.
    timed: taken as fast as they come.
    stepped: each followed by step_ms in which this process leaves the cores alone, as it does while
    an accelerator trains.
    seed: of the order and the crops; another one each round, so that pooled pixels average well.
    """

    looked: int = 2
    settle: int = 5
    timed: int = 16
    stepped: int = 12
    step_ms: float = 0.0
    seed: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round cost.

    build_s: the constructor; first_batch_s: from its return to the first batch.
    images, wall_s, cpu_s: of the timed batches; cpu_s counts this process and its children.
    stepped: batches that a step followed; wait_s, step_s: their time in the loader and in the step.
    """

    build_s: float
    first_batch_s: float
    images: int
    wall_s: float
    cpu_s: float
    stepped: int
    wait_s: float
    step_s: float
    pixels: TensorFacts

    @property
    def images_per_s(self) -> float:
        return self.images / self.wall_s

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000 * self.cpu_s / self.images

    @property
    def batch_wait_ms(self) -> float:
        return 1000 * self.wait_s / max(1, self.stepped)

    @property
    def batch_step_ms(self) -> float:
        return 1000 * self.step_s / max(1, self.stepped)

    @property
    def wait_share(self) -> float:
        return self.wait_s / (self.wait_s + self.step_s) if self.step_s else 0.0


def round_from_json(values: dict[str, Any]) -> Round:
    """A round as its process wrote it: JSON has lists where TensorFacts has tuples."""
    pixels: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values["pixels"].items()
    }
    return Round(**(values | {"pixels": TensorFacts(**pixels)}))
