"""Train a small detector on data in COCO's layout, and evaluate it as COCO does.

    python examples/detection/detector.py
    python examples/detection/detector.py --trainer lightning      # or hugging-face
    python examples/detection/detector.py --data coco --size 640 --epochs 12    # COCO itself, 2017

Without `--data` it draws a small set in COCO's layout: pictures of discs, squares and triangles, of
different sizes. The model has the interface of torchvision's detectors: `model(images, targets)`
returns losses in training, and `model(images)` a dict of boxes, labels and scores for each image in
evaluation, so that one of torchvision's can take its place. Images keep their aspect ratio; a batch
is one tensor, padded to the largest image of the batch. Each epoch prints the loss and the average
precision at an overlap of 0.5. `--out` writes the detections in COCO's format of results, with
COCO's own image and category ids, which pycocotools' COCOeval reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import penstock
from penstock import (
    DataLoader,
    Dataset,
    LongestSide,
    Normalize,
    Pad,
    RandomHorizontalFlip,
    SanitizeBoxes,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for the next line
import trainers

SHAPES = {1: "disc", 3: "square", 17: "triangle"}  # ids with gaps, as COCO's have
STRIDE = 8


def draw_scene(number: int) -> tuple[Image.Image, list[dict[str, Any]]]:
    """Return a picture with up to four objects, and their annotations."""
    rng = np.random.default_rng(number)
    width, height = (int(side) for side in rng.integers(70, 130, 2))
    noise = rng.normal(120, 25, (height, width, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(noise)
    draw, things = ImageDraw.Draw(image), list[dict[str, Any]]()
    for _ in range(rng.integers(0, 5)):  # a picture may be empty
        side = int(rng.integers(20, 45))
        x, y = int(rng.integers(0, width - side)), int(rng.integers(0, height - side))
        colour = tuple(map(int, rng.integers(0, 256, 3)))
        kind = list(SHAPES)[int(rng.integers(len(SHAPES)))]
        box = (x, y, x + side, y + side)
        if any(_touch(box, each["bbox"]) for each in things):
            continue
        if SHAPES[kind] == "disc":
            draw.ellipse(box, colour)
        elif SHAPES[kind] == "square":
            draw.rectangle(box, colour)
        else:
            draw.polygon([(x + side / 2, y), (x + side, y + side), (x, y + side)], colour)
        entry = {"category_id": kind, "bbox": [x, y, side, side], "area": side * side, "iscrowd": 0}
        things.append(entry)
    return image, things


def _touch(box: tuple[int, ...], other: list[int]) -> bool:
    x, y, width, height = other
    return box[0] < x + width and x < box[2] and box[1] < y + height and y < box[3]


def write_scenes(root: Path) -> Path:
    """Write 160 and 40 pictures with their annotations, in COCO's layout."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split, numbers in (("train2017", range(160)), ("val2017", range(1000, 1040))):
        (root / split).mkdir(exist_ok=True)
        images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
        for number in numbers:
            image, things = draw_scene(number)
            name = f"{number:012d}.jpg"
            image.save(root / split / name, quality=90)
            sides = {"width": image.width, "height": image.height}
            images.append({"id": number, "file_name": name, **sides})
            for thing in things:
                annotations.append({"id": len(annotations) + 1, "image_id": number, **thing})
        content = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": id, "name": name} for id, name in SHAPES.items()],
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


