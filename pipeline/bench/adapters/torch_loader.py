"""Play torch's DataLoader over an image folder: worker processes, one a core, that persist.

Pillow decodes and crops the images, as for all loaders that leave decoding to their user.
"""

from __future__ import annotations

import gc
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.pipeline.bench.adapters import adapter
from penstock.pipeline.bench.measured_run import endless

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from penstock.pipeline.bench.adapters.adapter import Batches, Files, PlayedLoader, Work

    Pixels = NDArray[np.uint8]
    Planes = NDArray[np.float32]


_MEAN = np.array(adapter.MEAN, np.float32)[:, None, None]
_DEVIATION = np.array(adapter.DEVIATION, np.float32)[:, None, None]


class RandomCropTransform:
    """Turn encoded bytes into a normalised random crop, float32 (3, size, size). Picklable."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, encoded: bytes, rng: np.random.Generator) -> Planes:
        return normalised(self.pixels(encoded, rng))

    def pixels(self, encoded: bytes, rng: np.random.Generator) -> Pixels:
        """Return the bytes of a crop, uint8 (size, size, 3)."""
        from PIL import Image

        with Image.open(io.BytesIO(encoded)) as image:
            return self.resized(image.convert("RGB"), rng)

    def resized(self, image: Any, rng: np.random.Generator) -> Pixels:
        """Resize a window by Pillow, always with its filter, and flip every other one."""
        from PIL import Image

        left, top, width, height = crop_window(image.width, image.height, rng)
        image = image.resize(
            (self.size, self.size),
            Image.Resampling.BILINEAR,
            box=(left, top, left + width, top + height),
        )
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels: Pixels = np.asarray(image)
        return pixels


def crop_window(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw (left, top, width, height) of a random resized crop, by torchvision's documented rule.

    The rule makes ten attempts at an area and a ratio (uniform in its logarithm), and then takes
    the largest central crop with an allowed ratio.
    """
    for _ in range(10):
        area = width * height * rng.uniform(*adapter.AREA)
        ratio = math.exp(rng.uniform(math.log(adapter.RATIO[0]), math.log(adapter.RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return int(left), int(top), w, h
    ratio = min(max(width / height, adapter.RATIO[0]), adapter.RATIO[1])
    w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return (width - w) // 2, (height - h) // 2, w, h


def normalised(pixels: Pixels) -> Planes:
    """Convert HWC bytes to CHW float32, normalised by ImageNet's mean and deviation."""
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)
    planes -= _MEAN
    planes /= _DEVIATION
    return planes


def torch_rng() -> np.random.Generator:
    """Return a numpy generator seeded by torch's, which torch seeds in each worker."""
    import torch

    return np.random.default_rng(int(torch.randint(2**62, ())))


def read_bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


class TorchWorkerTransform:
    """Turn (encoded, label) into (tensor, label) in a torch worker. Picklable."""

    def __init__(self, crop: RandomCropTransform) -> None:
        self._crop = crop

    def __call__(self, encoded: bytes, label: int) -> tuple[Any, int]:
        import torch

        return torch.from_numpy(self._crop(encoded, torch_rng())), int(label)


def one_thread(_: int) -> None:
    """Limit a worker process to one thread."""
    import torch

    torch.set_num_threads(1)


class FolderImages:
    """A map-style torch dataset over an image folder."""

    def __init__(self, files: Files, crop: RandomCropTransform) -> None:
        self._files = files.pairs()
        self._transform = TorchWorkerTransform(crop)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[index]
        return self._transform(read_bytes(path), label)


class TorchDataLoader:
    """A torch DataLoader, plain or of another library; batches of (images, labels)."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batches(self) -> Batches:
        return endless(self.loader)

    def close(self) -> None:
        # torch stops persistent workers only when the loader and its iterator are freed. They
        # refer to one another, so without a collection they would live into the next round.
        del self.loader
        gc.collect()


def build(
    work: Work, crop: RandomCropTransform, worker_init: Callable[[int], None] = one_thread
) -> PlayedLoader:
    """Build the loader. crop: decodes and crops an image. worker_init: called in each worker."""
    import torch
    from torch.utils.data import DataLoader

    dataset: Any = FolderImages(adapter.list_files(work.folder), crop)
    return TorchDataLoader(
        DataLoader(
            dataset,
            batch_size=work.batch_size,
            shuffle=True,
            num_workers=work.workers,
            drop_last=True,
            persistent_workers=work.workers > 0,
            worker_init_fn=worker_init,
            generator=torch.Generator().manual_seed(work.seed),
        )
    )


ADAPTERS = (
    # Pillow decodes and resizes, with its filter, as in torchvision.
    adapter.Adapter(
        name="torch",
        title="torch DataLoader + Pillow",
        needs=("PIL",),
        imports=adapter.IMAGE_MODULES,
        install="pip install pillow",
        reads=adapter.IMAGE_FOLDER,
        distribution="pillow",
        build=lambda work: build(work, RandomCropTransform(work.size)),
    ),
)
