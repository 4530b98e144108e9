"""Define the work that every compared loader does, and the adapter that makes a loader do it.

The work: read an encoded image, decode it, cut a random resized crop (area 0.08 to 1, ratio 3/4
to 4/3), resize it bilinearly to size by size, flip every other one and normalise by ImageNet's mean
and deviation. Batches are float32 CHW tensors and int64 labels. All loaders read the same files,
and each does the work as its own documentation recommends. An `Adapter` describes a loader, its
requirements and how to build it.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.augment import IMAGENET_MEAN, IMAGENET_STD, RandomResizedCrop
from penstock.cache import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

AREA = RandomResizedCrop(1).scale
RATIO = RandomResizedCrop(1).ratio
# Levels of 0..255.
MEAN = tuple(255 * value for value in IMAGENET_MEAN)
DEVIATION = tuple(255 * value for value in IMAGENET_STD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work that every loader does.

    folder: `<class>/**/*.jpg`, which other loaders read or convert; pack: the same images, which
    Penstock reads. scratch: the folder for data that loaders convert to their own formats; it may
    also hold those of other image folders. size: height and width of the crops in pixels. workers:
    processes or threads that decode. Paths are absolute: a loader's process may have another
    working directory.
    """

    folder: Path
    pack: Path
    scratch: Path
    batch_size: int = 64
    size: int = 224
    workers: int = 2
    seed: int = 7

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Work:
        values: dict[str, Any] = json.loads(text)
        paths = {name: Path(values[name]) for name in ("folder", "pack", "scratch")}
        return cls(**(values | paths))


class PlayedLoader(Protocol):
    """A built loader, with an endless iterator of batches. Closing it stops its workers."""

    def batches(self) -> Batches: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The images of a folder in the order of torchvision's ImageFolder, with their labels.

    key: names the data that were converted from them; it changes with any name, size or time.
    """

    paths: list[str]
    labels: list[int]
    key: str = field(repr=False)

    def __len__(self) -> int:
        return len(self.paths)

    def shuffled(self) -> Files:
        """Return the samples in an order that mixes the classes, from which formats that shuffle
        only within or between shards are written, as their documentation recommends."""
        import numpy as np

        order = np.random.default_rng(0).permutation(len(self)).tolist()
        paths, labels = ([each[i] for i in order] for each in (self.paths, self.labels))
        return Files(paths=paths, labels=labels, key=self.key)

    def pairs(self) -> list[tuple[str, int]]:
        return list(zip(self.paths, self.labels, strict=True))


def list_files(folder: Path) -> Files:
    """List an image folder by Penstock's own rules, so that all loaders read the same samples.

    Raises DatasetNotFoundError for an empty or missing folder, ConfigError for one without labels.
    """
    from penstock.readers.fieldtypes import DenseColumn
    from penstock.readers.formats.folder import FolderFormat
    from penstock.readers.origin import LocalFolder

    listing = FolderFormat().list(LocalFolder(os.fsencode(folder)))
    candidates = listing.candidates(workers=1)
    labels = candidates.values.get("label")
    if not isinstance(labels, DenseColumn):
        raise ConfigError(
            f"{folder}: got images without class folders, but loaders are compared with labels. "
            "Put the images into one sub-folder per class."
        )
    return Files(
        paths=[str(folder / os.fsdecode(name)) for name in candidates.names],
        labels=labels.values.tolist(),
        key=listing.snapshot().fingerprint[:16],
    )


def converted(work: Work, name: str, write: Callable[[Files, Path], None]) -> Path:
    """Return the folder with work.folder in a loader's own format, which is written once and kept.

    write(files, folder): converts the shuffled files into an existing, empty folder. A conversion
    that was killed starts again.
    """
    files = list_files(work.folder)
    whole = work.scratch / f"{name}-{files.key}"
    if not whole.exists():
        part = whole.with_name(f"{whole.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(files.shuffled(), part)
        part.rename(whole)
    return whole


IMAGE_FOLDER = "the image folder"
IMAGE_MODULES = ("PIL.Image", "PIL.JpegImagePlugin", "numpy")
"""The modules that decoding by `RandomCropTransform` imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A loader that can be compared: its requirements and how to build it.

    build: builds the loader for a work. prepare: does what isn't measured, as converting the data
    for a loader with its own format, which is kept. needs: modules that must be importable.
    imports: modules to import before anything is measured. distribution: the package whose version
    results record. install: the command that installs the requirements. reads: a phrase for what it
    reads. converts: True if that is its own format, converted from the files. decodes: "its own"
    decoder; "ours", the fastest that pip installs, if it leaves decoding to its user.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    install: str
    reads: str
    build: Callable[[Work], PlayedLoader]
    prepare: Callable[[Work], None] | None = None
    converts: bool = False
    decodes: Literal["its own", "ours"] = "its own"
    imports: tuple[str, ...] = ()
    distribution: str = ""

    def is_installed(self) -> bool:
        return all(map(is_importable, self.needs))

    def make_ready(self, work: Work) -> None:
        """Import the loader's modules and prepare its data, so that no figure includes that time.
        Raises MissingDependencyError for a missing module."""
        for module in ("torch", "torch.utils.data", *self.imports):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                raise MissingDependencyError(
                    f"The loader {self.name} needs `{module}`. Run `{self.install}`."
                ) from error
        if self.prepare is not None:
            self.prepare(work)


def is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
