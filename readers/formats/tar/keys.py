"""Names of members as WebDataset reads them: a sample's key, then what of the sample it is."""

from __future__ import annotations

import re

# Those that no decoder here takes are named too: each is refused with what to do, not passed over.
IMAGES = frozenset(
    (
        *("avif", "bmp", "gif", "heic", "heif", "j2c", "j2k", "jp2", "jpe", "jpeg", "jpg", "jxl"),
        *("pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"),
    )
)
"""Extensions of images."""

_KEY = re.compile(rb"((?:.*/)?[^./][^./]*)\.([^/]*)", re.S)


def split_key(name: bytes) -> tuple[bytes, str] | None:
    """(key, extension in lower case): the path up to the first dot of its last part, and what
    follows; None for a name without."""
    found = _KEY.fullmatch(name)
    return (
        None if found is None else (found[1], found[2].decode("utf-8", "surrogateescape").lower())
    )


def extension(name: bytes) -> str:
    """What follows a name's key; "" without one."""
    found = split_key(name)
    return "" if found is None else found[1]
