"""Decode and crop one image by Pillow, for loaders that leave decoding to their user."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.pipeline.bench.adapters.adapter import AREA, DEVIATION, MEAN, RATIO

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]
    Planes = NDArray[np.float32]

_MEAN = np.array(MEAN, np.float32)[:, None, None]
_DEVIATION = np.array(DEVIATION, np.float32)[:, None, None]


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
        area = width * height * rng.uniform(*AREA)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return int(left), int(top), w, h
    ratio = min(max(width / height, RATIO[0]), RATIO[1])
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
