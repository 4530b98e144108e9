"""The detector of examples/ learns from Penstock's batches what it learns from those of
torchvision's dataset and transforms in torch's DataLoader."""

from __future__ import annotations

import io
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from penstock import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).resolve().parents[2]
SIZE, BATCH, EPOCHS, SEEDS = 96, 8, 5, range(3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def example() -> Any:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "detection" / "detector.py")))


@pytest.fixture(scope="module")
def root(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written: Path = example.write_scenes(tmp_path_factory.mktemp("scenes"))
    return written


def manifest(root: Path, split: str) -> Path:
    return root / "annotations" / f"instances_{split}2017.json"


def ours(example: Any, root: Path, split: str, *, trains: bool, **options: Any) -> DataLoader[Any]:
    dataset = Dataset(root / f"{split}2017", manifest=manifest(root, split))
    fields = ("image", "image.size", "image_id", "original_size", "boxes", "labels")
    return DataLoader(
        dataset.select(*fields),
        BATCH,
        as_dict=True,
        augment=example.recipe(SIZE, trains=trains),
        **options,
    )


def theirs(root: Path, split: str, *, trains: bool, **options: Any) -> TorchLoader[Any]:
    """Return torch's loader with torchvision's own dataset and operations."""
    datasets = pytest.importorskip("torchvision.datasets")
    tensors = pytest.importorskip("torchvision.tv_tensors")
    v2 = pytest.importorskip("torchvision.transforms.v2")
    with redirect_stdout(io.StringIO()):
        raw = datasets.CocoDetection(str(root / f"{split}2017"), str(manifest(root, split)))
    classes = torch.zeros(max(raw.coco.getCatIds()) + 1, dtype=torch.int64)
    classes[sorted(raw.coco.getCatIds())] = torch.arange(len(raw.coco.getCatIds()))
    sizes = (64, 96, 128) if trains else (SIZE,)

    def with_boxes(image: Any, target: dict[str, Any]) -> dict[str, Any]:
        # torchvision gives an image without objects neither boxes nor labels, and boxes of whole
        # numbers stay whole numbers in a resize.
        boxes = torch.as_tensor(target.get("boxes", torch.zeros(0, 4)), dtype=torch.float32)
        labels = target.get("labels", torch.zeros(0, dtype=torch.int64))
        where: Any = {"format": "XYXY", "canvas_size": image.size[::-1]}
        return {**target, "boxes": tensors.BoundingBoxes(boxes, **where), "labels": labels}

    def collate(samples: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
        size = sizes[int(torch.randint(len(sizes), ()))]  # of the whole batch
        transform = v2.Compose(
            [
                v2.Resize(None, max_size=size),
                v2.RandomHorizontalFlip(0.5 if trains else 0.0),
                v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
                v2.ClampBoundingBoxes(),
                v2.SanitizeBoundingBoxes(min_size=2),
            ]
        )
        changed = [transform(image, with_boxes(image, target)) for image, target in samples]
        shapes = torch.tensor([image.shape[1:] for image, _ in changed])
        height, width = (-(-shapes.amax(0) // 32) * 32).tolist()
        images = torch.zeros(len(samples), 3, height, width)
        for padded, (image, _) in zip(images, changed, strict=True):
            padded[:, : image.shape[1], : image.shape[2]] = image
        return {
            "image": images,
            "image.size": shapes,
            "image_id": torch.tensor([target["image_id"] for _, target in samples]),
            "original_size": torch.tensor([image.size[::-1] for image, _ in samples]),
            "boxes": [target["boxes"].as_subclass(torch.Tensor) for _, target in changed],
            "labels": [classes[target["labels"]] for _, target in changed],
            "valid": torch.ones(len(samples), dtype=torch.bool),
        }

    wrapped = datasets.wrap_dataset_for_transforms_v2(raw)
    return TorchLoader(wrapped, BATCH, collate_fn=collate, **options)


def coco_precision(root: Path, results: list[dict[str, Any]]) -> float:
    """Return the average precision at an overlap of 0.5, of COCO's own tool."""
    with redirect_stdout(io.StringIO()):
        truth = pytest.importorskip("pycocotools.coco").COCO(str(manifest(root, "val")))
        evaluation = pytest.importorskip("pycocotools.cocoeval").COCOeval(
            truth, truth.loadRes(results), "bbox"
        )
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[1])


def train(
    example: Any, batches: Iterable[Any], *, steps: int, seed: int, rate: float = 2e-3
) -> tuple[Any, list[float]]:
    """Return a model, and its loss at each step.

    batches: iterated once for each epoch. seed: of the model, and of torch's order and draws.
    """
    torch.manual_seed(seed)
    model, losses = example.Detector(3), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    while len(losses) < steps:
        for batch in batches:
            found = model(batch["image"], example.targets_of(batch))
            loss = found["loss_class"] + found["loss_box"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("split", ["train", "val"])
def test_batches_are_those_of_torchvision(example: Any, root: Path, split: str) -> None:
    others = theirs(root, split, trains=False)
    with ours(example, root, split, trains=False) as loader:
        for mine, other in zip(loader, others, strict=True):
            for name in ("image_id", "original_size", "image.size"):
                assert torch.equal(mine[name], other[name])
            # Of 255: Pillow rounds between its two passes over rows and columns.
            off = (mine["image"] - other["image"]) * torch.tensor(STD)[:, None, None] * 255
            assert off.abs().max() < 2.01
            assert off.mean().abs() < 0.1
            for name, atol in (("boxes", 1e-3), ("labels", 0)):
                for values, wanted in zip(mine[name], other[name], strict=True):
                    torch.testing.assert_close(values, wanted, atol=atol, rtol=0)


def test_the_same_order_gives_the_same_losses(example: Any, root: Path) -> None:
    options: Any = {"shuffle": True, "drop_last": True, "seed": 3}
    with ours(example, root, "train", trains=False, **options) as loader:
        batches: list[Any] = list(loader)
    order = [batch["image_id"].tolist() for batch in batches]  # image ids are positions
    other = theirs(root, "train", trains=False)
    same = TorchLoader(other.dataset, batch_sampler=order, collate_fn=other.collate_fn)
    # Differences of 1 of 255 grow with each step, and slower at a low rate.
    _, losses = train(example, batches, steps=len(order), seed=0, rate=4e-4)
    _, wanted = train(example, same, steps=len(order), seed=0, rate=4e-4)
    np.testing.assert_allclose(losses, wanted, rtol=0.08)
    assert losses[-1] < 0.7 * losses[0]


def precisions(example: Any, root: Path, model: Any) -> tuple[float, float]:
    """Return the precision of a model on the images of both loaders."""
    names = Dataset(root / "val2017", manifest=manifest(root, "val"))
    ids = names.schema["labels"].ids  # type: ignore[attr-defined]
    with ours(example, root, "val", trains=False, pad="mask") as loader:
        mine = coco_precision(root, example.detect(model, loader, ids))
    other = example.detect(model, theirs(root, "val", trains=False), ids)
    return mine, coco_precision(root, other)


def test_losses_and_precision_are_those_of_torchvision_over_several_seeds(
    example: Any, root: Path
) -> None:
    options: Any = {"shuffle": True, "drop_last": True}
    losses, reached = np.zeros((2, len(SEEDS), EPOCHS)), np.zeros((2, len(SEEDS)))
    for seed in SEEDS:
        with ours(example, root, "train", trains=True, seed=seed, **options) as loader:
            steps = EPOCHS * len(loader)
            model, found = train(example, loader, steps=steps, seed=seed)
        losses[0, seed] = np.reshape(found, (EPOCHS, -1)).mean(1)
        reached[0, seed], same = precisions(example, root, model)
        assert same == pytest.approx(reached[0, seed], abs=0.05)  # 0.02 is one object
        others = theirs(root, "train", trains=True, **options)
        model, found = train(example, others, steps=steps, seed=seed)
        losses[1, seed] = np.reshape(found, (EPOCHS, -1)).mean(1)
        reached[1, seed] = precisions(example, root, model)[1]
    last, precision = losses[:, :, -2:].mean((1, 2)), reached.mean(1)
    assert precision.min() > 0.3
    # Standard deviations between seeds are 6 % of the loss and 0.06 of the precision, so these are
    # three of those of a difference between two means of three seeds.
    assert last[0] == pytest.approx(last[1], rel=0.15)
    assert precision[0] == pytest.approx(precision[1], abs=0.15)
