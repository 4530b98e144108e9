"""Infer the type of a field from the names of its files, or of members of an archive."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.readers.fieldtypes import Array, Audio, Bytes, FieldType, Image, Text, Video
from penstock.readers.files import KINDS, Kind, extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


TYPES: Mapping[Kind, FieldType] = {
    "image": Image(),
    "text": Text(),
    "array": Array(),
    "audio": Audio(),
    "video": Video(),
    "json": Bytes(),
    "given": Bytes(),
}
"""The type of a field that consists of files of one kind."""

_BYTES = frozenset(("bin", "xml", "pt", "npz", "mat"))


def type_by_names(names: Iterable[bytes]) -> FieldType:
    """Return the type of most files, according to their names alone.

    A file without a known extension is an image: many images have none. Checking reports what is
    wrong with the other files.
    """
    counts = Counter(
        Bytes() if own in _BYTES else TYPES[KINDS.get(own, "image")]
        for own in map(extension, names)
    )
    return max(counts, key=counts.__getitem__, default=Image())
