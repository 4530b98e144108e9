"""`python -m benchmarks.detection`: photographs with objects, beside albumentations.

Two loaders deliver the same images at 640 x 640, uint8, with their boxes, and, in a second case,
their instance masks: LongestSide(640), a flip and padding. The other one is torch's loader with
OpenCV, albumentations and, for masks, pycocotools, in as many workers as there are cores, and a
third time without workers, which need CPU-seconds to send batches; its annotations are parsed
before it starts. They take turns, one epoch each; ratios are of neighbours. CPU-seconds are of all
processes. Every page of the masks is read. Writes benchmarks/results/detection.json.

The set: `IMAGES` photographs of 480 to 1,024 pixels, and 7 objects an image on average with
polygons of about 22 points and COCO's shares of small, medium and large ones; one in 100 has
run-length codes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from benchmarks.photographs import PHOTOGRAPHS, add_grain, noise, open_photograph
from benchmarks.record import RESULTS, write_result
from benchmarks.versus_child import cpu_s
from penstock.cache.base import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

SIDE = 640
IMAGES = 240
BATCH = 16
SEED = 7
CASES = ("boxes", "masks")
_OBJECTS = 7.3  # of COCO's training images, on average
_SMALL, _MEDIUM = 0.41, 0.75  # COCO's shares of objects below 32 x 32 and 96 x 96 pixels
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch of one loader. cpu_s_per_1000: CPU-seconds a 1,000 images."""

    images_per_s: float
    cpu_s_per_1000: float


def make_set(out: Path, *, images: int) -> Path:
    """Write photographs and COCO annotations of drawn objects; an earlier call's are kept. Returns
    the file of annotations, next to the folder `images`."""
    from PIL import Image

    folder = out / f"detection-{images}"
    annotations = folder / "annotations.json"
    if annotations.exists():
        return annotations
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rng, grain = np.random.default_rng(SEED), noise(SEED)
    sources = [open_photograph(path).convert("RGB") for _, path in sorted(PHOTOGRAPHS.items())]
    listed: list[Any] = []
    objects: list[Any] = []
    for number in range(images):
        long = int(rng.integers(480, 1024))
        short = round(long * float(rng.choice([9 / 16, 2 / 3, 3 / 4, 1.0], p=[0.1, 0.2, 0.6, 0.1])))
        width, height = (long, short) if rng.random() < 0.75 else (short, long)
        source = sources[number % len(sources)]
        most = min(source.width / width, source.height / height)
        box = (0, 0, most * width, most * height)
        picture = source.resize((width, height), Image.Resampling.BICUBIC, box=box)
        name = f"{number:05d}.jpg"
        add_grain(picture, grain, rng).save(folder / "images" / name, "JPEG", quality=90)
        listed.append({"id": number, "file_name": name, "width": width, "height": height})
        for _ in range(max(1, rng.poisson(_OBJECTS))):
            shape = _blob(rng, width, height)
            points = np.array(shape).reshape(-1, 2)
            (x, y), (w, h) = points.min(axis=0), np.ptp(points, axis=0)
            is_crowd = rng.random() < 0.01
            segmentation: Any = _runs(shape, height, width) if is_crowd else [shape]
            objects.append(
                {
                    "id": len(objects),
                    "image_id": number,
                    "category_id": int(rng.integers(1, 81)),
                    "bbox": [float(each) for each in (x, y, w, h)],
                    "area": float(w * h),
                    "iscrowd": int(is_crowd),
                    "segmentation": segmentation,
                }
            )
    categories = [{"id": i, "name": f"class {i}"} for i in range(1, 81)]
    content = {"images": listed, "annotations": objects, "categories": categories}
    annotations.write_text(json.dumps(content))
    return annotations


