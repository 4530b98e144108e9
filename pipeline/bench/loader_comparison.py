"""Compare other loaders with Penstock on the user's own data (`penstock bench --against`).

Where another loader can't read the dataset, its samples are exported as files in class folders,
bytes unchanged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.augment import RandomResizedCrop, Recipes, imagenet_train
from penstock.cache import ConfigError, DatasetError
from penstock.pipeline.bench.adapters import OURS, Work, list_files, split_installed
from penstock.pipeline.bench.rounds import RoundSize, compare
from penstock.readers import Dataset, Rejection, Source
from penstock.readers.fieldtypes import (
    IMAGE_HEAD_BYTES,
    DenseColumn,
    class_field,
    image_fields,
    sniff,
)
from penstock.readers.origin import LocalFolder

_DIGITS = 19  # of the largest int64: folders sort by name as labels do
_CHUNK = 256  # samples a read; a remote set's shards are fetched one or a few at a time


class Export(NamedTuple):
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
    count = contents.samples if most_samples is None else min(contents.samples, most_samples)
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
            suffix = _suffix(encoded[:IMAGE_HEAD_BYTES].tobytes())
            (place / f"{number:012d}.{suffix}").write_bytes(encoded.data)
    return Export(count, classes is not None and seen == set(range(len(seen))))


def _suffix(head: bytes) -> str:
    codec = sniff(head)
    if isinstance(codec, Rejection):
        raise DatasetError(
            f"A sample is no image ({codec.reason}), so no other loader can read it."
        )
    return {"jpeg": "jpg", "jpeg2000": "jp2", "pnm": "ppm"}.get(codec, codec)


MOST_SAMPLES = 8192
"""The most samples that are exported as files: enough for some dozens of batches, and few enough
to fit into the page cache."""

ROUND = RoundSize(stepped=0)
ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFigures:
    """The medians of one loader's rounds. ratio: Penstock's samples/s over this loader's, paired by
    round; above 1 if Penstock is faster; 1 for Penstock."""

    samples_per_s: float
    cpu_s_per_1000: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderComparison:
    """The figures of other loaders and of Penstock on one dataset.

    results: figures by the loader's name. ours: Penstock in the same rounds; None if no other
    loader is installed. skipped: loaders that aren't installed, with how to install each. note: a
    sentence on which files were read.
    """

    results: Mapping[str, LoaderFigures] = field(default_factory=dict)
    ours: LoaderFigures | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def compare_loaders(
    names: Sequence[str],
    dataset: Source,
    *,
    recipe: Recipes,
    batch_size: int,
    workers: int,
    size: RoundSize = ROUND,
    most_samples: int = MOST_SAMPLES,
    scratch: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> LoaderComparison:
    """Play interleaved rounds of Penstock and the named loaders over a dataset, on the CPU.

    All loaders read a local folder of labelled images in place. For any other dataset, the other
    loaders get its samples as files with unchanged bytes, in a temporary folder below `scratch`;
    neither this export nor a loader's conversion is timed. Penstock reads a local dataset in place
    unless it has more than most_samples samples. If it has more, or is remote, all loaders read the
    same local copy of most_samples samples.

    dataset: stays open. names: from `pipeline.bench.adapters.LOADERS`; loaders that aren't
    installed are skipped and listed. workers: processes or threads of each loader. progress: called
    with the share of the rounds that were played. Raises ConfigError (unknown name, another recipe
    than imagenet_train, a batch larger than the dataset), NotTheSameWorkError, ChildFailedError,
    and what Dataset raises.
    """
    crop = crop_of(recipe)
    there, skipped = split_installed(name for name in names if name not in OURS)
    if not there:
        return LoaderComparison(skipped=skipped)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=scratch) as place:
        folder, own, samples, note = _compared_files(dataset, Path(place), most_samples)
        if batch_size > samples:
            raise ConfigError(
                f"batch_size: got {batch_size}, but there are only {samples} samples. Pass a "
                "smaller batch size."
            )
        sizes = {"batch_size": batch_size, "size": crop, "workers": workers}
        work = Work(folder=folder, pack=own, scratch=Path(place), **sizes)
        played = ["penstock", *there]
        report = progress and (lambda count: progress(count / (ROUNDS * len(played))))
        done = compare(played, work, rounds=ROUNDS, size=size, progress=report)
    results = {
        name: LoaderFigures(
            samples_per_s=one.images_per_s.median,
            cpu_s_per_1000=one.cpu_s_per_1000.median,
            ratio=one.speed_ratio.median,
        )
        for name, one in done.summaries.items()
    }
    ours = results.pop("penstock")
    return LoaderComparison(results=results, ours=ours, skipped=skipped, note=note)


def check_comparable(dataset: Source, recipe: Recipes) -> None:
    """Raise ConfigError for batches without images, and for a recipe that others don't support."""
    if not image_fields(dataset.schema, dataset.fields):
        raise ConfigError(
            f"--against: other loaders are compared on images, and the batches of {dataset.url} "
            f"have only {list(dataset.fields)}. Leave out --against."
        )
    crop_of(recipe)


def crop_of(recipe: Recipes) -> int:
    """Return the size of imagenet_train's crops. Raises ConfigError for any other recipe."""
    for each in recipe if not isinstance(recipe, Mapping) else ():
        if isinstance(each, RandomResizedCrop) and tuple(recipe) == imagenet_train(each.size):
            height, width = each.height_width
            if height == width:
                return height
    raise ConfigError(
        "--against: other loaders are compared only on the ImageNet training recipe, "
        f"imagenet_train(size) with a square size; got {list(recipe)}. Use `--augment imagenet`, "
        "or leave out `--against`."
    )


def _compared_files(dataset: Source, place: Path, most_samples: int) -> tuple[Path, Path, int, str]:
    """Return the folder that other loaders read, what Penstock reads, the samples in each of them,
    and a sentence on this for the user."""
    whole, home = len(dataset), _local_path(dataset)
    if home is not None and _is_labelled_folder(dataset, home):
        return home, home, whole, "All loaders read the image folder in place."
    copy = place / "files"
    done = export_files(dataset, copy, most_samples=most_samples)
    if home is None or not done.same_labels or done.samples < whole:
        note = f"All loaders read a local copy of {done.samples} of {whole} samples as files."
        return copy, copy, done.samples, note
    note = f"The other loaders read the {whole} samples as files; Penstock reads them in place."
    return copy, home, whole, note


def _local_path(dataset: Source) -> Path | None:
    """Return the path of a local dataset that is determined by its URL alone, else None."""
    if not isinstance(dataset, Dataset) or not dataset.is_plain:
        return None
    origin = dataset.index.origin
    return Path(origin.url) if isinstance(origin, LocalFolder) else None


def _is_labelled_folder(dataset: Source, folder: Path) -> bool:
    """Return True if the files of a folder are exactly the dataset's samples, with its classes."""
    has_classes = class_field(dataset.schema, dataset.fields) is not None
    is_folder = has_classes and dataset.contents.is_file_per_sample
    return is_folder and len(list_files(folder)) == len(dataset)
