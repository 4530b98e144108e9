"""Load one batch, exactly as a model receives it, and report its fields, values and samples.

This is `penstock inspect --batch`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cache import ConfigError
from penstock.pipeline.cli.contact_sheet import Picture, contact_sheet
from penstock.readers.fields import (
    PRESENT,
    Boxes,
    ClassLabel,
    Keypoints,
    Mask,
    deliverable_fields,
    image_fields,
    number_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.augment import Normalize, Operation
    from penstock.pipeline.cli.command_options import Recipe
    from penstock.readers import Dataset
    from penstock.readers.fields import Schema

_TEXT_CHARACTERS = 60
_NUMBERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchField:
    """One field of the reported batch.

    shape: of the tensor; for ragged values the batch size and the lengths of a sample, None for
    those that differ. dtype: "str" or "bytes" if the values aren't numbers. present: number of
    samples that have the field.
    """

    name: str
    type: str
    shape: list[int | None]
    dtype: str
    present: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """The range of a field's values, or of one image channel's, over the whole batch."""

    name: str
    min: float
    max: float
    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSample:
    """One sample of the batch, in its order. values: of its other fields, for people."""

    id: int
    name: str
    values: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The contents of a batch."""

    seed: int
    epoch: int
    augment: str
    fields: list[BatchField]
    values: list[ValueRange]
    samples: list[BatchSample]


def batch_fields(batch: Mapping[str, Any], schema: Schema) -> list[BatchField]:
    """Describe the fields of a batch of tensors, Ragged values and lists."""
    return [
        _field(name, column, batch.get(name + PRESENT), schema)
        for name, column in batch.items()
        if not name.endswith(PRESENT)
    ]


def _field(name: str, column: Any, present: Any, schema: Schema) -> BatchField:
    kind = type(schema[name]).__name__ if name in schema else "Value"
    shape: list[int | None]
    if hasattr(column, "shape"):
        shape, dtype = list(map(int, column.shape)), column.dtype
    elif isinstance(column, list):
        shape, dtype = [len(column)], type(column[0]).__name__ if column else "-"
    else:
        shape = [len(column), *_lengths([each.shape for each in column])]
        dtype = column.values.dtype
    return BatchField(
        name=name,
        type=kind,
        shape=shape,
        dtype=str(dtype).split(".")[-1],
        present=len(column) if present is None else int(present.sum()),
    )


