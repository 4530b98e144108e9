"""Guess from a field's name that it holds masks, boxes or points, where its type doesn't say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.readers.fields.field_types import Array, Image, Mask, Text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from penstock.readers.fields.field_types import FieldType

_LOSSLESS = frozenset(("png", "bmp", "tif", "tiff", "pgm"))
_NAMES = ("mask", "seg")


def masks_by_name(
    types: Mapping[str, FieldType],
    extensions: Mapping[str, Iterable[str]],
    *,
    given: Collection[str] = (),
) -> tuple[dict[str, Mask], list[str]]:
    """The fields that are masks, and what was decided, a sentence each: those whose name is or ends
    in "mask" or "seg" and that have files without loss, of the only other image. Among several
    images none is chosen. One lossless file decides: others can't hold class numbers, and checking
    leaves them out, while as pictures all of them would pass.

    extensions: that each field's files have, in lower case; given: fields whose type somebody said.
    """
    images = [name for name, type in types.items() if isinstance(type, Image)]
    likely = [name for name in images if name not in given and is_mask_name(name, extensions[name])]
    others = [name for name in images if name not in likely]
    if len(others) == 1:
        notes = [
            f'"{name}" is read as masks of "{others[0]}", by its name: a class number for each '
            f'pixel{_lossy(extensions[name])}. For pictures pass schema={{"{name}": Image()}}'
            for name in likely
        ]
        return {name: Mask(of=others[0]) for name in likely}, notes
    notes = [
        f'"{name}" is read as pictures, as there are several images: for masks say of which, '
        f'schema={{"{name}": Mask(of="{others[0]}")}}'
        for name in likely
        if others
    ]
    return {}, notes


def is_mask_name(name: str, extensions: Iterable[str]) -> bool:
    """Whether a field may be masks by its name and its files' extensions, none for its name."""
    found = {*extensions}
    return name.rpartition("_")[2] in _NAMES and (not found or not found.isdisjoint(_LOSSLESS))


def _lossy(extensions: Iterable[str]) -> str:
    others = sorted({*extensions} - _LOSSLESS)
    return f", which {', '.join(f'.{each}' for each in others)} files can't hold" if others else ""


_LAST_WORDS = frozenset(
    ("box", "boxes", "bbox", "bboxes", "xyxy", "xywh", "cxcywh", "keypoints", "kpts", "landmarks")
)


def untyped_places(types: Mapping[str, FieldType]) -> list[str]:
    """Fields that are boxes or points by their names and not by their types: nothing moves them
    with an image."""
    return [
        name
        for name, type in types.items()
        if isinstance(type, Array | Text)
        and getattr(type, "of", None) is None
        and re.split(r"[._]", name.lower())[-1] in _LAST_WORDS
    ]
