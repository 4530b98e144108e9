"""Define the small values that readers exchange and pass to `augment` and `pipeline`.

They are the facts that checks and indexes record of one sample (`ImageFacts`, `Facts`,
`Rejection`), the bounds of image sizes, the encoded images of a batch, and the types of the
callables that decode images and report progress. Nothing in this module does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

_Found = TypeVar("_Found")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Numbers = NDArray[Any]
Encoded = NDArray[np.uint8]
"""One encoded sample: shape (bytes,), read-only, a view of a mapped file if possible."""


UNFIT = "Correct the value, or the field's type in schema=, or leave the sample out"
"""Ends the reason against a sample whose bytes are intact but whose value doesn't fit."""


def offsets_of(lengths: Sequence[Any] | NDArray[Any]) -> Ints:
    """Return where each of some neighbours begins, and the end of the last, int64, shape (n + 1,).
    lengths: of them."""
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The result of decoding one image fully. height, width: after the EXIF orientation."""

    height: int
    width: int
    channels: int
    codec: str


@dataclass(frozen=True, slots=True)
class ImageRange:
    """The bounds of the sizes of a dataset's images: upright heights and widths, inclusive."""

    min_height: int
    max_height: int
    min_width: int
    max_width: int

    @classmethod
    def of(cls, heights: Sequence[int], widths: Sequence[int]) -> ImageRange:
        """Return the bounds of some heights and widths, at least one of each."""
        return cls(min(heights), max(heights), min(widths), max(widths))

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


def accepted(found: _Found | Rejection) -> _Found:
    """Return a result. Raises ValueError for a Rejection, with its reason."""
    if isinstance(found, Rejection):
        raise ValueError(found.reason)
    return found


def failure(error: Exception) -> str:
    """Describe an error that a decoder raised for damaged bytes, in one line. Raises the error
    itself if the machine caused it."""
    from penstock.cache.base import machine_remedy

    if machine_remedy(error) is not None:
        raise error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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


CODECS = {
    str(codec): codec
    for is_fortran in (False, True)
    for kind, sizes in NUMBER_SIZES.items()
    for size in sizes
    for order in ("<>" if size > 1 else "|")
    for codec in (ArrayCodec(np.dtype(f"{order}{kind}{size}"), is_fortran),)
}
"""All codecs that the facts of an array can name; tables store their numbers in this order."""


def array_codec(codec: str) -> ArrayCodec | None:
    """Return the codec of an array by its name; None for other text. The name is untrusted."""
    return CODECS.get(codec)
