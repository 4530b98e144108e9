"""One interface to every loader that is compared, over the same files and the same work.

The work: read a JPEG, decode it, cut a random resized crop (area 0.08 to 1, ratio 3/4 to 4/3),
resize it to size by size, flip every other one, normalise by ImageNet's mean and deviation; batches
of float32 CHW tensors and int64 labels. Each peer does it as its own documentation tells to;
torchvision has its random resized crop decide over decoded images, so the Pillow peer does too.
"""

from __future__ import annotations

import importlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

    Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

Name = Literal["penstock", "penstock-folder", "torch", "dali"]
TITLES: dict[str, str] = {
    "penstock": "Penstock (pack)",
    "penstock-folder": "Penstock (folder)",
    "torch": "torch DataLoader + Pillow",
    "dali": "DALI's own file reader",
}
MEAN = np.array([0.485, 0.456, 0.406], np.float32) * 255
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32) * 255
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
SMALL_CROP = 112  # pixels; below, most windows of a photograph shrink by more than 2
DALI_AHEAD = 2  # DALI's own default depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every peer does.

    folder: `<class>/*.jpg`, read by torch and DALI; pack: the same images as a Penstock pack.
    size: height and width of the crops in pixels; workers: processes or threads that decode.
    """

    folder: Path
    pack: Path
    batch_size: int = 64
    size: int = 224
    workers: int = 2
    seed: int = 7


class Peer(Protocol):
    """A built loader. Batches come without end; closing it stops its workers."""

    def batches(self) -> Batches: ...
    def close(self) -> None: ...


class PenstockPeer:
    """Penstock as its README tells to use it."""

    def __init__(self, work: Work, *, url: str) -> None:
        from augment import imagenet_train
        from pipeline import DataLoader
        from readers import Dataset

        self.loader = DataLoader(
            Dataset(url),
            batch_size=work.batch_size,
            shuffle=True,
            num_workers=work.workers,
            drop_last=True,
            seed=work.seed,
            augment=imagenet_train(work.size),
        )

    def batches(self) -> Batches:
        while True:
            yield from self.loader

    def close(self) -> None:
        self.loader.close()


class PillowImages:
    """A torch dataset over an image folder: Pillow decodes, crops, flips; numpy normalises."""

    def __init__(self, folder: Path, *, size: int) -> None:
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.files = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
        ]
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import torch
        from PIL import Image

        path, label = self.files[index]
        # Torch seeds its generator in each worker, not numpy's: draw from torch's.
        rng = np.random.default_rng(int(torch.randint(2**62, ())))
        with Image.open(path) as image:
            pixels = image.convert("RGB")
        left, top, width, height = crop_window(pixels.width, pixels.height, rng)
        pixels = pixels.resize(
            (self.size, self.size),
            Image.Resampling.BILINEAR,
            box=(left, top, left + width, top + height),
        )
        if rng.random() < 0.5:
            pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(normalised(np.asarray(pixels))), label


def crop_window(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """(left, top, width, height) of a random resized crop, by torchvision's documented rule.

    Ten attempts at an area and a ratio (uniform in its logarithm); else the largest central crop
    whose ratio is allowed.
    """
    for _ in range(10):
        area = width * height * rng.uniform(*AREA)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return int(left), int(top), w, h
    ratio = min(max(width / height, RATIO[0]), RATIO[1])
    w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return (width - w) // 2, (height - h) // 2, w, h


def normalised(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """HWC bytes to CHW float32, ImageNet's mean 0 and deviation 1."""
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)
    planes -= MEAN[:, None, None]
    planes /= DEVIATION[:, None, None]
    return planes


class TorchPeer:
    """torch's DataLoader with worker processes that stay, one a core."""

    def __init__(self, work: Work) -> None:
        import torch
        from torch.utils.data import DataLoader

        dataset: Any = PillowImages(work.folder, size=work.size)
        self.loader = DataLoader(
            dataset,
            batch_size=work.batch_size,
            shuffle=True,
            num_workers=work.workers,
            drop_last=True,
            persistent_workers=work.workers > 0,
            worker_init_fn=one_thread,
            generator=torch.Generator().manual_seed(work.seed),
        )

    def batches(self) -> Batches:
        while True:
            yield from self.loader

    def close(self) -> None:
        # torch has no public way to stop workers that stay but to drop the loader and its iterator.
        del self.loader


def one_thread(_: int) -> None:
    """A worker process uses one core; torch does this too, and a test may call it."""
    import torch

    torch.set_num_threads(1)


class DaliPeer:
    """DALI's own reader, decoder and crop: its documentation's ImageNet pipeline."""

    def __init__(self, work: Work) -> None:
        from nvidia.dali import fn, pipeline_def, types

        @pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=work.batch_size,
            num_threads=work.workers,
            device_id=None,
            seed=work.seed,
            prefetch_queue_depth=DALI_AHEAD,
        )
        def imagenet() -> Any:
            encoded, labels = fn.readers.file(
                file_root=str(work.folder), random_shuffle=True, name="reader"
            )
            images = fn.decoders.image_random_crop(
                encoded,
                output_type=types.RGB,
                random_area=list(AREA),
                random_aspect_ratio=list(RATIO),
                num_attempts=10,
            )
            # Penstock filters the crops that shrink by more than 2. Few do at 224 pixels, so there
            # the peer runs without the filter, a quarter faster; at small sizes most do.
            images = fn.resize(
                images,
                size=[work.size, work.size],
                interp_type=types.INTERP_LINEAR,
                antialias=work.size < SMALL_CROP,
            )
            images = fn.crop_mirror_normalize(
                images,
                dtype=types.FLOAT,
                output_layout="CHW",
                mean=MEAN.tolist(),
                std=DEVIATION.tolist(),
                mirror=fn.random.coin_flip(),
            )
            return images, labels

        self.pipe = imagenet()
        self.pipe.build()

    def batches(self) -> Batches:
        from torch.utils.dlpack import from_dlpack

        while True:
            images, labels = self.pipe.run()
            yield (
                from_dlpack(images.as_tensor()),
                from_dlpack(labels.as_tensor()).squeeze(1).long(),
            )

    def close(self) -> None:
        del self.pipe


def build(name: Name, work: Work) -> Peer:
    """The loader of that name, built and ready to be asked."""
    makers: dict[str, Callable[[], Peer]] = {
        "penstock": lambda: PenstockPeer(work, url=str(work.pack)),
        "penstock-folder": lambda: PenstockPeer(work, url=str(work.folder)),
        "torch": lambda: TorchPeer(work),
        "dali": lambda: DaliPeer(work),
    }
    return makers[name]()


def imports(name: Name) -> float:
    """Import what a peer needs, so that no figure holds it. Returns the seconds."""
    began = time.perf_counter()
    modules = ["torch", "torch.utils.data"]
    modules += ["PIL.Image", "PIL.JpegImagePlugin"] if name == "torch" else ["nvidia.dali.fn"]
    if name.startswith("penstock"):
        modules += ["pipeline.loader", "readers", "augment"]
    for module in modules:
        importlib.import_module(module)
    return time.perf_counter() - began
