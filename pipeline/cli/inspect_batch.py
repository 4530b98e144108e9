"""`penstock inspect --batch`: one batch, exactly as a model would get it, for people to look at."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from penstock.cache.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.augment import Normalize, Operation
    from penstock.pipeline.cli.options import Recipe
    from penstock.readers import Dataset

MOST_SAMPLES = 1024
_SHEET_PIXELS = 1800  # about the width of a screen
_LARGEST_CELL = 256
_SQUARE = 224
_CAPTION_PIXELS = 16
_GAP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensor:
    """One tensor of the batch that is shown."""

    name: str
    shape: list[int]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChannel:
    """Values of one channel over the whole batch, as the model gets them."""

    min: float
    max: float
    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSample:
    """Which sample stands where in the batch. label: None without labels; name: of the file."""

    id: int
    name: str
    label: int | None
    class_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What a batch holds."""

    seed: int
    epoch: int
    augment: str
    tensors: list[BatchTensor]
    channels: list[BatchChannel]
    samples: list[BatchSample]


def operations(recipe: Recipe) -> tuple[Operation, ...] | None:
    """The operations that a name stands for."""
    from penstock.augment import imagenet_eval, imagenet_train

    known = {"imagenet": imagenet_train(), "imagenet-eval": imagenet_eval(), "none": None}
    return known[recipe]


def open_with_ids(
    url: str,
    *,
    format: str,
    index: str | None,
    cache: Path | None,
    options: dict[str, Any] | None,
) -> Dataset:
    """The dataset with all its fields, and "id"."""
    from penstock.readers import Dataset

    with Dataset(url, format=format, index=index, cache=cache, storage_options=options) as found:
        fields = (*found.fields, "id")
    return Dataset(
        url, format=format, fields=fields, index=index, cache=cache, storage_options=options
    )


def look(
    dataset: Dataset, *, size: int, recipe: Recipe, seed: int, epoch: int
) -> tuple[BatchReport, NDArray[np.uint8]]:
    """The first batch of an epoch, and its images for the eye: uint8, (n, h, w, 3 or 1).

    dataset: with "id" among its fields. Shuffled where the recipe is one for training. Raises what
    the loader raises, ConfigError for a dataset without images or a size out of range.
    """
    from penstock.augment import Decode, Normalize, Resize
    from penstock.pipeline.loader import DataLoader
    from penstock.pipeline.plan.world import World

    if not 1 <= size <= MOST_SAMPLES:
        raise ConfigError(f"--batch: got {size}, wanted 1 to {MOST_SAMPLES}.")
    if "image" not in dataset.fields:
        raise ConfigError("--batch shows images, and this dataset has none: leave it out.")
    ops = operations(recipe)
    shown: str = recipe
    if ops is None and dataset.index.images["image"].fixed is None:
        # Images of different sizes make no tensor: the whole of each, squeezed, is what fits.
        ops = (Decode(), Resize((_SQUARE, _SQUARE)))
        shown = f"none, all resized to {_SQUARE} x {_SQUARE} since their sizes differ"
    with DataLoader(
        dataset,
        batch_size=min(size, len(dataset)),
        shuffle=recipe == "imagenet",
        seed=seed,
        augment=ops,
        world=World(0, 1),
    ) as loader:
        loader.set_epoch(epoch)
        batch = dict(zip(dataset.fields, next(iter(loader)), strict=True))
    images: NDArray[Any] = batch["image"].numpy()
    report = BatchReport(
        seed=seed,
        epoch=epoch,
        augment=shown,
        tensors=[
            BatchTensor(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype).split(".")[-1])
            for name, tensor in batch.items()
        ],
        channels=channels(images),
        samples=_samples(dataset, batch),
    )
    normalize = next((op for op in ops or () if isinstance(op, Normalize)), None)
    return report, pictures(images, normalize)


def channels(images: NDArray[Any]) -> list[BatchChannel]:
    """Value ranges of images of shape (n, c, h, w), a channel at a time."""
    return [
        BatchChannel(
            min=float(values.min()),
            max=float(values.max()),
            mean=float(values.mean(dtype=np.float64)),
            std=float(values.std(dtype=np.float64)),
        )
        for values in images.swapaxes(0, 1)
    ]


