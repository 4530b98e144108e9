"""An image folder with labels, cut from the photographs in scikit-image's and scikit-learn's
wheels.

Nothing is downloaded. The class of a crop is its photograph. Each photograph is split by a straight
cut: training crops come from one part, evaluation crops from the other, so that no pixel of an
evaluation crop is used in training. Crops are resampled to sizes that follow ImageNet's (mean about
400 by 350) and written as JPEG at several qualities; a few are progressive, a few are grey.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.cache import ConfigError, DatasetNotFoundError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from PIL import Image

PHOTOGRAPHS = {
    "astronaut": "skimage/data/astronaut.png",
    "brick": "skimage/data/brick.png",
    "camera": "skimage/data/camera.png",
    "cat": "skimage/data/chelsea.png",
    "coffee": "skimage/data/coffee.png",
    "coins": "skimage/data/coins.png",
    "flower": "sklearn/datasets/images/flower.jpg",
    "galaxies": "skimage/data/hubble_deep_field.jpg",
    "grass": "skimage/data/grass.png",
    "gravel": "skimage/data/gravel.png",
    "moon": "skimage/data/moon.png",
    "motorcycle": "skimage/data/motorcycle_left.png",
    "retina": "skimage/data/retina.jpg",
    "rocket": "skimage/data/rocket.jpg",
    "temple": "sklearn/datasets/images/china.jpg",
    "tissue": "skimage/data/ihc.png",
}
TRAIN_SHARE = 0.7  # of each photograph's longer side
QUALITIES = (75, 85, 90, 95)
PROGRESSIVE_SHARE = 0.05
GREY_SHARE = 0.05
# Levels of 255. Enlarged crops compress far better than photographs do; with this much sensor noise
# their bytes a pixel come near ImageNet's, and so does the work of decoding them.
GRAIN = 6.0
# The format of the folder; a change replaces folders of older demos.
VERSION = 1
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"}
)
EVAL_NAMES = ("eval", "val", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """Two image folders with labels, `<root>/<class>/*`, of the same classes.

    train_images, eval_images: numbers of files. image_bytes: their total bytes. origin: a
    description of the source of the pictures.
    """

    train: Path
    eval: Path
    classes: tuple[str, ...]
    train_images: int
    eval_images: int
    image_bytes: int
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _CropSet:
    """Crops of a part of one photograph; all choices follow from seed, split, class and number."""

    name: str
    split: Literal["train", "eval"]
    folder: Path
    count: int
    seed: int


def make_photographs(
    out: Path,
    *,
    train_images: int = 3072,
    eval_images: int = 480,
    seed: int = 7,
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> ImageSet:
    """Cut the shipped photographs into `out/train` and `out/eval`; the bytes depend only on the
    arguments.

    A complete folder of an earlier call with the same numbers is reused; an incomplete one is
    replaced. progress: called with (files written, files in all). Raises MissingDependencyError if
    a wheel isn't installed, ConfigError for fewer images than classes.
    """
    if min(train_images, eval_images) < len(PHOTOGRAPHS):
        raise ConfigError(
            f"train_images and eval_images: got {train_images} and {eval_images}, wanted at least "
            f"one a photograph ({len(PHOTOGRAPHS)})."
        )
    settings = {"version": VERSION, "seed": seed, "train": train_images, "eval": eval_images}
    record = out / "made.json"
    if record.exists() and json.loads(record.read_text())["settings"] == settings:
        return _read_record(record)
    for split in ("train", "eval"):
        shutil.rmtree(out / split, ignore_errors=True)
    sets = _crop_sets(out, {"train": train_images, "eval": eval_images}, seed)
    done = written_bytes = 0
    for crops, size_bytes in zip(sets, _write_all(sets, workers), strict=True):
        done += crops.count
        written_bytes += size_bytes
        if progress is not None:
            progress(done, train_images + eval_images)
    made = ImageSet(
        train=out / "train",
        eval=out / "eval",
        classes=tuple(sorted(PHOTOGRAPHS)),
        train_images=train_images,
        eval_images=eval_images,
        image_bytes=written_bytes,
        origin=f"crops of {len(PHOTOGRAPHS)} photographs that scikit-image and scikit-learn ship, "
        "with grain added",
    )
    _write_record(record, settings, made)
    return made


def _crop_sets(out: Path, images: dict[Literal["train", "eval"], int], seed: int) -> list[_CropSet]:
    names = sorted(PHOTOGRAPHS)
    return [
        _CropSet(
            name=name,
            split=split,
            folder=out / split / name,
            count=total // len(names) + (number < total % len(names)),
            seed=seed,
        )
        for split, total in images.items()
        for number, name in enumerate(names)
    ]


def _write_all(sets: list[_CropSet], workers: int) -> Iterator[int]:
    """Write the sets, and yield the bytes of each in order."""
    if workers < 2:
        yield from map(_write_crops, sets)
        return
    # Processes: Pillow's JPEG encoder keeps the GIL, and two threads took longer than one. Spawned,
    # since the caller may have threads by now.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(_write_crops, sets)


def _write_crops(crops: _CropSet) -> int:
    """Write one set of crops; return its bytes."""
    grain = noise(crops.seed)
    train, test = _split(open_photograph(PHOTOGRAPHS[crops.name]))
    region = train if crops.split == "train" else test
    crops.folder.mkdir(parents=True)
    key = (crops.seed, int(crops.split == "eval"), sorted(PHOTOGRAPHS).index(crops.name))
    return sum(
        _write(region, grain, crops.folder / f"{i:04d}.jpg", np.random.default_rng((*key, i)))
        for i in range(crops.count)
    )


def open_photograph(path: str) -> Image.Image:
    """Open a shipped photograph, RGB or grey, from its file, without importing the package."""
    from PIL import Image

    package, _, inside = path.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            f"The photographs of `{package}` aren't installed. Run `pip install 'penstock[demo]'`."
        )
    with Image.open(Path(spec.origin).parent / inside) as image:
        image.load()
        return image.copy()


def _split(image: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Return the training and the evaluation part as images of their own, so that resampling stays
    within a part."""
    width, height = image.size
    if width >= height:
        edge = round(width * TRAIN_SHARE)
        return image.crop((0, 0, edge, height)), image.crop((edge, 0, width, height))
    edge = round(height * TRAIN_SHARE)
    return image.crop((0, 0, width, edge)), image.crop((0, edge, width, height))


