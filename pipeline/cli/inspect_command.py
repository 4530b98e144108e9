"""Run `penstock inspect`: show what a dataset holds, or with --batch what a loader delivers."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cache import ConfigError
from penstock.pipeline.cli.command_options import IndexedOptions, Json, Recipe, Source, parse_places
from penstock.pipeline.cli.commands import command
from penstock.pipeline.cli.output import report
from penstock.readers import is_mixture_file

if TYPE_CHECKING:
    from collections.abc import Iterator


@command(
    "inspect",
    "penstock inspect photos --index photos-index --json",
    "penstock inspect s3://bucket/gpt --dtype uint16 --sample 2048",
    "penstock inspect photos --batch 8 --augment imagenet --out sheet.png",
)
def inspect(
    url: Source,
    *,
    batch_size: Annotated[int, Option(min=1)] = 256,
    batch: Annotated[int | None, Option(min=1)] = None,
    augment: Recipe = "none",
    seed: int | None = None,
    epoch: Annotated[int, Option(min=0)] = 0,
    out: Path | None = None,
    data: IndexedOptions,
    as_json: Json = False,
) -> None:
    """Show the contents of a dataset and the order of a job; with --batch, show a batch.

    For a mixture file, show what each part contributes to an epoch: samples, tokens, epochs of its
    own, bytes.

    batch_size: Global batch for which lanes and window are shown.
    batch: Show a batch of this many samples as the model will receive it.
    augment: With --batch: the recipe for images.
    seed: With --batch: shuffle by this seed, which is also that of the augmentation. By default
        the order is that of the dataset, or, with --augment imagenet, that of seed 0.
    epoch: With --batch: epoch of the batch. For a mixture file: the epoch to which the parts
        contribute.
    out: With --batch: write the batch as a picture, such as contact.png.
    """
    if batch is None and out is not None:
        raise ConfigError("--out writes the contact sheet of --batch N: pass --batch, too.")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(
            f"--out: {out.parent} isn't an existing folder. Create it, or pass another path."
        )
    parse_places(data.fields)  # raises for names alone, because all fields are shown
    arguments = data.arguments_for(url)
    # Imports are local in all commands, so that no command waits for another one's imports.
    with _log_at_info():
        if batch is not None:
            from penstock.pipeline.cli import inspect_batch

            with inspect_batch.open_with_all_fields(url, **arguments) as dataset:
                values, pictures = inspect_batch.load_batch(
                    dataset, size=batch, recipe=augment, seed=seed, epoch=epoch
                )
            inspect_batch.show_batch(url, values, pictures, out=out, as_json=as_json)
            return
        from penstock.pipeline.cli import dataset_report
        from penstock.readers import check_left_out, mix_file, open_index

        if is_mixture_file(url):
            with mix_file(url, **arguments, allow_left_out=1) as mixture:
                values, summary = dataset_report.mixture_values(
                    mixture, batch_size=batch_size, epoch=epoch
                )
            shown = dataset_report.shown_mixture(url, values, summary)
        else:
            found = open_index(url, **data.description())
            values = dataset_report.index_values(found, batch_size=batch_size)
            dataset_report.warn_of_labels(found)
            check_left_out(found)
            shown = dataset_report.shown_index(url, values)
        report(values, shown, as_json=as_json)


@contextmanager
def _log_at_info() -> Iterator[None]:
    """Show INFO messages too: the definition of a sample, and files that aren't fields."""
    log = logging.getLogger("penstock")
    before = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
