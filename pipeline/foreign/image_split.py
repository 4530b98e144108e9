"""The images of a torch dataset's samples, apart from what the user's collate function sees.

In the worker, each sample's image is taken out before the rest is collated; in the loader, what
DALI made of the images goes where they were.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache.base.machine import machine_remedy
from penstock.cache.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 swap the sides
IMAGE_KEYS = ("image", "img", "jpg", "jpeg", "png", "pixel_values")

_WANTED = (
    "wanted encoded bytes (bytes, or uint8 of shape (n,)), a PIL image, uint8 of shape (height, "
    "width[, 3]), or a uint8 tensor of shape (3, height, width)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBatch:
    """The images of one batch, and the rest of it apart.

    arrays: encoded, uint8 (bytes,), or decoded, uint8 (h, w, 3). dims: upright heights and widths,
    int32, shape (n, 2). remainder: the batch without them; key: where in it they belong: a place in
    a tuple or list, a key of a mapping, or None if they were all.
    """

    arrays: list[NDArray[np.uint8]]
    dims: NDArray[np.int32]
    remainder: Any
    key: Any

    def joined(self, images: torch.Tensor) -> Any:
        """The batch with images of shape (n, c, h, w) in their place."""
        if self.key is None:
            return images
        if isinstance(self.remainder, Mapping):
            return {**self.remainder, self.key: images}
        values = list(self.remainder)
        values.insert(self.key, images)
        return values


@dataclass(frozen=True, slots=True)
class SplitCollate:
    """A collate function for everything but the images. collate: the user's, or torch's default.

    A batch of tuples comes out as a list, as torch's default has it; mappings as dicts.
    """

    collate: Callable[[Any], Any]

    def __call__(self, samples: Sequence[Any]) -> SplitBatch:
        key = image_key(samples[0])
        images = [as_array(sample if key is None else sample[key]) for sample in samples]
        if len({image.ndim for image, _ in images}) > 1:
            raise DatasetError("augment=: some samples are encoded and some decoded; wanted one.")
        remainder: Any = None
        if isinstance(samples[0], Mapping):
            others = [{k: v for k, v in sample.items() if k != key} for sample in samples]
            remainder = self.collate(others) if others[0] else {}
        elif key is not None:
            others_ = [tuple(v for i, v in enumerate(sample) if i != key) for sample in samples]
            remainder = self.collate(others_) if others_[0] else []
        return SplitBatch(
            arrays=[image for image, _ in images],
            dims=np.array([dims for _, dims in images], np.int32),
            remainder=remainder,
            key=key,
        )


def needs_our_loader(samples: Any) -> Any:
    """Stands where others look for the collate function of a loader with augment=."""
    raise ConfigError(
        f"{len(samples)} samples were collated outside of Penstock's DataLoader, by a framework "
        "that rebuilt it: augment= would be left out. See docs/trainers.md for what to switch off."
    )


def image_key(sample: Any) -> Any:
    """Where the image is in a sample; None: the sample is one. Raises ConfigError."""
    if _is_image(sample):
        return None
    found: list[Any]
    if isinstance(sample, Mapping):
        named = [key for key in IMAGE_KEYS if key in sample and _is_image(sample[key])]
        found = named or [key for key, value in sample.items() if _is_image(value)]
    elif isinstance(sample, list | tuple):
        found = [place for place, value in enumerate(sample) if _is_image(value)]
    else:
        found = []
    if not found:
        raise ConfigError(
            f"augment=: no image in a sample of type {type(sample).__name__}; {_WANTED}. Make the "
            "dataset return the image as it was read, without a transform."
        )
    return found[0]


def _is_image(value: Any) -> bool:
    if isinstance(value, bytes | bytearray):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and value.ndim in (1, 2, 3)
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.uint8 and value.ndim in (1, 3)
    return type(value).__module__.startswith("PIL.") and hasattr(value, "convert")


def as_array(value: Any) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """An image as an array for DALI, and its upright height and width. Raises DatasetError."""
    if isinstance(value, torch.Tensor):
        value = value.numpy() if value.ndim == 1 else value.permute(1, 2, 0).numpy()
    if isinstance(value, bytes | bytearray):
        value = np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray):
        value = np.asarray(value.convert("RGB"))
    if value.ndim == 1:
        return np.ascontiguousarray(value), _encoded_dims(value)
    if value.ndim == 2:
        value = value[:, :, None]
    if value.shape[2] == 1:
        value = np.repeat(value, 3, axis=2)
    if value.shape[2] != 3 or 0 in value.shape:
        raise DatasetError(f"augment=: got an image of shape {value.shape}; {_WANTED}.")
    return np.ascontiguousarray(value), (value.shape[0], value.shape[1])


def _encoded_dims(data: NDArray[np.uint8]) -> tuple[int, int]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data.tobytes())) as image:
            width, height = image.size
            turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        if machine_remedy(error) is not None:
            raise
        raise DatasetError(
            f"augment=: a sample's {len(data)} bytes are not an image ({error}). Take it out of "
            "the dataset."
        ) from error
    return (width, height) if turned else (height, width)
