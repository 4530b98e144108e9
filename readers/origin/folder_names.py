"""What the names of folders say where they are no classes: pictures, what belongs to them, parts.

A name counts by its words: train2017, train_masks, JPEGImages. Folders are refused as classes only
where all of them say such a thing.
"""

from __future__ import annotations

import re
from typing import Literal

Role = Literal["pictures", "beside", "part", "lists"]
"""Pictures; what belongs to them; a part of a dataset, such as train; lists of files."""

_PICTURES = frozenset(
    ("images", "image", "imgs", "img", "jpegimages", "leftimg8bit", "rightimg8bit", "photos")
) | {"pictures", "rgb", "input", "inputs"}
# What belongs to images, and the name of its field where it is images too.
_BESIDE = {
    **dict.fromkeys(("masks", "mask", "labels", "label", "gt", "seg", "trimaps"), "mask"),
    **dict.fromkeys(("annotations", "annotation", "annot", "groundtruth"), "mask"),
    **dict.fromkeys(("segmentation", "segmentations", "segmentationclass"), "mask"),
    **dict.fromkeys(("ground_truth", "gtfine", "gtcoarse"), "mask"),
    "segmentationobject": "object_mask",
    **dict.fromkeys(("depth", "depths"), "depth"),
    **dict.fromkeys(("disp", "disparity", "disparities"), "disparity"),
    **dict.fromkeys(("targets", "target", "outputs"), "target"),
}
_PARTS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing", "eval"))
_LISTS = frozenset(("imagesets",))


def role_of(name: str) -> Role | None:
    """What a folder's name says that it is; None: it may be a class."""
    lower = name.lower()
    for words in ([lower], _words(lower)):
        if not words or not all(map(_is_known, words)):
            continue
        if any(word in _LISTS for word in words):
            return "lists"
        if any(word in _BESIDE for word in words):
            return "beside"
        return "pictures" if any(word in _PICTURES for word in words) else "part"
    return None


def field_of(name: str) -> str:
    """The field that images in a folder of what belongs to others are as a rule."""
    words = [name.lower(), *_words(name.lower())]
    return next((_BESIDE[word] for word in words if word in _BESIDE), "mask")


def is_part(name: str) -> bool:
    """Whether a name tells of a part of a dataset: val2017, test_images."""
    return any(word in _PARTS for word in _words(name.lower()))


def _words(lower: str) -> list[str]:
    """train_masks, train2017 and trainannot as train, and what else they say."""
    found: list[str] = []
    for word in re.findall("[a-z]+", lower):
        part = next((p for p in _PARTS if word.startswith(p) and word[len(p) :] in _BESIDE), None)
        found += [part, word[len(part) :]] if part else [word]
    return found


def _is_known(word: str) -> bool:
    return word in _PICTURES or word in _BESIDE or word in _PARTS or word in _LISTS