def _blob(rng: np.random.Generator, width: int, height: int) -> list[float]:
    """Return a polygon of any form inside an image, with two decimals."""
    share = rng.random()
    low, high = (8, 32) if share < _SMALL else (32, 96) if share < _MEDIUM else (96, 400)
    radius = rng.uniform(low, high) / 2
    count = int(np.clip(rng.normal(22, 12), 6, 80))
    angles = np.sort(rng.uniform(0, 2 * np.pi, count))
    waves = 0.3 * np.sin(angles * rng.integers(2, 5) + rng.uniform(0, 6))
    radii = radius * (1 + waves + rng.normal(0, 0.05, count))
    x = np.clip(rng.uniform(10, width - 10) + radii * np.cos(angles), 0, width)
    y = np.clip(rng.uniform(10, height - 10) + radii * np.sin(angles), 0, height)
    points: list[float] = np.stack([x, y], axis=1).reshape(-1).round(2).tolist()
    return points


def _runs(polygon: list[float], height: int, width: int) -> dict[str, Any]:
    """Return the mask of a polygon as run-length codes."""
    from penstock.readers.fieldtypes import Segmentations

    bits = np.zeros((1, height, width), np.uint8)
    rows, columns = np.arange(height), np.arange(width)
    Segmentations.of([[polygon]]).draw((height, width), rows, columns, bits)
    flat = bits[0].T.reshape(-1)
    bounds = np.flatnonzero(np.diff(flat, prepend=np.uint8(0), append=flat[-1:]))
    return {
        "size": [height, width],
        "counts": np.diff(bounds, prepend=0, append=len(flat)).tolist(),
    }


class Annotated:
    """A torch dataset that does what people write for a detector with albumentations."""

    def __init__(self, annotations: Path, *, case: str) -> None:
        import albumentations
        import cv2

        content = json.loads(annotations.read_text())
        self._folder, self._has_masks = annotations.parent / "images", case == "masks"
        self._images = content["images"]
        self._objects: list[list[Any]] = [[] for _ in self._images]
        for each in content["annotations"]:
            self._objects[each["image_id"]].append(each)
        self._transform = albumentations.Compose(
            [
                albumentations.LongestMaxSize(SIDE),
                albumentations.HorizontalFlip(p=0.5),
                albumentations.PadIfNeeded(
                    SIDE, SIDE, position="top_left", border_mode=cv2.BORDER_CONSTANT
                ),
            ],
            bbox_params=albumentations.BboxParams("coco", label_fields=["labels"]),
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> Any:
        import cv2
        import torch

        cv2.setNumThreads(1)  # the workers use all cores
        image, objects = self._images[number], self._objects[number]
        pixels = cv2.imread(str(self._folder / image["file_name"]))
        given: dict[str, Any] = {
            "image": cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB),
            "bboxes": np.array([each["bbox"] for each in objects], np.float32),
            "labels": np.array([each["category_id"] for each in objects]),
        }
        if self._has_masks:
            given["masks"] = np.stack([_decoded(each, image) for each in objects])
        found = self._transform(**given)
        values = [np.ascontiguousarray(found["image"].transpose(2, 0, 1)), found["bboxes"]]
        values += [found["labels"], *([found["masks"]] if self._has_masks else [])]
        return [torch.from_numpy(np.asarray(each)) for each in values]


def _decoded(annotation: dict[str, Any], image: dict[str, Any]) -> Any:
    """Return the mask of an annotation, as pycocotools' COCO.annToMask does."""
    from pycocotools import mask as tool

    shape, size = annotation["segmentation"], (image["height"], image["width"])
    codes = tool.frPyObjects(shape, *size)
    return tool.decode(tool.merge(codes) if isinstance(shape, list) else codes)


def _collated(samples: list[Any]) -> Any:
    import torch

    images, *others = zip(*samples, strict=True)
    return [torch.stack(images), *map(list, others)]


def albumentations_loader(annotations: Path, *, case: str, workers: int) -> Any:
    """Return torch's loader of the images."""
    from torch.utils.data import DataLoader

    return DataLoader(
        Annotated(annotations, case=case),  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        collate_fn=_collated,
        persistent_workers=workers > 0,
        multiprocessing_context="forkserver" if workers else None,
    )


