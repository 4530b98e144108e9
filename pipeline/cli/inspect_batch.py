"""Load one batch, exactly as a model receives it, and report its fields, values and samples.

This is `penstock inspect --batch`. Its contact sheet shows the images of the batch in rows, with
captions, masks, boxes and points.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from penstock.augment import Decode, Normalize, Operation, Resize, imagenet_eval, imagenet_train
from penstock.cache import ConfigError
from penstock.pipeline.cli.output import report, table
from penstock.pipeline.loader import DataLoader
from penstock.pipeline.plan import World
from penstock.readers import (
    Dataset,
    Reading,
    contact_sheet,
    displayed_pixels,
    is_mixture_file,
    mix_file,
    pictures_of,
)
from penstock.readers.fieldtypes import PRESENT, Schema, image_fields, number_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.pipeline.cli.command_options import Recipe
    from penstock.readers import Picture, Source

_TEXT_CHARACTERS = 60
_NUMBERS = 4


def batch_fields(batch: Mapping[str, Any], schema: Schema) -> list[dict[str, Any]]:
    """Describe the fields of a batch of tensors, Ragged values and lists.

    shape: of the tensor; for ragged values the batch size and the lengths of a sample, None for
    those that differ. dtype: "str" or "bytes" if the values aren't numbers. present: number of
    samples that have the field.
    """
    return [
        _field(name, column, batch.get(name + PRESENT), schema)
        for name, column in batch.items()
        if not name.endswith(PRESENT)
    ]


def _field(name: str, column: Any, present: Any, schema: Schema) -> dict[str, Any]:
    shape: list[int | None]
    if hasattr(column, "shape"):
        shape, dtype = list(map(int, column.shape)), column.dtype
    elif isinstance(column, list):
        shape, dtype = [len(column)], type(column[0]).__name__ if column else "-"
    else:
        shape = [len(column), *_lengths([each.shape for each in column])]
        dtype = column.values.dtype
    return {
        "name": name,
        "type": type(schema[name]).__name__ if name in schema else "Value",
        "shape": shape,
        "dtype": str(dtype).split(".")[-1],
        "present": len(column) if present is None else int(present.sum()),
    }


def _lengths(shapes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Return the lengths that all samples share, and None for the others."""
    return [
        one.pop() if len(one := set(lengths)) == 1 else None
        for lengths in zip(*shapes, strict=False)
    ]


def value_ranges(
    batch: Mapping[str, Any], image_fields: Sequence[str], *, number: str
) -> list[dict[str, Any]]:
    """Compute the ranges of all numeric fields, and of each channel of images, over the batch.

    number: the name of the field of sample ids, which is left out.
    """
    parts: list[tuple[str, NDArray[Any]]] = []
    for name, column in batch.items():
        if name == number or name.endswith(PRESENT) or isinstance(column, list):
            continue
        values = (column if hasattr(column, "shape") else column.values).cpu().numpy()
        if name in image_fields:
            parts += ((f"{name} {n}", values[:, n]) for n in range(values.shape[1]))
        elif values.size:
            parts.append((name, values))
    return [
        {
            "name": name,
            "min": float(values.min()),
            "max": float(values.max()),
            "mean": float(values.mean(dtype=np.float64)),
            "std": float(values.std(dtype=np.float64)),
        }
        for name, values in parts
    ]


def batch_samples(
    batch: Mapping[str, Any], names: Sequence[str], schema: Schema, shown: Sequence[str]
) -> list[dict[str, Any]]:
    """Describe the samples of a batch, in its order. names: of the samples; shown: the fields whose
    values to include, as texts."""
    values = [{name: _value(batch, schema, name, n) for name in shown} for n in range(len(names))]
    each = zip(batch[number_name(schema)].tolist(), names, values, strict=True)
    return [{"id": number, "name": name, "values": shown} for number, name, shown in each]


def _value(batch: Mapping[str, Any], schema: Schema, field: str, row: int) -> str:
    """Format one value: a class by name, text and few numbers shortened, otherwise its shape."""
    present = batch.get(field + PRESENT)
    if present is not None and not present[row]:
        return "-"
    value, type = batch[field][row], schema.get(field)
    if type is not None and (shown := type.show(value)) is not None:
        return shown
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, str):
        return _line(value)
    if not hasattr(value, "numel"):  # the value of another package's type
        return _line(str(value))
    if value.numel() <= _NUMBERS and value.dim() <= 1:
        return " ".join(f"{each:.4g}" for each in value.reshape(-1).tolist()) or "empty"
    return f"{len(value)} numbers" if value.dim() == 1 else " x ".join(map(str, value.shape))


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_CHARACTERS else line[: _TEXT_CHARACTERS - 1] + "…"


MOST_SAMPLES = 1024
_SQUARE = 224


