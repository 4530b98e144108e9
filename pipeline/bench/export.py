"""Export a dataset's samples as files in class folders, for loaders that can't read a pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError, DatasetError
from penstock.readers.fields.columns import DenseColumn
from penstock.readers.fields.selection import class_field, image_fields
from penstock.readers.fields.sniff import HEAD_BYTES, sniff
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers.source import Source

_DIGITS = 19  # of the largest int64: folders sort by name as labels do
_CHUNK = 256  # samples a read; a remote set's shards are fetched one or a few at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """samples: how many were written. same_labels: the files' class folders in order give each
    sample the label that it has in the dataset; not so where labels are missing or start above 0.
    """

    samples: int
    same_labels: bool


def export_files(dataset: Source, folder: Path, *, most_samples: int | None = None) -> Export:
    """Write `<folder>/<label>/<id>.<codec>`, bytes unchanged: the first most_samples, or all.

    The first field of images, and the first of classes; samples without go to one class. Raises
    ConfigError for a dataset whose batches have no images, what Dataset.read raises, and
    WriteError's base OSError where the folder can't be written.
    """
    contents = dataset.contents
    count = min(contents.samples, most_samples if most_samples is not None else contents.samples)
    images = image_fields(contents.schema, dataset.fields)
    classes = class_field(contents.schema, dataset.fields)
    if not images:
        raise ConfigError(f"{dataset.url}: its batches have no images that could be written out.")
    seen: set[int] = set()
    for start in range(0, count, _CHUNK):
        read = dataset.read(contents.rows(np.arange(start, min(count, start + _CHUNK))))
        batch, column = read.encoded(images[0]), read.columns.get(classes or "")
        labels = column.values.tolist() if isinstance(column, DenseColumn) else [0] * len(read)
        for number, label, encoded in zip(batch.ids.tolist(), labels, batch.encoded, strict=True):
            place = folder / f"{label:0{_DIGITS}d}"
            if label not in seen:
                seen.add(label)
                place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:012d}.{_suffix(encoded[:HEAD_BYTES].tobytes())}").write_bytes(
                encoded.data
            )
    return Export(samples=count, same_labels=classes is not None and seen == set(range(len(seen))))


def _suffix(head: bytes) -> str:
    codec = sniff(head)
    if isinstance(codec, Rejection):
        raise DatasetError(
            f"A sample is no image ({codec.reason}), so no other loader can read it."
        )
    return {"jpeg": "jpg", "jpeg2000": "jp2", "pnm": "ppm"}.get(codec, codec)
