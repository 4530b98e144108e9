"""Train a network without labels on several views of each image, as DINO does.

    python examples/self-supervised/dino.py
    python examples/self-supervised/dino.py --trainer lightning    # or hugging-face
    python examples/self-supervised/dino.py --steps 2000 --folder photos --global-size 224

Each image is decoded once and becomes two global views, of different recipes, and several small
local ones. A student network sees all views, and a teacher network only the global ones. The
student learns to give each view the distribution that the teacher gives to another view of that
image. The teacher is a slow average of the student. Without --folder, it draws coloured patterns.
The table shows the loss, and how often the teacher's outputs match the two global views of an image
among those of a batch.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.functional import normalize

from penstock import (
    ColorJitter,
    DataLoader,
    Dataset,
    GaussianBlur,
    Normalize,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Solarize,
    Views,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for the next line
import trainers

PATTERNS = ("rows", "columns", "checks", "dots")
OUTPUTS = 64
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.05


def draw_picture(number: int) -> Image.Image:
    """Return a picture of a pattern, in colours and at a scale that its number gives."""
    rng = np.random.default_rng(number)
    front, behind = (tuple(rng.integers(0, 256, 3).tolist()) for _ in range(2))
    image = Image.new("RGB", (64, 64), behind)
    draw = ImageDraw.Draw(image)
    step, pattern = int(rng.integers(8, 13)), PATTERNS[number % len(PATTERNS)]
    half, first = step // 2, int(rng.integers(-8, 0))
    for one in range(first, 64, step):
        if pattern == "rows":
            draw.rectangle((0, one, 64, one + half - 1), front)
        elif pattern == "columns":
            draw.rectangle((one, 0, one + half - 1, 64), front)
        for other in range(first, 64, step):
            if pattern == "dots":
                draw.ellipse((one, other, one + half, other + half), front)
            elif pattern == "checks":
                draw.rectangle((one, other, one + half - 1, other + half - 1), front)
                places = one + half, other + half
                draw.rectangle((*places, places[0] + half - 1, places[1] + half - 1), front)
    return image


def write_pictures(folder: Path, count: int = 240) -> None:
    """Write pictures into a folder for each pattern."""
    for number in range(count):
        path = folder / PATTERNS[number % len(PATTERNS)] / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_picture(number).save(path)


def views(global_size: int, local_size: int, locals_: int) -> list[Views]:
    """Return DINO's recipe: two global views, of which one is always blurred and the other is
    sometimes solarized, and local views of small parts."""
    colours = [RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8), RandomGrayscale(0.2)]

    def blur(p: float) -> GaussianBlur:
        return GaussianBlur(17, (0.1, 2.0), p=p)

    large = RandomResizedCrop(global_size, scale=(0.4, 1.0), interpolation="bicubic")
    small = RandomResizedCrop(local_size, scale=(0.05, 0.4), interpolation="bicubic")
    first = [large, *colours, blur(1.0), Normalize()]
    second = [large, *colours, blur(0.1), Solarize(128, p=0.2), Normalize()]
    local = [small, *colours, blur(0.5), Normalize()]
    return [Views({"global": [(1, first), (1, second)], "local": (locals_, local)})]


class Network(nn.Module):
    """A small network for images of any size, and a head of distributions over OUTPUTS."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        sizes = (3, 16, 32, width)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
            layers += [nn.GELU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(
            *(nn.Linear(width, 48), nn.BatchNorm1d(48), nn.GELU()),
            *(nn.Linear(48, 32), nn.BatchNorm1d(32, affine=False)),
        )
        self.last = nn.Linear(32, OUTPUTS, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of images (n, 3, height, width), shape (n, OUTPUTS)."""
        weight = normalize(self.last.weight, dim=1)
        return normalize(self.head(self.body(images)), dim=1) @ weight.T


def every_view(network: Network, views: torch.Tensor) -> torch.Tensor:
    """Return the logits of views (n, views, 3, height, width), shape (views, n, OUTPUTS)."""
    count, number = views.shape[:2]
    return network(views.flatten(0, 1)).unflatten(0, (count, number)).transpose(0, 1)


def loss_of(student: torch.Tensor, teacher: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy between the teacher's global views and the student's others.

    student: logits (views, n, OUTPUTS), global views first. teacher: those of global views.
    """
    wanted = ((teacher - center) / TEACHER_TEMPERATURE).softmax(dim=-1)
    found = (student / STUDENT_TEMPERATURE).log_softmax(dim=-1)
    pairs = [
        -(wanted[one] * found[other]).sum(dim=-1).mean()
        for one in range(len(wanted))
        for other in range(len(found))
        if one != other
    ]
    return torch.stack(pairs).mean()


def matched(logits: torch.Tensor) -> float:
    """Return how often, of all second views of a batch, that of the same image is the nearest to a
    first one. logits: (2, n, OUTPUTS)."""
    one, other = normalize(logits - logits.mean(dim=(0, 1)), dim=-1)
    return float(((one @ other.T).argmax(dim=1) == torch.arange(len(one))).float().mean())


class Job(trainers.Job):
    """A student, its teacher and their batches, which train in one of three ways."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps, self.done, self.hits = options.steps, 0, list[float]()
        self.model = self.student = Network()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=5e-3)
        self.center = torch.zeros(OUTPUTS)
        self.loader = DataLoader(
            Dataset(options.folder, fields=("image",)),
            options.batch_size,
            shuffle=True,
            drop_last=True,
            seed=options.seed,
            augment=views(options.global_size, options.local_size, options.locals),
            as_dict=True,
        )

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            self.targets = every_view(self.teacher, batch["global"])
        outputs = [every_view(self.student, batch[each]) for each in ("global", "local")]
        loss = loss_of(torch.cat(outputs), self.targets, self.center)
        self.last_loss = loss.item()
        return loss

    @torch.no_grad()
    def after_step(self) -> None:
        """Let the teacher follow the student, and print a row of the table after an eighth."""
        self.center.lerp_(self.targets.mean(dim=(0, 1)), 0.1)
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, 0.02)
        self.done += 1
        self.hits.append(matched(self.targets))
        if self.done % max(1, self.steps // 8) == 0:
            print(f"{self.done:>8}   {self.last_loss:>4.2f}   {np.mean(self.hits):>7.0%}")
            self.hits.clear()


def train_plainly(job: Job) -> None:
    while job.done < job.steps:
        for batch in job.loader:
            job.loss(batch).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.after_step()
            if job.done == job.steps:
                break


TRAINERS = {"plain": train_plainly, **trainers.TRAINERS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on views of images, without labels.")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--global-size", type=int, default=32)
    parser.add_argument("--local-size", type=int, default=16)
    parser.add_argument("--locals", type=int, default=4, help="local views of an image")
    parser.add_argument("--folder", type=Path, help="of images by class; by default drawn ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer", choices=TRAINERS, default="plain")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        if options.folder is None:
            options.folder = Path(temporary) / "pictures"
            write_pictures(options.folder)
        job = Job(options)
        with job.loader:
            print("    step   loss   matched")
            TRAINERS[options.trainer](job)


if __name__ == "__main__":
    main()
