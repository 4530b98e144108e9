"""What a file's name tells of it: its extension, its stem, and the type of field that it can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.readers.fields.field_types import Array, Audio, Bytes, Image, Text, Video
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from penstock.readers.fields.field_types import FieldType

IMAGES = frozenset(
    ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "jp2", "ppm", "pgm", "pbm", "pnm")
)
TEXTS = frozenset(("txt", "caption"))
ARRAYS = frozenset(("npy",))
AUDIO = frozenset(("wav", "flac", "mp3", "ogg", "opus", "m4a"))
VIDEO = frozenset(("mp4", "mkv", "avi", "mov", "webm"))


def stem(name: bytes) -> bytes:
    """A file's name without its extension, folders included."""
    return name.rpartition(b".")[0] if b"." in name.rpartition(b"/")[2] else name


def type_of(name: bytes) -> FieldType:
    """The type that a file has by its name alone; what says nothing is an image, as many have no
    extension."""
    found = extension(name)
    if found in TEXTS:
        return Text()
    if found in ARRAYS:
        return Array()
    if found in AUDIO:
        return Audio()
    if found in VIDEO:
        return Video()
    return Bytes() if found in ("bin", "json", "xml", "pt", "npz", "mat") else Image()
