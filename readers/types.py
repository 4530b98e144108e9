"""Define the small values that readers exchange and pass to `augment` and `pipeline`.

They are the facts that checks and indexes record of one sample (`ImageFacts`, `Facts`,
`Rejection`), the bounds of image sizes, the encoded images of a batch, and the types of the
callables that decode images and report progress. Nothing in this module does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

Encoded = NDArray[np.uint8]
"""One encoded sample: shape (bytes,), read-only, a view of a mapped file if possible."""


UNFIT = "Correct the value, or the field's type in schema=, or leave the sample out"
"""Ends the reason against a sample whose bytes are intact but whose value doesn't fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The result of decoding one image fully. height, width: after the EXIF orientation."""

    height: int
    width: int
    channels: int
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRange:
    """The bounds of the sizes of a dataset's images: upright heights and widths, inclusive."""

    min_height: int
    max_height: int
    min_width: int
    max_width: int

    @property
    def fixed(self) -> tuple[int, int] | None:
        """The height and width if all images share them, else None."""
        if self.min_height == self.max_height and self.min_width == self.max_width:
            return self.min_height, self.min_width
        return None


ANY_SIZE = ImageRange(min_height=1, max_height=65_535, min_width=1, max_width=65_535)
"""The range of images that weren't measured."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why one sample can't be used, as text for the quarantine report."""

    reason: str


MAX_PIXELS = 2**27
"""The default number of pixels of the largest image or mask that is decoded: 134 million, 400 MB of
RGB."""


def pixel_refusal(width: int, height: int, *, max_pixels: int) -> Rejection | None:
    """Return why an image has no pixels or too many, or None."""
    if 1 <= width * height <= max_pixels:
        return None
    return Rejection(
        f"its header has {width} x {height} pixels; wanted 1 to {max_pixels:,} in total (for "
        "larger images pass max_pixels=)"
    )


Progress = Callable[[int, int, int], None]
"""Called as progress(done samples, total samples, done bytes) during a long task."""

Verify = Callable[[Sequence[Encoded]], list[ImageFacts | Rejection]]
"""Decodes each sample fully; returns results in the same order, and never raises for a bad
sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The encoded images of one field of a batch, in the batch's order, which a graph decodes.

    - ids: sample ids, int64, shape (n,).
    - encoded: n views of uint8, shape (bytes,) each; they keep their mapped file alive.
    - dims: upright height and width, int32, shape (n, 2).
    """

    ids: NDArray[np.int64]
    encoded: list[Encoded]
    dims: NDArray[np.int32]


_CODEC = re.compile(r"([<>|])([biufc])([0-9]{1,2})(:F)?")
NUMBER_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
"""The supported sizes of numbers in bytes, by numpy's kind."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a check of one field of a good sample recorded.

    crc32c: of the payload: the bytes [start, start + size) of the sample that will be read (without
    the header of an .npy file, or the byte order mark of a text). shape: height, width (upright)
    and channels of an image or a mask, the shape of an array, else (). codec: an image's codec; for
    arrays numpy's `dtype.str`, with ":F" at its end if columns come first; "utf-8" for text; the
    container of sound and video; "bytes". is_progressive: True for a progressive JPEG.
    """

    crc32c: int
    start: int
    size: int
    shape: tuple[int, ...]
    codec: str
    is_progressive: bool = False

    @classmethod
    def of(
        cls, data: Encoded, *, start: int = 0, shape: tuple[int, ...] = (), codec: str = "bytes"
    ) -> Facts:
        """Return the facts of the payload of a sample that begins at byte `start`."""
        return cls(crc32c(data[start:]), start, len(data) - start, shape, codec)


@dataclass(frozen=True, slots=True)
class ArrayCodec:
    """The layout of an array's numbers in its payload."""

    dtype: np.dtype[np.generic]
    is_fortran: bool = False

    def __str__(self) -> str:
        return self.dtype.str + (":F" if self.is_fortran else "")

    @property
    def native(self) -> np.dtype[np.generic]:
        """The dtype in the machine's byte order."""
        return self.dtype.newbyteorder("=")

    @property
    def name(self) -> str:
        """The dtype's name in any byte order, such as "float32"."""
        return str(self.native.name)


def array_codec(codec: str) -> ArrayCodec | None:
    """Parse the codec of an array; None for other text. The codec is untrusted."""
    found = _CODEC.fullmatch(codec)
    if found is None or int(found[3]) not in NUMBER_SIZES[found[2]]:
        return None
    return ArrayCodec(np.dtype(found[1] + found[2] + found[3]), found[4] is not None)
