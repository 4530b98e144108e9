"""Which fields are places in an image by their names, whatever their types say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.readers.fields.field_types import Array, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.fields.field_types import FieldType

_LAST_WORDS = frozenset(
    ("box", "boxes", "bbox", "bboxes", "xyxy", "xywh", "cxcywh", "keypoints", "kpts", "landmarks")
)


def stay_behind(types: Mapping[str, FieldType]) -> list[str]:
    """Fields that are boxes or points by their names and not by their types: nothing moves them
    with an image."""
    return [
        name
        for name, type in types.items()
        if isinstance(type, Array | Text)
        and getattr(type, "of", None) is None
        and re.split(r"[._]", name.lower())[-1] in _LAST_WORDS
    ]
