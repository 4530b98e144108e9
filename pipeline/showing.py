"""Show batches, datasets and samples as pictures, in a notebook or as a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import IMAGENET_MEAN, IMAGENET_STD, Normalize
from penstock.cache import ConfigError, explain_arguments
from penstock.readers import Reading, Source, contact_sheet, displayed_pixels, pictures_of, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

    from penstock.readers import Scaling

_MOST, _MOST_IN_ROW = 256, 16
_TOLERANCE = 0.02  # of values that an operation rounded or a filter overshot


@explain_arguments(ConfigError)
def show(
    what: Any,
    *,
    dataset: Source | None = None,
    classes: Sequence[str] = (),
    normalize: Normalize | Scaling | None = None,
    count: int = 16,
    width: int = 1200,
) -> Image:
    """Draw images with their boxes, class names, masks and points, on one sheet.

    ```python
    import penstock

    penstock.show(penstock.Dataset("photos/train"), count=8).save("samples.png")
    ```

    A notebook displays the result; elsewhere save it: `penstock.show(batch).save("batch.png")`.

    - what: a batch (a dict by field, or a tuple), a dataset (samples spread over it, with the
      number for `dataset[i]`), a sample, or a list of samples. torchvision's batches, (images,
      targets), are batches, too.
    - dataset: of a batch: it names the fields of a tuple, their types and the classes. Without it,
      names and shapes decide what a field is.
    - classes: names of classes by number, if there is no dataset that has them.
    - normalize: the recipe's `Normalize`, or (mean, std), which is undone. None: the values of
      float images decide whether they are taken as 0 to 1, as 0 to 255, or as normalised by
      ImageNet's numbers.
    - count: the most samples to draw, 1 to 256.
    - width: of the sheet, roughly, in pixels.

    Returns an image of Pillow. Raises ConfigError for anything else, and if there are no images;
    and the errors of reading a dataset's samples.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST:
        raise ConfigError(f"show: got count={count!r}, wanted 1 to {_MOST} samples.")
    if not isinstance(width, int) or isinstance(width, bool) or not 64 <= width <= 16_384:
        raise ConfigError(f"show: got width={width!r}, wanted 64 to 16384 pixels.")
    if isinstance(what, Source):
        dataset, by_shape = what, False
        places = spread(what.contents.samples, count)
        samples: list[Mapping[str, Any]] = [{"id": i, **what[i]} for i in places]
    else:
        samples, by_shape = _samples(what, dataset)
        samples = samples[:count]
    schema = {} if dataset is None else dataset.schema
    names = classes or (() if dataset is None else dataset.classes)
    if isinstance(normalize, Normalize):
        normalize = normalize.mean, normalize.std
    scaling = _scaling(samples) if normalize is None else normalize
    displayed = partial(displayed_pixels, scaling=scaling)
    how = Reading(schema=schema, classes=tuple(names), by_shape=by_shape, displayed=displayed)
    each = [pictures_of(sample, how) for sample in samples]
    pictures = [picture for some in each for picture in some]
    if not pictures:
        fields = dict.fromkeys(name for sample in samples for name in sample)
        raise ConfigError(
            f"show: found no images among the fields {list(fields)}. An image is a tensor of shape "
            "(3, height, width), or 1 for grey; a batch has one more dimension, or a list of them."
        )
    views = set(map(len, each))  # a row for each sample, if all have as many pictures
    columns = max(views) if len(views) == 1 < len(each) and 1 < max(views) <= _MOST_IN_ROW else None
    return contact_sheet(pictures, width=width, columns=columns)


def _samples(what: Any, dataset: Source | None) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the samples of a batch, or of a list of them, and whether their fields have no names.
    Raises ConfigError for anything else."""
    if isinstance(what, Mapping):
        count = _batch_size(what.values())
        return ([what] if count is None else [*_rows(what, count)]), False
    if isinstance(what, Sequence) and not isinstance(what, str | bytes) and len(what):
        if all(isinstance(each, Mapping) for each in what):
            return [*what], False
        count = _batch_size(what)
        if count is not None:
            return [*_rows(_named(what, dataset), count)], dataset is None
    raise ConfigError(
        f"show: got {type(what).__name__}, wanted a batch with images (a dict, or a tuple), a "
        "dataset, a sample such as dataset[0], or a list of samples. For a loader, pass a batch: "
        "penstock.show(next(iter(loader)))."
    )


def _named(values: Sequence[Any], dataset: Source | None) -> dict[str, Any]:
    """Return a tuple's values by the dataset's fields, or by their places."""
    if dataset is None:
        return {str(place): value for place, value in enumerate(values)}
    names = [*dataset.fields, "valid"]
    if len(values) not in (len(names) - 1, len(names)):
        raise ConfigError(
            f"show: got a batch of {len(values)} values for a dataset of the fields "
            f"{list(dataset.fields)}. Pass the dataset of its loader, or a dict by field."
        )
    return dict(zip(names, values, strict=False))


def _batch_size(values: Any) -> int | None:
    """Return the number of samples of a batch's values; None if they are those of one sample."""
    for value in values:
        if getattr(value, "ndim", 0) in (4, 5):
            return len(value)
        if isinstance(value, list | tuple) and len(value) and getattr(value[0], "ndim", 0) == 3:
            return len(value)
    return None


def _rows(batch: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yield each sample of a batch; torchvision's targets come in the place of their list."""
    for row in range(count):
        sample: dict[str, Any] = {}
        for name, value in batch.items():
            if not hasattr(value, "__getitem__") or len(value) != count:
                continue
            own = value[row]
            sample |= own if isinstance(own, Mapping) else {name: own}
        yield sample


def _scaling(samples: Sequence[Mapping[str, Any]]) -> Scaling:
    """Return what converts the float pixels of samples to those of an image, by their values."""
    low, high, numbers = _range(samples)
    if _TOLERANCE + low >= 0 and high <= 256:
        return (0.0,), (1.0 if high <= 1 + _TOLERANCE else 1 / 255,)
    ends = [np.array(IMAGENET_STD) * end + np.array(IMAGENET_MEAN) for end in (low, high)]
    if numbers == {3} and ends[0].min() >= -0.3 and ends[1].max() <= 1.3:
        return IMAGENET_MEAN, IMAGENET_STD
    span = max(high - low, 1e-12)
    return (-low / span,), (1 / span,)


def _range(samples: Sequence[Mapping[str, Any]]) -> tuple[float, float, set[int]]:
    """Return the least and the largest value of all float images, and their channels."""
    low, high, channels = math.inf, -math.inf, set[int]()
    for value in (value for sample in samples for value in sample.values()):
        shape: Any = getattr(value, "shape", ())
        is_float = "float" in str(getattr(value, "dtype", ""))
        if is_float and len(shape) in (3, 4) and shape[-3] in (1, 3) and 0 not in shape:
            low, high = min(low, float(value.min())), max(high, float(value.max()))
            channels.add(int(shape[-3]))
    return (low, high, channels) if channels else (0.0, 1.0, channels)
