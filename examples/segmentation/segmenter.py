"""Train a small segmenter on images and their masks, and evaluate it by the overlap of classes.

    python examples/segmentation/segmenter.py
    python examples/segmentation/segmenter.py --trainer lightning    # or hugging-face
    python examples/segmentation/segmenter.py --data street --size 512 --epochs 40

Without `--data` it draws a small set: pictures of a meadow, a lake and a path, and for each a mask
with a class number for each pixel; 255 is a pixel that nobody labelled. Crops and flips move a mask
with its image. What a crop shows outside of the image has the ignored number, too. A function for
`device_augment=` changes the colours of whole batches on the device, with random numbers that a
resumed job repeats. Each epoch prints the loss and the mean intersection over union of the classes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from penstock import CenterCrop, DataLoader, Dataset, Normalize, RandomCrop, RandomHorizontalFlip

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for the next line
import trainers

CLASSES = ("meadow", "lake", "path")
COLOURS = ((70, 140, 60), (60, 90, 170), (150, 140, 120))
IGNORED = 255


def draw_scene(number: int) -> tuple[Image.Image, Image.Image]:
    """Return a picture and its mask. The colours alone don't tell the classes."""
    rng = np.random.default_rng(number)
    width, height = (int(side) for side in rng.integers(72, 110, 2))
    mask = Image.new("L", (width, height), 0)
    draw = ImageDraw.Draw(mask)
    x, y = (int(side * rng.uniform(0.1, 0.5)) for side in (width, height))
    draw.ellipse((x, y, x + rng.integers(25, 50), y + rng.integers(20, 40)), 1)
    left, right = (int(end) for end in rng.integers(0, width, 2))
    draw.line((left, 0, right, height), 2, width=int(rng.integers(6, 14)))
    numbers = np.asarray(mask)
    shades = np.array(COLOURS) + rng.normal(0, 25, (len(CLASSES), 3))
    pixels = shades[numbers] + rng.normal(0, 12, (height, width, 3))
    draw.rectangle((0, 0, width, 3), IGNORED)  # a strip without labels
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), mask


def write_scenes(root: Path) -> Path:
    """Write 120 and 30 pictures with their masks."""
    for split, numbers in (("train", range(120)), ("val", range(1000, 1030))):
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True)
        for number in numbers:
            image, mask = draw_scene(number)
            image.save(root / split / "images" / f"{number:04d}.jpg", quality=92)
            mask.save(root / split / "masks" / f"{number:04d}.png")
    return root


class Segmenter(nn.Module):
    """Scores the classes of each pixel, from features at three scales."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        sides = (3, width, 2 * width, 4 * width)
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=2, padding=1),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1),
                nn.BatchNorm2d(b),
                nn.ReLU(),
            )
            for a, b in pairwise(sides)
        )
        self.head = nn.Conv2d(sum(sides[1:]), classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (n, 3, height, width). Returns scores, (n, classes, height, width)."""
        features, found = images, []
        for layer in self.down:
            features = layer(features)
            found.append(features)
        size = found[0].shape[2:]
        whole = torch.cat([found[0], *(interpolate(each, size) for each in found[1:])], 1)
        return interpolate(self.head(whole), images.shape[2:], mode="bilinear")


def change_colours(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Change the brightness and the contrast of each image: on its device, after the copy."""
    images = batch["image"]
    size = (2, len(images), 1, 1, 1)
    light, contrast = torch.rand(size, generator=generator, device=images.device) * 0.4 - 0.2
    middle = images.mean((2, 3), keepdim=True)
    return {**batch, "image": (images - middle) * (1 + contrast) + middle + light}


@torch.no_grad()
def mean_overlap(model: nn.Module, loader: DataLoader, classes: int) -> float:
    """Return the mean over the classes of intersection over union; each image counts once."""
    model.eval()
    counts = torch.zeros(classes, classes, dtype=torch.int64)  # truth x prediction
    for batch in loader:
        found, truth = model(batch["image"]).argmax(1), batch["mask"].long()
        known = (truth != IGNORED) & batch["valid"][:, None, None]
        pairs = truth[known] * classes + found[known]
        counts += pairs.bincount(minlength=classes**2).view(classes, classes).cpu()
    model.train()
    both = counts.diagonal()
    return float((both / (counts.sum(0) + counts.sum(1) - both).clamp(min=1)).mean())


class Job(trainers.Job):
    """A segmenter, its batches and its optimizer, which train in one of three ways."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        fields = {"image": "images", "mask": "masks"}
        outside = {"pad_if_needed": True, "mask_fill": IGNORED}
        self.classes, self.epochs = options.classes, options.epochs
        self.loader = DataLoader(
            Dataset(root / "train", fields=fields),
            options.batch_size,
            shuffle=True,
            drop_last=True,
            seed=0,
            augment=[RandomCrop(options.size, **outside), RandomHorizontalFlip(), Normalize()],
            device_augment=change_colours,
            device=device,
            as_dict=True,
        )
        self.val = DataLoader(
            Dataset(root / "val", fields=fields),
            options.batch_size,
            pad="mask",
            augment=[CenterCrop(options.size), Normalize()],
            device=device,
            as_dict=True,
        )
        self.steps = options.epochs * len(self.loader)
        self.model = Segmenter(options.classes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        scores = self.model(batch["image"])
        return cross_entropy(scores, batch["mask"].long(), ignore_index=IGNORED)

    def overlap(self) -> float:
        return mean_overlap(self.model, self.val, self.classes)


def train_plainly(job: Job) -> None:
    for epoch in range(job.epochs):
        total = 0.0
        for batch in job.loader:
            loss = job.loss(batch)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            total += float(loss.detach()) / len(job.loader)
        print(f"epoch {epoch}: loss {total:.3f}, mean IoU {job.overlap():.3f}", flush=True)


TRAINERS = {"plain": train_plainly, **trainers.TRAINERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="train/ and val/, each with images/ and masks/")
    parser.add_argument("--classes", type=int, default=len(CLASSES))
    parser.add_argument("--size", type=int, default=64, help="pixels of a crop's side")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--trainer", choices=TRAINERS, default="plain")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        job = Job(options.data or write_scenes(Path(temporary)), options)
        with job.loader, job.val:
            TRAINERS[options.trainer](job)
            print(f"mean IoU {job.overlap():.3f}")


if __name__ == "__main__":
    main()
