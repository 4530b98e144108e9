"""Do two loaders do the same work? Their tensors are compared before their times are."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from penstock.cache.errors import PenstockError
from penstock.pipeline.bench.round import TensorFacts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch


# Beside what chance may add; a forgotten or doubled normalisation moves a mean by 0.5 and more.
MEAN_TOLERANCE = 0.15
DEVIATION_TOLERANCE = 0.12
DETAIL_TOLERANCE = 0.25  # relative; a resize without antialiasing, or nearest, is beyond
LABEL_TOLERANCE = 0.05  # of the labels' mean and deviation, in deviations
CHANCE = 4.0  # standard errors of the difference of two means over other samples
# So many samples of each loader are looked at, at least: enough for these tolerances to tell.
LOOKED_SAMPLES = 1024


class NotTheSameWorkError(PenstockError, ValueError):
    """Two loaders' tensors differ, so their times say nothing about one another."""


def look(batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> TensorFacts:
    """The facts of some batches of (n, 3, size, size) images and (n,) labels."""
    import torch

    images = torch.cat([images for images, _ in batches]).float()
    labels = torch.cat([labels for _, labels in batches])
    return TensorFacts(
        shape=tuple(batches[0][0].shape),
        dtype=str(batches[0][0].dtype),
        label_dtype=str(batches[0][1].dtype),
        samples=len(labels),
        label_mean=float(labels.double().mean()),
        label_deviation=float(labels.double().std(correction=0)),
        spread=float(images.mean(dim=(2, 3)).std(dim=0, correction=0).max()),
        mean=tuple(images.mean(dim=(0, 2, 3)).tolist()),
        deviation=tuple(images.std(dim=(0, 2, 3)).tolist()),
        detail=float((images[..., 1:] - images[..., :-1]).abs().mean()),
    )


def check_same_work(seen: Mapping[str, Sequence[TensorFacts]], *, pooled: bool) -> None:
    """Compare every loader's tensors with the first one's; pooled: the statistics of their pixels
    and labels too, of LOOKED_SAMPLES or more. Raises NotTheSameWorkError."""
    looks = {name: pool(rounds) for name, rounds in seen.items()}
    reference_name, reference = next(iter(looks.items()))
    for name, pixels in looks.items():
        for what, mine, wanted, same in differences(pixels, reference, pooled=pooled):
            if not same:
                raise NotTheSameWorkError(
                    f"{name}: {what} of its batches is {mine}, but {wanted} at {reference_name}. "
                    "They don't do the same work, so they aren't compared. Give both the same "
                    "images and operations."
                )


def differences(
    pixels: TensorFacts, reference: TensorFacts, *, pooled: bool
) -> Iterator[tuple[str, object, object, bool]]:
    """What was compared, the value here and there, and whether they count as the same."""
    for what in ("shape", "dtype", "label_dtype"):
        mine, wanted = getattr(pixels, what), getattr(reference, what)
        yield what, mine, wanted, mine == wanted
    if not pooled:
        return
    chance = CHANCE * math.sqrt(1 / pixels.samples + 1 / reference.samples)
    for what, tolerance in (("mean", MEAN_TOLERANCE), ("deviation", DEVIATION_TOLERANCE)):
        mine, wanted = getattr(pixels, what), getattr(reference, what)
        apart = max(abs(a - b) for a, b in zip(mine, wanted, strict=True))
        allowed = tolerance + chance * max(pixels.spread, reference.spread)
        yield f"channels' {what}", mine, wanted, apart <= allowed
    near = math.isclose(pixels.detail, reference.detail, rel_tol=DETAIL_TOLERANCE)
    yield "detail", pixels.detail, reference.detail, near
    allowed = (LABEL_TOLERANCE + chance) * max(reference.label_deviation, pixels.label_deviation)
    for what in ("label_mean", "label_deviation"):
        mine, wanted = getattr(pixels, what), getattr(reference, what)
        yield what, mine, wanted, abs(mine - wanted) <= allowed


def pool(looks: Sequence[TensorFacts]) -> TensorFacts:
    """The statistics of all rounds, from what each saw of equally many samples."""

    def mean(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(statistics.fmean(column) for column in zip(*rows, strict=True))

    return TensorFacts(
        shape=looks[-1].shape,
        dtype=looks[-1].dtype,
        label_dtype=looks[-1].label_dtype,
        samples=sum(look.samples for look in looks),
        label_mean=statistics.fmean(look.label_mean for look in looks),
        label_deviation=statistics.fmean(look.label_deviation for look in looks),
        spread=statistics.fmean(look.spread for look in looks),
        mean=mean([look.mean for look in looks]),
        deviation=mean([look.deviation for look in looks]),
        detail=statistics.fmean(look.detail for look in looks),
    )
