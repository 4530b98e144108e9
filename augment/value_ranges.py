"""Warn of images whose values DALI's scaling to 8 bits makes all black, or all white.

DALI divides 16 bits by 257, whatever the largest value is, and takes floats for shares of white; of
PNM files it ignores the maximum that they state.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from penstock.augment.dali import load_dali
from penstock.augment.headers import Header, read_header
from penstock.cache.errors import PenstockWarning
from penstock.readers.fields.sniff import HEAD_BYTES, sniff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.types import Encoded

_LOOKED_AT = 8
_MOST_PIXELS = 2**24  # of them all: 200 MB as floats
WHITE = 65535
_DARK = 0.25  # of white: 14 bits of 16
_PNM = re.compile(rb"P[2356]\s+(?:#[^\n]*\n\s*)*[0-9]+\s+[0-9]+\s+([0-9]+)\s")
_WIDE = ("png", "tiff", "pnm", "jpeg2000")


def warn_of_values(samples: Sequence[Encoded], *, rounded: bool = False) -> None:
    """Decode the first few images of more than 8 bits; warn if all their values are small or some
    are too large for DALI.

    samples: whose headers DALI can parse; of those that don't decode nothing is said. rounded: name
    a whole number of bits, so that the same is said of other samples of the dataset.
    """
    wide = _wide(samples)
    if not wide:
        return
    try:
        least, most = _range(wide)
    except RuntimeError:  # whoever decodes the samples says so
        return
    if most > 1:
        seen = "more than 1" if rounded else f"{least:g} to {most:g}"
        _warn(
            f"of floats with values of {seen}, and all above 1 becomes white",
            "Divide them by their largest value",
        )
    else:
        warn_of_dark(least, most, rounded=rounded)


def warn_of_dark(least: float, most: float, *, rounded: bool) -> None:
    """Warn if images of 16 bits use so few of them that 8 bits keep next to nothing.

    least, most: of their values, as shares of white. rounded: as of `warn_of_values`.
    """
    if not 0 < most <= _DARK:
        return
    low, high = round(least * WHITE), round(most * WHITE)
    if rounded:
        low, high = 0, 2 ** high.bit_length() - 1
    _warn(
        f"of 16 bits with values from {low:,} to {high:,} of {WHITE:,}, and 8 bits keep "
        f"{low // 257} to {-(-high // 257)} of 255: they become almost black",
        f"Multiply them so that the largest is near {WHITE:,}",
    )


def _warn(what: str, remedy: str) -> None:
    warnings.warn(
        f"The images that were looked at are {what}. {remedy} and write the files again, or decode "
        'them yourself: Map(fn, fields="image", returns={"image": Array("float32", (height, '
        "width))}).",
        PenstockWarning,
        stacklevel=3,
    )


def _wide(samples: Sequence[Encoded]) -> list[Encoded]:
    """The first images of more than 8 bits, or of another maximum than 255; not the largest."""
    found: list[Encoded] = []
    pixels = 0
    for sample in samples:
        head = sample[:HEAD_BYTES].tobytes()
        codec = sniff(head)
        if codec not in _WIDE or (codec == "png" and head[24] != 16):
            continue
        maximum = _PNM.match(head) if codec == "pnm" else None
        if codec == "pnm" and (maximum is None or int(maximum[1]) in (255, WHITE)):
            continue
        header = read_header(sample)
        if not isinstance(header, Header) or not (header.is_wide or maximum):
            continue
        pixels += header.pixels
        if pixels > _MOST_PIXELS:
            break
        found.append(sample)
        if len(found) == _LOOKED_AT:
            break
    return found


def _range(samples: list[Encoded]) -> tuple[float, float]:
    """The least and the largest value, as shares of white. Raises RuntimeError as DALI does."""
    dali = load_dali()
    from nvidia.dali import fn, types

    pipe: Any = dali.Pipeline(
        batch_size=len(samples),
        num_threads=1,
        device_id=None,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with pipe:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        images = fn.decoders.image(encoded, output_type=types.RGB, dtype=types.FLOAT)
        pipe.set_outputs(fn.reductions.min(images), fn.reductions.max(images))
    pipe.build()
    pipe.feed_input("encoded", samples)
    least, most = pipe.run()
    return float(least.as_array().min()), float(most.as_array().max())
