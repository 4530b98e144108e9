"""Run `penstock inspect`: show what a dataset holds, or with --batch what a loader delivers."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from penstock.cache import ConfigError
from penstock.pipeline.cli.command_options import (
    AllowEmpty,
    CacheFolder,
    ContactSheet,
    DocumentMode,
    FieldPlaces,
    Format,
    IndexFolder,
    Json,
    ManifestFile,
    MaxPixels,
    NumberType,
    SampleStride,
    SampleWindow,
    ShownEpoch,
    ShownRecipe,
    ShownSamples,
    ShownSeed,
    Source,
    StorageOption,
    Vocabulary,
    WalkBatchSize,
    parse_places,
    parse_sampling,
    parse_storage_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.formats import Sampling


def inspect(
    url: Source,
    batch_size: WalkBatchSize = 256,
    index_folder: IndexFolder = None,
    batch: ShownSamples = None,
    augment: ShownRecipe = "none",
    seed: ShownSeed = 0,
    epoch: ShownEpoch = 0,
    out: ContactSheet = None,
    format: Format = "auto",
    sample: SampleWindow = None,
    stride: SampleStride = None,
    dtype: NumberType = None,
    documents: DocumentMode = None,
    vocabulary: Vocabulary = None,
    manifest: ManifestFile = None,
    fields: FieldPlaces = None,
    allow_empty: AllowEmpty = False,
    max_pixels: MaxPixels = None,
    cache: CacheFolder = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Show the contents of a dataset and the order of a job; with --batch, show a batch."""
    if batch is None and out is not None:
        raise ConfigError("--out writes the contact sheet of --batch N: pass --batch, too.")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(
            f"--out: {out.parent} isn't an existing folder. Create it, or pass another path."
        )
    sampling = parse_sampling(
        sample=sample, stride=stride, dtype=dtype, documents=documents, vocabulary=vocabulary
    )
    arguments = {
        "format": format,
        "manifest": manifest,
        "fields": parse_places(fields),
        "allow_empty": allow_empty,
        "max_pixels": max_pixels,
        "index": index_folder,
        "cache": cache,
        "storage_options": parse_storage_options(storage_option),
    }
    with _log_at_info():
        if batch is None:
            _show_index(url, sampling, arguments, batch_size=batch_size, as_json=as_json)
            return
        # Imports are local in all commands, so that no command waits for another one's imports.
        from penstock.pipeline.cli.inspect_batch import load_batch, open_with_all_fields, show_batch

        with open_with_all_fields(url, **arguments, **sampling.arguments()) as dataset:
            report, pictures = load_batch(
                dataset, size=batch, recipe=augment, seed=seed, epoch=epoch
            )
    show_batch(url, report, pictures, out=out, as_json=as_json)


def _show_index(
    url: str, sampling: Sampling, arguments: dict[str, Any], *, batch_size: int, as_json: bool
) -> None:
    from penstock.pipeline.cli.index_report import index_values, show_index, warn_of_labels
    from penstock.readers import open_index

    found = open_index(url, sampling=sampling, **arguments)
    values = index_values(found, batch_size=batch_size)
    warn_of_labels(found)
    if as_json:
        typer.echo(json.dumps(values))
    else:
        show_index(url, values)


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
