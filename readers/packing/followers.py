"""What belongs to an image that is resized on its way into a pack: its masks, boxes and points."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers.fields.decode import decode_mask
from penstock.readers.fields.facts import Facts
from penstock.readers.fields.field_types import Boxes, Keypoints, Mask
from penstock.readers.fields.masks import mask_codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.fields.schema import Schema
    from penstock.readers.packing.sample import PackSample
    from penstock.readers.types import Encoded

    Size = tuple[int, int]

_HIDDEN = -1


def follow(
    sample: PackSample, image: str, *, before: Size, after: Size, schema: Schema
) -> PackSample:
    """The sample with everything that belongs to an image resized as that was. before, after: its
    height and width. Raises ValueError for a mask that can't be written."""
    if before == after:
        return sample
    payloads, facts, arrays = dict(sample.payloads), dict(sample.facts), dict(sample.arrays)
    for name in followers(schema, image):
        if name in payloads:
            payloads[name], facts[name] = resized_mask(payloads[name], after)
        elif name in arrays and not getattr(schema[name], "is_normalised", False):
            arrays[name] = scaled(arrays[name], before, after)
    return replace(sample, payloads=payloads, facts=facts, arrays=arrays)


def followers(schema: Schema, image: str) -> Iterator[str]:
    """The masks, boxes and points of an image."""
    for name, type in schema.items():
        if isinstance(type, Mask | Boxes | Keypoints) and type.of == image:
            yield name


def resized_mask(payload: Encoded, size: Size) -> tuple[Encoded, Facts]:
    """A mask in another size, as PNG, by nearest neighbours: each pixel takes the class that its
    centre lies in. Raises ValueError for class numbers that no PNG holds."""
    from PIL import Image

    classes = decode_mask(payload)
    rows, columns = (nearest(*sides) for sides in zip(classes.shape, size, strict=True))
    classes = classes[rows[:, None], columns]
    if classes.size and not 0 <= classes.min() <= classes.max() < 2**16:
        raise ValueError(
            f"class numbers {classes.min()} to {classes.max()}: a resized mask is a PNG, which "
            "holds 0 to 65,535"
        )
    is_small = classes.dtype == np.uint8
    buffer = io.BytesIO()
    Image.fromarray(classes if is_small else classes.astype(np.uint16)).save(buffer, "PNG")
    data = np.frombuffer(buffer.getvalue(), np.uint8)
    codec = mask_codec("png", classes)
    return data, Facts(crc32c(data), 0, len(data), (*size, 1), codec)


def nearest(before: int, after: int) -> NDArray[np.int64]:
    """Which pixel of one side stands for each of another, int64, shape (after,)."""
    return (2 * np.arange(after, dtype=np.int64) + 1) * before // (2 * after)


def scaled(rows: NDArray[Any], before: Size, after: Size) -> NDArray[np.float32]:
    """Boxes (in any form in pixels) or points in an image of another size. A point at (-1, -1),
    which is how one that can't be seen is written, stays there."""
    by = np.array([after[1] / before[1], after[0] / before[0]])
    found = rows.astype(np.float64) * np.tile(by, rows.shape[1] // 2)
    if rows.shape[1] == 2:
        found[(rows == _HIDDEN).all(axis=1)] = _HIDDEN
    numbers: NDArray[np.float32] = found.astype(np.float32)
    return numbers