class Detector(nn.Module):
    """Finds objects by their centres: each cell of 8 x 8 pixels scores the classes, and measures
    the distances from its middle to the four sides of the box."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside, stride in (
            (3, width, 2),
            (width, 2 * width, 2),
            (2 * width, 4 * width, 2),
            (4 * width, 4 * width, 1),
            (4 * width, 4 * width, 1),
        ):
            layers += [nn.Conv2d(inside, outside, 3, stride, 1), nn.BatchNorm2d(outside), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(4 * width, classes + 4, 3, padding=1)
        nn.init.constant_(self.head.bias[:classes], -4.0)  # most cells have nothing
        self.classes = classes

    def forward(
        self, images: torch.Tensor, targets: list[dict[str, torch.Tensor]] | None = None
    ) -> Any:
        """Return a dict of losses in training, else boxes, labels and scores of each image.

        images: (n, 3, height, width). targets: boxes as x1, y1, x2, y2, and labels, of each.
        """
        found = self.head(self.body(images))
        scores, sides = found[:, : self.classes], found[:, self.classes :]
        sides = sides.clamp(-2, 4).exp() * STRIDE
        rows, columns = scores.shape[2:]
        y = (torch.arange(rows, device=images.device) + 0.5) * STRIDE
        x = (torch.arange(columns, device=images.device) + 0.5) * STRIDE
        middles = torch.stack(torch.meshgrid(x, y, indexing="xy"))
        if targets is None:
            boxes = torch.cat([middles - sides[:, :2], middles + sides[:, 2:]], 1)
            return [_peaks(*each) for each in zip(scores.sigmoid(), boxes, strict=True)]
        wanted, truth = torch.zeros_like(scores), torch.zeros_like(sides)
        for row, target in enumerate(targets):
            areas = (target["boxes"][:, 2:] - target["boxes"][:, :2]).prod(1)
            for place in areas.argsort(descending=True):  # the smallest gets a cell of several
                box, label = target["boxes"][place], target["labels"][place]
                centre = (box[:2] + box[2:]) / 2
                reach = torch.maximum((box[2:] - box[:2]) / 5, torch.tensor(STRIDE / 2))
                inside = ((middles - centre[:, None, None]).abs() <= reach[:, None, None]).all(0)
                wanted[row, :, inside] = 0.0
                wanted[row, label, inside] = 1.0
                ends = torch.cat([middles - box[:2, None, None], box[2:, None, None] - middles])
                truth[row, :, inside] = ends[:, inside]
        count = wanted.sum().clamp(min=1)
        probability = scores.sigmoid()
        focus = torch.where(wanted > 0, 1 - probability, 0.5 * probability).square()
        weighted = focus * binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        some = wanted.amax(1) > 0
        ours, theirs = (each.movedim(1, 3)[some] for each in (sides, truth))
        shared = torch.minimum(ours, theirs)
        areas = [(each[:, :2] + each[:, 2:]).prod(1) for each in (ours, theirs, shared)]
        overlap = areas[2] / (areas[0] + areas[1] - areas[2])
        return {"loss_class": weighted.sum() / count, "loss_box": (1 - overlap).sum() / count}


def _peaks(scores: torch.Tensor, boxes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the best 30 detections of an image, without those that overlap a better one."""
    best, labels = scores.flatten(1).max(0)
    order = best.argsort(descending=True)[:100]
    corners, labels = boxes.flatten(1)[:, order].T, labels[order]
    repeats = (box_overlaps(corners, corners) > 0.5) & (labels[:, None] == labels)
    kept = (~repeats.triu(1).any(0)).nonzero()[:30, 0]
    return {"boxes": corners[kept], "labels": labels[kept], "scores": best[order][kept]}


