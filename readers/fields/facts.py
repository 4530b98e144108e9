"""What is noted of one field of one good sample: where its payload lies, and what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

_CODEC = re.compile(r"([<>|])([biufc])([0-9]{1,2})(:F)?")
_KINDS = {
    "b": (1,),
    "i": (1, 2, 4, 8),
    "u": (1, 2, 4, 8),
    "f": (2, 4, 8),
    "c": (8, 16),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a check of one field of a good sample told.

    crc32c: of the payload: what will be read, bytes [start, start + size) of what was examined
    (without an .npy file's header, or a text's byte order mark). shape: height, width (turned
    upright) and channels of an image or a mask, the shape of an array, else (). codec: an image's
    codec; of arrays numpy's `dtype.str`, with ":F" behind it where columns come first; "utf-8" of
    text; of sound and video the container; "bytes".
    """

    crc32c: int
    start: int
    size: int
    shape: tuple[int, ...]
    codec: str


@dataclass(frozen=True, slots=True)
class ArrayCodec:
    """How an array's numbers lie in its payload."""

    dtype: np.dtype[np.generic]
    is_fortran: bool = False

    def __str__(self) -> str:
        return self.dtype.str + (":F" if self.is_fortran else "")

    @property
    def name(self) -> str:
        """The dtype's name whatever its byte order, such as "float32"."""
        return str(self.dtype.newbyteorder("=").name)


def array_codec(codec: str) -> ArrayCodec | None:
    """What an array's codec says; None for what is none. It may come from anybody."""
    found = _CODEC.fullmatch(codec)
    if found is None or int(found[3]) not in _KINDS[found[2]]:
        return None
    return ArrayCodec(np.dtype(found[1] + found[2] + found[3]), found[4] is not None)
