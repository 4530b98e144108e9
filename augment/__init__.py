"""What is done to each sample on its way to a tensor, as plain values. Light: no DALI, no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def _refuse_hidden_packages() -> None:
    """Our packages have everyday names; a user's own `cache.py` beside a script would hide ours.

    A plain ImportError: the error tree itself may be what is hidden.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("cache", "readers"):
        wanted = home / name / "__init__.py"
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found != wanted:
            where = found or (list(spec.submodule_search_locations or []) if spec else "nowhere")
            raise ImportError(
                f"Penstock's package `{name}` is hidden: Python finds {where}, wanted {wanted}. "
                "Rename your file or folder, or start Python where it isn't first on the path.",
                name=name,
            )


_refuse_hidden_packages()

from penstock.augment.ops import (  # noqa: E402  (only once the floors below are known to be ours)
    IMAGENET_MEAN,
    IMAGENET_STD,
    Apply,
    AutoAugment,
    Cast,
    CenterCrop,
    ColorJitter,
    CutMix,
    Decode,
    GaussianBlur,
    MixUp,
    Normalize,
    Operation,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    TrivialAugmentWide,
    imagenet_eval,
    imagenet_train,
)

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Apply",
    "AutoAugment",
    "Cast",
    "CenterCrop",
    "ColorJitter",
    "CutMix",
    "Decode",
    "GaussianBlur",
    "MixUp",
    "Normalize",
    "Operation",
    "RandAugment",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "Resize",
    "TrivialAugmentWide",
    "imagenet_eval",
    "imagenet_train",
]