def _lengths(shapes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Return the lengths that all samples share, and None for the others."""
    return [
        one.pop() if len(one := set(lengths)) == 1 else None
        for lengths in zip(*shapes, strict=False)
    ]


def value_ranges(
    batch: Mapping[str, Any], image_fields: Sequence[str], *, number: str
) -> list[ValueRange]:
    """Compute the ranges of all numeric fields, and of each channel of images.

    number: the name of the field of sample ids, which is left out.
    """
    ranges: list[ValueRange] = []
    for name, column in batch.items():
        if name == number or name.endswith(PRESENT) or isinstance(column, list):
            continue
        values = (column if hasattr(column, "shape") else column.values).cpu().numpy()
        if name in image_fields:
            ranges += [
                _range(f"{name} {channel}", values[:, channel])
                for channel in range(values.shape[1])
            ]
        elif values.size:
            ranges.append(_range(name, values))
    return ranges


def _range(name: str, values: NDArray[Any]) -> ValueRange:
    return ValueRange(
        name=name,
        min=float(values.min()),
        max=float(values.max()),
        mean=float(values.mean(dtype=np.float64)),
        std=float(values.std(dtype=np.float64)),
    )


def batch_samples(
    batch: Mapping[str, Any], names: Sequence[str], schema: Schema, shown: Sequence[str]
) -> list[BatchSample]:
    """Describe the samples of a batch. names: of the samples; shown: the fields to include."""
    ids = batch[number_name(schema)].tolist()
    return [
        BatchSample(
            id=int(number),
            name=name,
            values={field: _value(batch, schema, field, row) for field in shown},
        )
        for row, (number, name) in enumerate(zip(ids, names, strict=True))
    ]


def _value(batch: Mapping[str, Any], schema: Schema, field: str, row: int) -> str:
    """Format one value: a class by name, text and few numbers shortened, otherwise its shape."""
    present = batch.get(field + PRESENT)
    if present is not None and not present[row]:
        return "-"
    value, type = batch[field][row], schema.get(field)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, str):
        line = " ".join(value.split())
        return line if len(line) <= _TEXT_CHARACTERS else line[: _TEXT_CHARACTERS - 1] + "…"
    if isinstance(type, ClassLabel) and not value.dim():
        number = int(value)
        return type.names[number] if 0 <= number < len(type.names) else str(number)
    if value.numel() <= _NUMBERS and value.dim() <= 1:
        return " ".join(f"{each:.4g}" for each in value.reshape(-1).tolist()) or "empty"
    return " x ".join(map(str, value.shape))


MOST_SAMPLES = 1024
_SQUARE = 224


def operations(recipe: Recipe) -> tuple[Operation, ...] | None:
    """Return the operations of a named recipe."""
    from penstock.augment import imagenet_eval, imagenet_train

    known = {"imagenet": imagenet_train(), "imagenet-eval": imagenet_eval(), "none": None}
    return known[recipe]


def open_with_all_fields(url: str, **options: Any) -> Dataset:
    """Open a dataset with all fields, their presence flags and the sample id.

    options: arguments of `Dataset`.
    """
    from penstock.readers import Dataset

    options["allow_left_out"] = 1  # inspection must not fail because of bad samples
    with Dataset(url, **options) as found:
        schema, lacking = found.schema, found.index.lacking
    shown = deliverable_fields(schema)
    fields = [*shown, *(name + PRESENT for name in shown if lacking.get(name))]
    return Dataset(url, **options).select(*fields, number_name(schema))


def load_batch(
    dataset: Dataset, *, size: int, recipe: Recipe, seed: int, epoch: int
) -> tuple[BatchReport, list[Picture]]:
    """Load the first batch of an epoch; return its report and its images as pictures.

    dataset: must have the sample id among its fields. The order is shuffled if the recipe is for
    training. Raises what the loader raises, and ConfigError for a size out of range.
    """
    from penstock.augment import Normalize
    from penstock.pipeline.loader import DataLoader
    from penstock.pipeline.plan import World

    if not 1 <= size <= MOST_SAMPLES:
        raise ConfigError(f"--batch: got {size}, wanted 1 to {MOST_SAMPLES}.")
    schema = dataset.schema
    images = list(image_fields(schema, dataset.fields))
    ops, words = _recipe_for(dataset, images, recipe)
    with DataLoader(
        dataset,
        batch_size=min(size, len(dataset)),
        shuffle=recipe == "imagenet",
        seed=seed,
        augment=ops,
        world=World(0, 1),
        as_dict=True,
    ) as loader:
        loader.set_epoch(epoch)
        batch: dict[str, Any] = next(iter(loader))
    number = number_name(schema)
    names = dataset.names(batch[number].tolist())
    shown = [n for n in batch if n not in (*images, number) and not n.endswith(PRESENT)]
    report = BatchReport(
        seed=seed,
        epoch=epoch,
        augment=words,
        fields=batch_fields(batch, schema),
        values=value_ranges(batch, images, number=number),
        samples=batch_samples(batch, names, schema, shown),
    )
    normalize = next((op for op in ops or () if isinstance(op, Normalize)), None)
    drawn = [p for name in images for p in _pictures(batch, name, schema, report, normalize)]
    return report, drawn


def _recipe_for(
    dataset: Dataset, images: list[str], recipe: Recipe
) -> tuple[tuple[Operation, ...] | None, str]:
    """Return a recipe that gives the images of a batch one shape, and its description.

    Without a recipe, images of different sizes are resized as a whole to a square.
    """
    from penstock.augment import Decode, Resize

    if not images:
        return None, "none"
    ops = operations(recipe)
    if ops is not None or all(dataset.index.images[name].fixed for name in images):
        return ops, recipe
    words = f"none, all resized to {_SQUARE} x {_SQUARE} since their sizes differ"
    return (Decode(), Resize((_SQUARE, _SQUARE))), words


def _pictures(
    batch: Mapping[str, Any],
    name: str,
    schema: Schema,
    report: BatchReport,
    normalize: Normalize | None,
) -> list[Picture]:
    """Return the pictures of one image field, with their masks, boxes and points."""
    several = len(image_fields(schema, batch)) > 1

    def followers(kind: type[Any]) -> list[Any]:
        of = [each for each in batch if isinstance(schema.get(each), kind)]
        return [batch[each] for each in of if getattr(schema[each], "of", None) == name]

    masks, boxes, points = map(followers, (Mask, Boxes, Keypoints))
    pixels = displayed_pixels(batch[name].cpu().numpy(), normalize)
    return [
        Picture(
            pixels=pixels[row],
            caption=_caption(sample.id, sample.values, name if several else ""),
            masks=[mask[row].cpu().numpy() for mask in masks],
            boxes=_joined([each[row].cpu().numpy() for each in boxes]),
            points=_joined([each[row].cpu().numpy() for each in points]),
        )
        for row, sample in enumerate(report.samples)
    ]


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any] | None:
    return np.concatenate(parts) if parts else None


def _caption(number: int, values: Mapping[str, str], field: str) -> str:
    label = values.get("label", "")
    return " ".join(each for each in (str(number), field, label) if each)


def displayed_pixels(images: NDArray[Any], normalize: Normalize | None) -> NDArray[np.uint8]:
    """Convert images (n, c, h, w) to uint8 (n, h, w, c), with the normalisation undone."""
    values = images.transpose(0, 2, 3, 1).astype(np.float32)
    if normalize is not None:
        mean, std = (np.asarray(each, np.float32) for each in (normalize.mean, normalize.std))
        values = (values * std + mean) * 255
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def show_batch(
    url: str, report: BatchReport, pictures: list[Picture], *, out: Path | None, as_json: bool
) -> None:
    """Write the contact sheet if `out` is given, and print the report. Raises ConfigError for a
    sheet of a dataset without images."""
    if out is not None and not pictures:
        raise ConfigError("--out draws images, but this dataset has none: leave it out.")
    if out is not None:
        try:
            contact_sheet(pictures).save(out)
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
    console.print(_fields(report), _values(report), _samples(report), sep="\n")
    if out is not None:
        console.print("Contact sheet (without normalisation):", str(out), markup=False)


def _fields(report: BatchReport) -> Table:
    table = Table("field", "type", "shape", "dtype", "present", box=None, pad_edge=False)
    for field in report.fields:
        shape = " x ".join("*" if each is None else str(each) for each in field.shape)
        table.add_row(escape(field.name), field.type, shape, field.dtype, str(field.present))
    return table


def _values(report: BatchReport) -> Table:
    table = Table("values of", "min", "max", "mean", "std", box=None, pad_edge=False)
    for each in report.values:
        numbers = (each.min, each.max, each.mean, each.std)
        table.add_row(escape(each.name), *(f"{number:.4g}" for number in numbers))
    return table


def _samples(report: BatchReport) -> Table:
    table = Table("id", "name", "values", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for sample in report.samples:
        name = sample.name.encode(errors="replace").decode()
        values = ", ".join(f"{field} {value}" for field, value in sample.values.items())
        table.add_row(str(sample.id), escape(name), escape(values) or "-")
    return table
