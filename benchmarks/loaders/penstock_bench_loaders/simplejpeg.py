"""Play torch's DataLoader with the fastest packages that pip installs: simplejpeg and OpenCV.

Loaders without a decoder of their own use these too, so that their figures are the best possible.
Without simplejpeg (libjpeg-turbo) they decode with Pillow, without OpenCV they resize with Pillow.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.bench.adapters import (
    IMAGE_FOLDER,
    IMAGE_MODULES,
    Adapter,
    RandomCropTransform,
    crop_window,
    one_thread,
    torch_loader,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.bench.adapters import PlayedLoader, Work

IMAGE_PACKAGES = "simplejpeg opencv-python-headless"
_JPEG = b"\xff\xd8\xff"


class FastCropTransform(RandomCropTransform):
    """A RandomCropTransform that decodes JPEGs with simplejpeg, and resizes with OpenCV if that is
    installed."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._has_opencv = has_opencv()

    def pixels(self, encoded: bytes, rng: np.random.Generator) -> NDArray[np.uint8]:
        if not encoded.startswith(_JPEG):
            return super().pixels(encoded, rng)
        import simplejpeg

        # Nearest chroma upsampling, DALI's default.
        whole = simplejpeg.decode_jpeg(encoded, colorspace="RGB", fastupsample=True)
        if not self._has_opencv:
            from PIL import Image

            return self.resized(Image.fromarray(whole), rng)
        import cv2

        left, top, width, height = crop_window(whole.shape[1], whole.shape[0], rng)
        window = whole[top : top + height, left : left + width]
        # Penstock filters crops that shrink by more than 2; OpenCV's filter is INTER_AREA.
        shrinks = min(width, height) > 2 * self.size
        pixels = cv2.resize(
            window,
            (self.size, self.size),
            interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR,
        )
        if rng.random() < 0.5:
            pixels = cv2.flip(pixels, 1)
        return np.asarray(pixels, np.uint8)


def has_opencv() -> bool:
    return find_spec("cv2") is not None


def fastest_decoder() -> str:
    """Return the name of the fastest installed packages, for results."""
    decoder = "pillow" if find_spec("simplejpeg") is None else "simplejpeg"
    return f"{decoder} + OpenCV" if has_opencv() else decoder


def fastest_crop(size: int) -> RandomCropTransform:
    """Return the transform of the fastest installed packages."""
    return (RandomCropTransform if find_spec("simplejpeg") is None else FastCropTransform)(size)


def one_core(worker: int) -> None:
    """Limit a worker process to one thread, in OpenCV as well as in torch."""
    one_thread(worker)
    quiet_opencv()


def quiet_opencv() -> None:
    """Turn off OpenCV's own threads: the workers are the requested parallelism."""
    if has_opencv():
        import cv2

        cv2.setNumThreads(0)


def build(work: Work) -> PlayedLoader:
    return torch_loader.build(work, FastCropTransform(work.size), one_core)


ADAPTERS = (
    Adapter(
        name="simplejpeg",
        title="torch DataLoader + simplejpeg",
        needs=("simplejpeg",),
        imports=(*IMAGE_MODULES, "simplejpeg"),
        install=f"pip install {IMAGE_PACKAGES}",
        reads=IMAGE_FOLDER,
        distribution="simplejpeg",
        build=build,
    ),
)
