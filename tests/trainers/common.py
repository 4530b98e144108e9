"""Shared by all trainer jobs: datasets, loaders, a model, and the record of the batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 64
PIXELS = 8
EPOCHS = 3
GLOBAL_BATCH = 8
STEPS = SAMPLES // GLOBAL_BATCH  # of an epoch, on any number of ranks
STOP = STEPS + 3  # steps before a job is stopped: in the middle of its second epoch
SEED = 5


class Numbers(Dataset[tuple[torch.Tensor, int, int]]):
    """A map-style dataset of torch's kind: (image, label, id)."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int, int]:
        image = torch.full((3, PIXELS, PIXELS), number / SAMPLES)
        return image, number % 3, number


def make_dataset(kind: str, folder: Path) -> Any:
    """kind: "native", an image folder read by Penstock, or "torch", a map-style dataset."""
    if kind == "torch":
        return Numbers()
    from penstock.readers import Dataset as Native

    return Native(folder, fields=("image", "label", "id"))


def loader_options(kind: str) -> dict[str, Any]:
    """Arguments of the DataLoader but dataset and batch size."""
    options: dict[str, Any] = {"shuffle": True, "seed": SEED, "drop_last": True}
    if kind == "native":
        from penstock.augment import Normalize, Resize

        options["augment"] = [Resize((PIXELS, PIXELS)), Normalize()]
    return options


def make_loader(kind: str, folder: Path, **more: Any) -> Any:
    """The loader as a user makes it: it finds rank and world by itself."""
    from penstock.pipeline import DataLoader
    from penstock.pipeline.plan import World

    batch_size = GLOBAL_BATCH // World.detect().size
    options = {**loader_options(kind), **more}
    return DataLoader(make_dataset(kind, folder), batch_size=batch_size, **options)


def make_model() -> nn.Module:
    """Small enough that its steps take no time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS * PIXELS, 3))


class Record:
    """Ids of each batch that reached the training step, in order."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, ids: torch.Tensor) -> int:
        """Note a batch; returns how many came so far."""
        self.batches.append([int(number) for number in ids])
        return len(self.batches)
