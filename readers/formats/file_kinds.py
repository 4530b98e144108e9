"""Infer what a file, or a member of an archive, holds from the extension of its name."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from penstock.readers.fieldtypes import Array, Audio, Bytes, Image, Text, Video
from penstock.readers.files import extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.readers.fieldtypes import FieldType

Kind = Literal["image", "text", "array", "audio", "video", "json", "class", "given"]
"""The kind of content of a file. class: a label in a tar file. given: an unknown kind that the user
asked for."""

# Images include those that Penstock can't decode: they are rejected with a remedy, not skipped.
_EXTENSIONS: Mapping[Kind, str] = {
    "image": "avif bmp gif heic heif j2c j2k jp2 jpe jpeg jpg jxl pbm pgm png pnm ppm tif tiff "
    "webp",
    "audio": "wav flac mp3 ogg oga opus m4a aac aif aiff au wma",
    "video": "mp4 m4v webm mkv mov avi mpg mpeg flv wmv ogv",
    "text": "txt caption",
    "array": "npy",
    "json": "json",
}
KINDS: Mapping[str, Kind] = {
    each: kind for kind, listed in _EXTENSIONS.items() for each in listed.split()
}
"""The kinds of files by their extensions, in lower case."""

IMAGES = frozenset(each for each, kind in KINDS.items() if kind == "image")
"""Extensions of images."""

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


def kind_of(name: bytes) -> Kind | None:
    """Return the kind of a file by its name; None if its extension is of no known kind."""
    return KINDS.get(extension(name))


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


def stem(name: bytes) -> bytes:
    """Return a file's name without its extension, folders included."""
    return name.rpartition(b".")[0] if b"." in name.rpartition(b"/")[2] else name