def box_overlaps(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the intersection over the union of each box with each other one, (n, m)."""
    low = torch.maximum(some[:, None, :2], others[:, :2])
    high = torch.minimum(some[:, None, 2:], others[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (some, others)]
    return shared / (areas[0][:, None] + areas[1] - shared).clamp(min=1e-9)


def recipe(size: int, *, trains: bool) -> list[Any]:
    """Return the operations of a batch: images keep their aspect and are padded to one tensor."""
    sizes = tuple(round(size * share / 32) * 32 for share in (0.75, 1.0, 1.25)) if trains else size
    flip = [RandomHorizontalFlip()] if trains else []
    return [
        LongestSide(sizes, per="batch"),
        *flip,
        Normalize(),
        SanitizeBoxes(2),
        Pad(to_multiple=32),
    ]


def targets_of(batch: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return what torchvision's detectors get as targets: a dict for each image."""
    pairs = zip(batch["boxes"], batch["labels"], strict=True)
    return [{"boxes": boxes, "labels": labels} for boxes, labels in pairs]


@torch.no_grad()
def detect(model: nn.Module, loader: DataLoader, ids: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the detections in all images, each image once, in COCO's format of results.

    ids: COCO's category of each class.
    """
    model.eval()
    results = []
    for batch in loader:
        found = model(batch["image"])
        scale = batch["original_size"] / batch["image.size"]  # of height and width
        for row in batch["valid"].nonzero()[:, 0].tolist():
            sides = scale[row].flip(0).repeat(2)
            boxes, labels, scores = found[row].values()
            corners = (boxes * sides).tolist()
            for (x1, y1, x2, y2), label, score in zip(corners, labels, scores, strict=True):
                results.append(
                    {
                        "image_id": int(batch["image_id"][row]),
                        "category_id": ids[label],
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "score": float(score),
                    }
                )
    model.train()
    return results


def average_precision(
    results: list[dict[str, Any]], truth: list[dict[str, Any]], *, overlap: float = 0.5
) -> float:
    """Return COCO's average precision at one overlap, over all categories.

    results, truth: annotations with image_id, category_id and bbox (x, y, width, height).
    pycocotools' COCOeval computes it for all overlaps, and handles crowds.
    """
    precisions = []
    for category in sorted({each["category_id"] for each in truth}):
        real = [each for each in truth if each["category_id"] == category]
        boxes: dict[int, torch.Tensor] = {}
        for image in {each["image_id"] for each in real}:
            own = [each["bbox"] for each in real if each["image_id"] == image]
            boxes[image] = corners_of(own)
        free = {image: [True] * len(own) for image, own in boxes.items()}
        hits = []
        own = [each for each in results if each["category_id"] == category]
        for each in sorted(own, key=lambda each: -each["score"]):
            image, hit = each["image_id"], False
            if image in boxes:
                shared = box_overlaps(corners_of([each["bbox"]]), boxes[image])[0]
                shared[~torch.tensor(free[image])] = 0
                hit = bool(shared.max() >= overlap)
                if hit:
                    free[image][int(shared.argmax())] = False
            hits.append(hit)
        right = np.cumsum(hits)
        recall, precision = right / len(real), right / np.arange(1, len(hits) + 1)
        best = np.maximum.accumulate(precision[::-1])[::-1]  # at this recall or a higher one
        at = np.searchsorted(recall, np.linspace(0, 1, 101))
        precisions.append(np.append(best, 0)[at].mean())
    return float(np.mean(precisions)) if precisions else 0.0


def corners_of(boxes: list[list[float]]) -> torch.Tensor:
    """Return x1, y1, x2, y2 of boxes that are x, y, width and height."""
    corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    return corners


class Job(trainers.Job):
    """A detector, its batches and its optimizer, which train in one of three ways."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        notes = "annotations/instances_{}2017.json".format
        train = Dataset(root / "train2017", manifest=notes("train"))
        fields = ("image", "image.size", "image_id", "original_size")
        val = Dataset(root / "val2017", manifest=notes("val"), fields=fields)
        self.truth = json.loads((root / notes("val")).read_text())["annotations"]
        self.classes, self.ids = train.classes, train.schema["labels"].ids
        self.model, self.epochs = Detector(len(train.classes)), options.epochs
        size, shared = options.size, {"batch_size": options.batch_size, "as_dict": True}
        order = {"shuffle": True, "drop_last": True, "seed": 0}
        self.loader = DataLoader(train, augment=recipe(size, trains=True), **order, **shared)
        self.val = DataLoader(val, augment=recipe(size, trains=False), pad="mask", **shared)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.steps = options.epochs * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 4e-3, self.steps)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        losses = self.model(batch["image"], targets_of(batch))
        return losses["loss_class"] + losses["loss_box"]

    def evaluate(self) -> tuple[list[dict[str, Any]], float]:
        """Return all detections, and their average precision."""
        results = detect(self.model, self.val, self.ids)
        return results, average_precision(results, self.truth)


def train_plainly(job: Job) -> None:
    for epoch in range(job.epochs):
        total = 0.0
        for batch in job.loader:
            loss = job.loss(batch)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            job.schedule.step()
            total += float(loss.detach()) / len(job.loader)
        print(f"epoch {epoch}: loss {total:.3f}, AP50 {job.evaluate()[1]:.3f}", flush=True)


TRAINERS = {"plain": train_plainly, **trainers.TRAINERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder in COCO's layout; none: draw a set")
    parser.add_argument("--size", type=int, default=96, help="pixels of an image's longest side")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--trainer", choices=TRAINERS, default="plain")
    parser.add_argument("--out", type=Path, help="write the detections to this file, as JSON")
    parser.add_argument("--picture", type=Path, help="draw detections into this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        job = Job(options.data or write_scenes(Path(temporary)), options)
        with job.loader, job.val:
            TRAINERS[options.trainer](job)
            results, precision = job.evaluate()
            print(f"AP50 {precision:.3f} of {len(results)} detections")
            if options.out is not None:
                options.out.write_text(json.dumps(results))
            if options.picture is not None:
                draw_detections(job, options.picture)


@torch.no_grad()
def draw_detections(job: Job, path: Path) -> None:
    """Draw what the model finds with confidence in one batch."""
    images, sure = next(iter(job.val))["image"], []
    for found in job.model.eval()(images):
        best = found["scores"] > 0.3
        sure.append({"boxes": found["boxes"][best], "labels": found["labels"][best]})
    penstock.show((images, sure), classes=job.classes).save(path)


if __name__ == "__main__":
    main()