def penstock_loader(annotations: Path, *, case: str) -> Any:
    """Return our loader of the images."""
    from penstock import DataLoader, Dataset, LongestSide, Pad, RandomHorizontalFlip

    fields = ("image", "boxes", "labels", *(("masks",) if case == "masks" else ()))
    images = annotations.parent / "images"
    dataset = Dataset(images, manifest=annotations, format="coco", fields=fields)
    augment = [LongestSide(SIDE), RandomHorizontalFlip(), Pad(to=(SIDE, SIDE))]
    options: Any = {"batch_size": BATCH, "shuffle": True, "drop_last": True, "seed": SEED}
    return DataLoader(dataset, augment=augment, **options)


def pages(masks: Iterable[torch.Tensor]) -> int:
    """Read a byte of every page of the masks."""
    return sum(int(each.reshape(-1)[::_PAGE_BYTES].sum()) for each in masks)


def _epochs(loader: Any) -> Iterator[Epoch]:
    """Yield the measurements of epochs; the first one isn't measured."""
    while True:
        began, cpu, images = time.perf_counter(), cpu_s(os.getpid()), 0
        for batch in loader:
            assert tuple(batch[0].shape[1:]) == (3, SIDE, SIDE), batch[0].shape
            assert str(batch[0].dtype) == "torch.uint8"
            images += len(batch[0])
            if len(batch) > 3:
                pages(batch[3])
        elapsed_s, used_s = time.perf_counter() - began, cpu_s(os.getpid()) - cpu
        yield Epoch(images_per_s=images / elapsed_s, cpu_s_per_1000=1000 * used_s / images)


def measure(
    work: Path, *, images: int = IMAGES, rounds: int = 7, results: Path = RESULTS, console: Console
) -> Path:
    """Play both loaders in both cases, print a line for each and write the result. Returns its
    path."""
    import torch

    torch.set_num_threads(1)  # its threads would spin beside a loader without workers
    annotations, workers = make_set(work, images=images), usable_cores()
    cases: dict[str, Any] = {}
    for case in CASES:
        loaders = {"penstock": penstock_loader(annotations, case=case)}
        for name, count in (("albumentations", workers), ("without workers", 0)):
            loaders[name] = albumentations_loader(annotations, case=case, workers=count)
        plays = {name: _epochs(loader) for name, loader in loaders.items()}
        found: dict[str, list[Epoch]] = {name: [] for name in plays}
        for number in range(rounds + 1):
            for name, play in plays.items():
                each = next(play)
                found[name] += [each] if number else []
        loaders["penstock"].close()
        triples = list(zip(*found.values(), strict=True))
        speed = statistics.median(a.images_per_s / b.images_per_s for a, b, _ in triples)
        cpu, least = (
            statistics.median(each[k].cpu_s_per_1000 / each[0].cpu_s_per_1000 for each in triples)
            for k in (1, 2)
        )
        cases[case] = {
            "speed_ratio": speed,
            "cpu_ratio": cpu,
            "cpu_ratio_without_workers": least,
            "epochs": {name: [asdict(each) for each in epochs] for name, epochs in found.items()},
        }
        console.print(
            f"{case}: {speed:.2f} x albumentations by images/s, {cpu:.2f} by CPU-seconds, "
            f"{least:.2f} without its workers"
        )
        for name, epochs in found.items():
            fast = statistics.median(each.images_per_s for each in epochs)
            used = statistics.median(each.cpu_s_per_1000 for each in epochs)
            console.print(f"  {name}: {fast:.0f} images/s, {used:.2f} CPU-s a 1,000 images")
    measured = {"images": images, "side": SIDE, "batch": BATCH, "workers": workers, "cases": cases}
    distributions = ("albumentations", "opencv-python-headless", "pycocotools")
    return write_result("detection", measured, folder=results, distributions=distributions)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("demo"), help="folder for the images")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    path = measure(given.work, images=given.images, rounds=given.rounds, console=Console())
    print(f"written: {path}")


if __name__ == "__main__":
    main()
