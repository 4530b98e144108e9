"""What an encoded image says of itself, read before DALI may see it.

A sample whose header can't be parsed, or whose window lies outside its image, doesn't fail a batch
of DALI but ends the process (see `graph`), and so do some damaged JPEG 2000 files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.augment.second_look import is_jpeg2000, jpeg2000_refusal
from penstock.cache.base.machine import machine_remedy
from penstock.readers.types import MAX_PIXELS, Rejection, pixel_refusal

if TYPE_CHECKING:
    from penstock.readers.types import Encoded, EncodedBatch

_SMALLEST_FILE_BYTES = 16  # below that no image format has a header
# Sample types that DALI 2.4 was seen to decode; int32 (TIFF) ends a run half-way.
_DECODABLE_DTYPES = ("uint8", "uint16", "float32")


@dataclass(frozen=True, slots=True)
class Header:
    """What an encoded image says of itself, before its orientation is applied. is_wide: its values
    have more than 8 bits."""

    height: int
    width: int
    channels: int
    codec: str
    is_wide: bool = False

    @property
    def pixels(self) -> int:
        """Height times width."""
        return self.height * self.width


def read_header(sample: Encoded) -> Header | Rejection:
    """What an encoded image says of itself, about 4 us; no pixel is decoded."""
    from nvidia import nvimgcodec

    if len(sample) < _SMALLEST_FILE_BYTES:
        return Rejection(f"not an image: {len(sample)} byte(s)" if len(sample) else "empty file")
    try:
        stream = nvimgcodec.CodeStream(sample)
        dtype = str(stream.dtype)
        header = Header(
            stream.height, stream.width, stream.num_channels, stream.codec_name, dtype != "uint8"
        )
    except (RuntimeError, ValueError):  # what nvImageCodec raises for bytes that it can't parse
        return Rejection("not an image of a format that DALI decodes")
    except Exception as error:  # and what its binding does for files that it parses half-way
        if machine_remedy(error) is not None:
            raise
        return Rejection(
            f"its header can't be understood ({type(error).__name__}: {error}): convert it to "
            "JPEG, PNG or WebP"
        )
    if dtype not in _DECODABLE_DTYPES:
        return Rejection(f"its samples are {dtype}; DALI decodes {', '.join(_DECODABLE_DTYPES)}")
    if header.codec == "tiff" and header.channels == 2:
        return Rejection(
            "a TIFF of 2 channels, which DALI takes for colours: convert it to PNG, or drop its "
            "alpha channel"
        )
    return header


def safe_header(sample: Encoded, *, max_pixels: int = MAX_PIXELS) -> Header | Rejection:
    """As `read_header`, of bytes that nobody has verified: JPEG 2000, which may end the process,
    is decoded whole by Pillow before, up to max_pixels. Raises MissingDependencyError."""
    refusal = jpeg2000_refusal(sample, max_pixels=max_pixels) if is_jpeg2000(sample) else None
    return read_header(sample) if refusal is None else refusal


def capped_header(sample: Encoded, *, max_pixels: int) -> Header | Rejection:
    """As `safe_header`, of images of at most max_pixels."""
    header = safe_header(sample, max_pixels=max_pixels)
    if isinstance(header, Rejection):
        return header
    return pixel_refusal(header.width, header.height, max_pixels=max_pixels) or header


def bad_headers(batch: EncodedBatch, *, max_pixels: int | None = None) -> dict[int, str]:
    """Rows that would crash DALI, and why: no header, one of another size than was stored, or a
    JPEG 2000 file that Pillow can't decode. max_pixels: more are bad too; None: the images
    were verified when they were indexed or packed."""
    bad: dict[int, str] = {}
    for row, (sample, dims) in enumerate(zip(batch.encoded, batch.dims.tolist(), strict=True)):
        # Of what was verified the stored size was within the limit then.
        most = max_pixels or max(MAX_PIXELS, dims[0] * dims[1])
        header = capped_header(sample, max_pixels=most)
        if isinstance(header, Rejection):
            bad[row] = header.reason
        # Stored dims are upright, these may not be.
        elif sorted((header.height, header.width)) != sorted(dims):
            stored = " x ".join(map(str, dims))
            bad[row] = f"it is {header.height} x {header.width} pixels, and {stored} was stored"
    return bad
