"""Split images from a torch dataset's samples, so that the user's collate function sees only the
rest.

In the worker, the images of each sample are removed before the rest is collated. In the loader, the
images that DALI decoded take their places.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache import ConfigError, DatasetError
from penstock.readers import MAX_PIXELS
from penstock.readers.fieldtypes import eight_bits, upright_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

IMAGE_KEYS = ("image", "img", "jpg", "jpeg", "png", "pixel_values")
_MASK_NAMES = ("mask", "seg", "label", "target", "annotation")
_COLOURED = ("RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")

_WANTED_IMAGE = (
    "wanted encoded bytes (bytes, or uint8 of shape (n,)), a PIL image, uint8 of shape (height, "
    "width[, 3]), or a uint8 tensor of shape (3, height, width)"
)
_WITHOUT_IMAGES = (
    "With augment=, collate_fn receives samples without their images, which are added to the dict, "
    "list or tuple that it returns."
)


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """The images of one batch, and the rest of it.

    arrays: encoded, uint8 (bytes,), or decoded, uint8 (h, w, 3): all of the first key, then all of
    the next. dims: upright heights and widths, int32, (n, 2). remainder: the batch without its
    images. keys: of the images in it: positions in a tuple or list, keys of a mapping; none if a
    sample is an image. batched: False for a single sample. order: the keys of a sample that is a
    mapping. named: the class of a sample that is a named tuple.
    """

    arrays: list[NDArray[np.uint8]]
    dims: NDArray[np.int32]
    remainder: Any
    keys: tuple[Any, ...]
    batched: bool
    order: tuple[Any, ...] = ()
    named: type[Any] | None = None

    @property
    def images(self) -> int:
        """The number of images of each sample."""
        return max(1, len(self.keys))

    def joined(self, images: torch.Tensor | list[torch.Tensor]) -> Any:
        """Return the batch with its images in their places: of shape (n, c, h, w), or a list of
        images of different sizes."""
        parts: Sequence[Any]
        if not self.batched:
            parts = list(images)
        elif isinstance(images, list):
            size = len(images) // self.images
            parts = [[*images[at : at + size]] for at in range(0, len(images), size)]
        else:
            parts = images.reshape(self.images, -1, *images.shape[1:]).unbind()
        if not self.keys:
            return parts[0]
        if isinstance(self.remainder, Mapping):
            batch = {**self.remainder, **dict(zip(self.keys, parts, strict=True))}
            return {key: batch[key] for key in dict.fromkeys((*self.order, *batch)) if key in batch}
        values = list(self.remainder)
        for place, part in zip(self.keys, parts, strict=True):
            values.insert(place, part)
        return values if self.named is None else self.named(*values)


@dataclass(frozen=True, slots=True)
class SplitCollate:
    """A collate function for all fields except images.

    collate: the user's, or torch's default. batched: it gets a list of samples, not a single one. A
    batch of tuples becomes a list and one of named tuples a named tuple, as with torch's default;
    mappings become dicts.
    """

    collate: Callable[[Any], Any]
    batched: bool = True

    def __call__(self, samples: Any) -> SplitBatch:
        samples = samples if self.batched else [samples]
        keys = image_keys(samples[0])
        values = [sample[key] for key in keys for sample in samples] if keys else samples
        arrays = [as_array(image) for image in values]
        if len({array.ndim for array in arrays}) > 1:
            raise DatasetError(
                "augment=: got encoded and decoded images in one batch, wanted one kind. Make the "
                "dataset return all images encoded, or all decoded."
            )
        remainder: Any = None
        order: tuple[Any, ...] = ()
        named: type[Any] | None = None
        if isinstance(samples[0], Mapping):
            order = tuple(samples[0])
            others = [{k: v for k, v in sample.items() if k not in keys} for sample in samples]
            remainder = self._collated(others) if others[0] else {}
        elif keys:
            others_ = [tuple(v for i, v in enumerate(each) if i not in keys) for each in samples]
            remainder = self._collated(others_) if others_[0] else []
            # A collate function of the user's may return another number of values.
            is_complete = len(remainder) + len(keys) == len(samples[0])
            named = type(samples[0]) if hasattr(samples[0], "_fields") and is_complete else None
        dims = _dims_of(arrays)
        return SplitBatch(arrays, dims, remainder, keys, self.batched, order, named)

    def _collated(self, others: Sequence[Any]) -> Any:
        """Collate samples without their images.

        Raises ConfigError if the images can't be added to the result.
        """
        wanted = Mapping if isinstance(others[0], Mapping) else (list, tuple)
        try:
            collated = self.collate(others if self.batched else others[0])
        except Exception as error:
            if not getattr(self.collate, "__module__", "").startswith("torch.utils.data."):
                error.add_note(_WITHOUT_IMAGES)
            raise
        if not isinstance(collated, wanted):
            kind = "dict" if wanted is Mapping else "list or tuple"
            raise ConfigError(
                f"collate_fn returned a {type(collated).__name__}, wanted a {kind}. "
                f"{_WITHOUT_IMAGES}"
            )
        return collated


def reject_rebuilt_loader(samples: Any) -> Any:
    """The collate function that a loader with augment= shows; raises ConfigError if it is
    called."""
    raise ConfigError(
        f"{len(samples)} samples were collated outside of Penstock's DataLoader, by a framework "
        "that rebuilt it without augment=. See docs/howto/trainers.md for the option to switch off."
    )


def image_keys(sample: Any) -> tuple[Any, ...]:
    """Return the keys of the images in a sample; none if the sample is an image. Raises
    ConfigError.

    Besides the first image, values that are certainly images count: a PIL image, encoded bytes with
    an image's header, pixels of three channels; but not a value with a mask's name.
    """
    if _is_image(sample):
        return ()
    keys = [key for key, value in _items(sample) if _is_image(value)]
    if isinstance(sample, Mapping):
        named = [key for key in IMAGE_KEYS if key in keys]
        keys = [*named, *(key for key in keys if key not in named)]
    if not keys:
        for key, value in _items(sample):
            if _holds_image(value):
                raise ConfigError(
                    f"augment=: the image is inside {key!r}, a {type(value).__name__}, but only "
                    "the top level of a sample may hold images. Make the dataset return flat "
                    "samples, and nest them in the training loop."
                )
        raise ConfigError(
            f"augment=: got a sample of type {type(sample).__name__} without an image; "
            f"{_WANTED_IMAGE}. Make the dataset return the image as it was read, without a "
            "transform."
        )
    first, *others = keys
    is_coloured = _mode(sample[first]) in _COLOURED
    more = [key for key in others if _is_second_image(key, sample[key], is_coloured=is_coloured)]
    return (first, *more)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _holds_image(value: Any) -> bool:
    return any(_is_image(each) or _holds_image(each) for _, each in _items(value))


def _is_second_image(key: Any, value: Any, *, is_coloured: bool) -> bool:
    """Return True if a value next to the first image is an image too.

    is_coloured: the first image has colours. Raises ConfigError for a possible mask, which must not
    be augmented like an image.
    """
    if isinstance(key, str) and any(name in key.lower() for name in _MASK_NAMES):
        return False
    mode = _mode(value)
    if mode is None:
        if getattr(value, "ndim", 0) != 3 or type(value).__name__ == "Mask":
            return False
        return bool(value.shape[0 if isinstance(value, torch.Tensor) else -1] == 3)
    if is_coloured and mode not in _COLOURED:
        raise ConfigError(
            f"augment=: {key!r} is an image of mode {mode} next to one in colours, so it may be a "
            "mask or a gray picture. Recipes treat it as colours, and masks of a torch dataset "
            "don't follow their image. Make the dataset return a picture in colours, with "
            'convert("RGB"), or a mask as an array of (height, width), which stays unchanged; or '
            "use penstock.Dataset, whose masks follow."
        )
    return True


def _mode(value: Any) -> str | None:
    """Return PIL's mode of a PIL image or of encoded bytes; None for pixels and for other bytes.

    A JPEG counts as RGB in any mode.
    """
    if hasattr(value, "convert"):
        return str(value.mode)
    if isinstance(value, np.ndarray | torch.Tensor):
        if value.ndim != 1:
            return None
        value = np.asarray(value).tobytes()
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(value)) as image:
            return "RGB" if image.format == "JPEG" else image.mode
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
        return None


def _is_image(value: Any) -> bool:
    if isinstance(value, bytes | bytearray):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and value.ndim in (1, 2, 3)
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.uint8 and value.ndim in (1, 3)
    return type(value).__module__.startswith("PIL.") and hasattr(value, "convert")


def _dims_of(arrays: Sequence[NDArray[np.uint8]]) -> NDArray[np.int32]:
    """Return the upright heights and widths of images, all encoded or all decoded. Raises
    DatasetError."""
    if arrays[0].ndim > 1:
        return np.array([array.shape[:2] for array in arrays], np.int32)
    dims = upright_sizes(arrays)
    pixels = dims.prod(axis=1, dtype=np.int64)
    for row in np.flatnonzero((pixels < 1) | (pixels > MAX_PIXELS)).tolist():
        raise DatasetError(
            f"augment=: a sample's {len(arrays[row])} bytes are not an image that can be decoded, "
            f"or one of more than {MAX_PIXELS:,} pixels. Remove the sample from the dataset."
        )
    return dims


def as_array(value: Any) -> NDArray[np.uint8]:
    """Return an image as an array for DALI: encoded, (bytes,), or decoded, (h, w, 3). Raises
    DatasetError."""
    if isinstance(value, torch.Tensor):
        value = value.numpy() if value.ndim == 1 else value.permute(1, 2, 0).numpy()
    if isinstance(value, bytes | bytearray):
        value = np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray):
        value = _eight_bits(value)
    if value.ndim == 1:
        return np.ascontiguousarray(value)
    if value.ndim == 2:
        value = value[:, :, None]
    if value.shape[2] == 1:
        value = np.repeat(value, 3, axis=2)
    if value.shape[2] != 3 or 0 in value.shape:
        raise DatasetError(f"augment=: got an image of shape {value.shape}; {_WANTED_IMAGE}.")
    return np.ascontiguousarray(value)


def _eight_bits(image: Any) -> NDArray[np.uint8]:
    """Return a PIL image as uint8 pixels."""
    if image.mode in ("I", "F"):
        raise DatasetError(
            f"augment=: got an image of PIL's mode {image.mode}, which doesn't define the value of "
            "white. Scale the image to 8 bits: uint8 of (height, width)."
        )
    return eight_bits(image)