def pictures(images: NDArray[Any], normalize: Normalize | None) -> NDArray[np.uint8]:
    """Images (n, c, h, w) for the eye: uint8, (n, h, w, c); what Normalize did is undone."""
    values = images.transpose(0, 2, 3, 1).astype(np.float32)
    if normalize is not None:
        mean, std = (np.asarray(each, np.float32) for each in (normalize.mean, normalize.std))
        values = (values * std + mean) * 255
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def contact_sheet(images: NDArray[np.uint8], captions: Sequence[str]) -> Any:
    """A Pillow image with all images in rows, each above its caption. Smaller where they are many.

    Raises MissingDependencyError without Pillow.
    """
    image, draw, font = _pillow()
    count, height, width = images.shape[:3]
    columns = math.ceil(math.sqrt(count * height / width))
    room = max(48, _SHEET_PIXELS // columns - _GAP)
    scale = min(1.0, room / width, _LARGEST_CELL / max(height, width))
    if max(height, width) < 64:
        scale = 64 / max(height, width)
    cell = max(1, round(width * scale)), max(1, round(height * scale))
    step_x, step_y = cell[0] + _GAP, cell[1] + _CAPTION_PIXELS + _GAP
    rows = math.ceil(count / columns)
    sheet = image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    pen = draw.Draw(sheet)
    letters = font.load_default(11)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        x = _GAP + number % columns * step_x
        y = _GAP + number // columns * step_y
        picture = image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        sheet.paste(picture.convert("RGB").resize(cell), (x, y))
        while caption and pen.textlength(caption, font=letters) > cell[0]:
            caption = caption[:-1]
        pen.text((x, y + cell[1] + 1), caption, fill="black", font=letters)
    return sheet


def show(
    url: str,
    report: BatchReport,
    images: NDArray[np.uint8],
    *,
    out: Path | None,
    as_json: bool,
) -> None:
    """Write the contact sheet where wanted, and tell the rest."""
    if out is not None:
        try:
            contact_sheet(images, [_caption(sample) for sample in report.samples]).save(out)
        except ValueError as error:
            raise ConfigError(f"--out: {error}. Use a name that ends in .png or .jpg.") from None
    if as_json:
        typer.echo(json.dumps({**asdict(report), "out": None if out is None else str(out)}))
        return
    console = Console()
    console.print(
        f"First batch of epoch {report.epoch}, seed {report.seed}, augment {report.augment}, of",
        url,
        markup=False,
        soft_wrap=True,
    )
    console.print(_tensors(report), _channels(report), _listed(report), sep="\n")
    if out is not None:
        console.print("Contact sheet, normalisation undone:", str(out), markup=False)


def _tensors(report: BatchReport) -> Table:
    table = Table("tensor", "shape", "dtype", box=None, pad_edge=False)
    for tensor in report.tensors:
        table.add_row(tensor.name, " x ".join(map(str, tensor.shape)), tensor.dtype)
    return table


def _channels(report: BatchReport) -> Table:
    table = Table("channel", "min", "max", "mean", "std", box=None, pad_edge=False)
    for number, channel in enumerate(report.channels):
        values = (channel.min, channel.max, channel.mean, channel.std)
        table.add_row(str(number), *(f"{value:.4g}" for value in values))
    return table


def _listed(report: BatchReport) -> Table:
    table = Table("id", "label", "class", "file", box=None, pad_edge=False)
    for sample in report.samples:
        label = "-" if sample.label is None else str(sample.label)
        name = sample.name.encode(errors="replace").decode().replace("[", r"\[")
        table.add_row(str(sample.id), label, sample.class_name or "-", name)
    return table


def _samples(dataset: Dataset, batch: dict[str, Any]) -> list[BatchSample]:
    ids = batch["id"].tolist()
    labels = batch["label"].tolist() if "label" in batch else [None] * len(ids)
    classes = dataset.classes
    return [
        BatchSample(
            id=number,
            name=name,
            label=label,
            class_name=None if label is None or not 0 <= label < len(classes) else classes[label],
        )
        for number, name, label in zip(ids, dataset.names(ids), labels, strict=True)
    ]


def _caption(sample: BatchSample) -> str:
    label = sample.class_name if sample.class_name is not None else sample.label
    return f"{sample.id}" if label is None else f"{sample.id} {label}"


def _pillow() -> tuple[Any, Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise MissingDependencyError(
            "The contact sheet needs Pillow: pip install pillow, or leave --out out."
        ) from None
    return Image, ImageDraw, ImageFont