def open_with_all_fields(url: str, **options: Any) -> Source:
    """Open a dataset, or the mixture of a mixture file, with all fields, their presence flags and
    the sample id.

    options: arguments of `Dataset`.
    """
    options["allow_left_out"] = 1  # inspection must not fail because of bad samples
    if is_mixture_file(url):
        mixture = mix_file(url, **options)
        return mixture.select(*_all_fields(mixture), owns_parts=True)
    with Dataset(url, **options) as found:
        return found.select(*_all_fields(found))


def _all_fields(dataset: Source) -> list[str]:
    schema, lacking = dataset.schema, dataset.contents.lacking
    return [*schema, *(n + PRESENT for n in schema if lacking.get(n)), number_name(schema)]


def load_batch(
    dataset: Source, *, size: int, recipe: Recipe, seed: int | None, epoch: int
) -> tuple[dict[str, Any], list[Picture]]:
    """Load the first batch of an epoch; return the values of `--json`, and its images as pictures.

    dataset: must have the sample id among its fields. The order is shuffled if there is a seed
    or the recipe is for training. Raises what the loader raises, and ConfigError for a size out of
    range.
    """
    if not 1 <= size <= MOST_SAMPLES:
        raise ConfigError(f"--batch: got {size}, wanted 1 to {MOST_SAMPLES}.")
    schema = dataset.schema
    images = list(image_fields(schema, dataset.fields))
    ops, words = _recipe_for(dataset, images, recipe)
    with DataLoader(
        dataset,
        batch_size=min(size, len(dataset)),
        shuffle=seed is not None or recipe == "imagenet",
        seed=seed or 0,
        augment=ops,
        world=World(0, 1),
        as_dict=True,
    ) as loader:
        loader.set_epoch(epoch)
        batch: dict[str, Any] = next(iter(loader))
    number = number_name(schema)
    names = dataset.names(batch[number].tolist())
    shown = [n for n in batch if n not in (*images, number) and not n.endswith(PRESENT)]
    values = {
        "seed": seed or 0,
        "epoch": epoch,
        "augment": words,
        "fields": batch_fields(batch, schema),
        "values": value_ranges(batch, images, number=number),
        "samples": batch_samples(batch, names, schema, shown),
    }
    normalize = next((op for op in ops or () if isinstance(op, Normalize)), None)
    return values, _pictures(batch, schema, normalize)


def _recipe_for(
    dataset: Source, images: list[str], recipe: Recipe
) -> tuple[tuple[Operation, ...] | None, str]:
    """Return a recipe that gives the images of a batch one shape, and its description.

    Without a recipe, images of different sizes are resized as a whole to a square.
    """
    if not images:
        return None, "none"
    ops = {"imagenet": imagenet_train(), "imagenet-eval": imagenet_eval(), "none": None}[recipe]
    if ops is not None or all(dataset.contents.images[name].fixed for name in images):
        return ops, recipe
    words = f"none, all resized to {_SQUARE} x {_SQUARE} since their sizes differ"
    return (Decode(), Resize((_SQUARE, _SQUARE))), words


def _pictures(
    batch: Mapping[str, Any], schema: Schema, normalize: Normalize | None
) -> list[Picture]:
    """Return the images of a batch, with their masks, boxes and points."""
    scaling = ((0.0,), (1 / 255,)) if normalize is None else (normalize.mean, normalize.std)
    how = Reading(schema=schema, displayed=partial(displayed_pixels, scaling=scaling))
    pictures = []
    for row in range(len(batch[number_name(schema)])):
        lacking = {n for n in batch if n + PRESENT in batch and not batch[n + PRESENT][row]}
        sample = {name: column[row] for name, column in batch.items() if name not in lacking}
        pictures += pictures_of(sample, how)
    return pictures


def show_batch(
    url: str, values: dict[str, Any], pictures: list[Picture], *, out: Path | None, as_json: bool
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
    written = {"out": None if out is None else str(out)}
    report(values | written, _shown(url, values, out), as_json=as_json)


def _shown(url: str, values: Mapping[str, Any], out: Path | None) -> Iterator[str | Table]:
    """Yield the lines and the tables of a report for people."""
    seed = f"seed {values['seed']}, augment {values['augment']}"
    yield f"First batch of epoch {values['epoch']}, {seed}, of {escape(url)}"
    fields = (
        (name, type, " x ".join("*" if n is None else str(n) for n in shape), dtype, str(present))
        for name, type, shape, dtype, present in map(dict.values, values["fields"])
    )
    yield table("field", "type", "shape", "dtype", "present", rows=fields)
    ranges = (
        (name, *(f"{number:.4g}" for number in numbers))
        for name, *numbers in map(dict.values, values["values"])
    )
    yield table("values of", "min", "max", "mean", "std", rows=ranges)
    samples = (
        (
            str(one["id"]),
            one["name"].encode(errors="replace").decode(),
            ", ".join(f"{field} {value}" for field, value in one["values"].items()) or "-",
        )
        for one in values["samples"]
    )
    yield table(Column("id", no_wrap=True), "name", "values", rows=samples)
    if out is not None:
        yield f"Contact sheet (without normalisation): {escape(str(out))}"