def _write(region: Image.Image, grain: Image.Image, path: Path, rng: np.random.Generator) -> int:
    """Write one crop of the region; return its bytes."""
    from PIL import Image

    width = int(np.clip(rng.normal(400, 75), 200, 500))
    height = int(np.clip(rng.normal(350, 75), 200, 500))
    most = min(region.width / width, region.height / height)  # source pixels a crop's pixel
    scale = rng.uniform(0.6 * most, most)
    box_width, box_height = scale * width, scale * height
    left = rng.uniform(0, region.width - box_width)
    top = rng.uniform(0, region.height - box_height)
    crop = region.resize(
        (width, height),
        Image.Resampling.BILINEAR,
        box=(left, top, left + box_width, top + box_height),
    )
    crop = add_grain(crop.convert("RGB"), grain, rng)
    if rng.random() < GREY_SHARE:
        crop = crop.convert("L")
    encoded = io.BytesIO()
    crop.save(
        encoded,
        "JPEG",
        quality=int(rng.choice(QUALITIES)),
        progressive=bool(rng.random() < PROGRESSIVE_SHARE),
    )
    path.write_bytes(encoded.getbuffer())
    return encoded.tell()


@functools.lru_cache(maxsize=1)
def noise(seed: int) -> Image.Image:
    """Return grain from which windows are taken; 128 means no grain. Cached, as all
    parts need it."""
    from PIL import Image

    noise = np.random.default_rng(seed).standard_normal((1024, 1024, 3), np.float32)
    return Image.fromarray((128 + GRAIN * noise).round().clip(0, 255).astype(np.uint8))


def add_grain(image: Image.Image, grain: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Add a random window of the grain; 128 in the grain means no change."""
    from PIL import ImageChops

    top = int(rng.integers(0, grain.height - image.height))
    left = int(rng.integers(0, grain.width - image.width))
    window = grain.crop((left, top, left + image.width, top + image.height))
    return ImageChops.add(image, window, offset=-128)


def borrow_images(
    folder: Path, out: Path, *, most_images: int = 4000, eval_share: float = 0.15, seed: int = 7
) -> ImageSet:
    """Make an ImageSet of symbolic links to the user's own image folder under `out`, without
    copies.

    folder: `<class>/*`, or `train/<class>/*` next to `val/<class>/*` (or eval, validation, test).
    Without such a pair, an eval_share of the files, drawn by the seed, is held out. At most
    most_images files are linked, to keep the demo short. Raises DatasetNotFoundError if there are
    fewer than two classes.
    """
    folder = folder.expanduser().resolve()
    held_out = next((folder / name for name in EVAL_NAMES if (folder / name).is_dir()), None)
    rng = np.random.default_rng(seed)
    if held_out is not None and (folder / "train").is_dir():
        train, test = _listing(folder / "train"), _listing(held_out)
    else:
        files = _listing(folder)
        rng.shuffle(files)
        test = files[: round(len(files) * eval_share)]
        train = files[len(test) :]
    classes = sorted({path.parent.name for path in train})
    if len(classes) < 2 or not test:
        raise DatasetNotFoundError(
            f"{folder}: found {len(train)} training images in {len(classes)} class folders, wanted "
            "images of two classes at least, as <folder>/<class>/*.jpg. Point DATA= at such a "
            "folder."
        )
    shutil.rmtree(out, ignore_errors=True)
    test = [path for path in test if path.parent.name in set(classes)]
    kept = {
        "train": _some(train, round(most_images * (1 - eval_share)), rng),
        "eval": _some(test, round(most_images * eval_share), rng),
    }
    for split, files in kept.items():
        for name in classes:
            (out / split / name).mkdir(parents=True)
        for path in files:
            (out / split / path.parent.name / path.name).symlink_to(path)
    return ImageSet(
        train=out / "train",
        eval=out / "eval",
        classes=tuple(classes),
        train_images=len(kept["train"]),
        eval_images=len(kept["eval"]),
        image_bytes=sum(path.stat().st_size for files in kept.values() for path in files),
        origin=str(folder),
    )


def _listing(folder: Path) -> list[Path]:
    """Return the images of `<folder>/<class>/`, sorted, without dot files and folders."""
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.startswith((".", "_")):
            found += sorted(
                path
                for path in Path(entry.path).iterdir()
                if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
            )
    return found


def _some(files: list[Path], most: int, rng: np.random.Generator) -> list[Path]:
    if len(files) <= most:
        return files
    return [files[i] for i in sorted(rng.choice(len(files), most, replace=False))]


def _write_record(record: Path, settings: dict[str, int], made: ImageSet) -> None:
    report = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(made).items()}
    partial = record.with_suffix(".part")
    partial.write_text(json.dumps({"settings": settings, "made": report}, indent=1))
    partial.rename(record)


def _read_record(record: Path) -> ImageSet:
    report: dict[str, Any] = json.loads(record.read_text())["made"]
    folders = {"train": record.parent / "train", "eval": record.parent / "eval"}
    return ImageSet(**(report | folders | {"classes": tuple(report["classes"])}))
