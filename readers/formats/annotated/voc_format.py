"""Read Pascal VOC: images in JPEGImages, an XML file for each in Annotations, and lists of the
images of each part in ImageSets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from xml.etree import ElementTree

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import Array, Boxes, FieldType, ImageSize, Text
from penstock.readers.files import IMAGES, extension, is_passed_over, printable, stem
from penstock.readers.formats.annotated.annotated_format import (
    BOXES,
    IMAGE,
    IMAGE_ID,
    LABELS,
    ORIGINAL_SIZE,
    Annotated,
    AnnotatedFiles,
    AnnotatedFormat,
    check_split,
)
from penstock.readers.formats.folder import list_folder, read_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.origin import Entry, Origin

VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
"""The classes of Pascal VOC, by number."""

_PICTURES, _NOTES, _LISTS = b"JPEGImages/", b"Annotations/", b"ImageSets/"
_FLAGS = ("difficult", "truncated", "occluded")
_YEARS = re.compile(rb"VOC\d{4}")
_ABSENT = "-1"


class VocFormat(AnnotatedFormat):
    """The format of images annotated as in Pascal VOC."""

    name: ClassVar[str] = "voc"
    has_splits: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Return True if there are folders of images and of annotations. Raises ConfigError for the
        folder above several years."""
        folders = {name for name in origin.names().folders if not is_passed_over(name)}
        years = sorted(filter(_YEARS.fullmatch, folders))
        if years and len(years) == len(folders) and self.may_recognise(origin):
            last = f"{origin.url.rstrip('/')}/{years[-1].decode()}"
            raise ConfigError(
                f"{origin.url}: this folder holds several years of Pascal VOC. Give one of them: "
                f"{last}."
            )
        return {_PICTURES[:-1], _NOTES[:-1]} <= folders and self.may_recognise(origin)

    def list(self, origin: Origin) -> VocFiles:
        """List the images and annotations. Raises as `list_folder` does, DatasetError for other
        folders, and ConfigError for a part that doesn't exist."""
        found = list_folder(origin)
        if not any(entry.name.startswith(_NOTES) for entry in found.entries):
            raise DatasetError(
                f"{origin.url}: there is no folder Annotations with XML files. Give the folder of "
                "one year of Pascal VOC, such as VOCdevkit/VOC2012."
            )
        return VocFiles(origin, found)


class VocFiles(AnnotatedFiles):
    """The images, the XML files, and the list of the images of one part."""

    def __init__(self, origin: Origin, found: DatasetFiles) -> None:
        self._list = _list_of(origin, found.entries)
        self._notes = {
            stem(entry.name.removeprefix(_NOTES)): entry
            for entry in found.entries
            if entry.name.startswith(_NOTES) and extension(entry.name) == "xml"
        }
        self._pictures = {
            stem(entry.name.removeprefix(_PICTURES)): entry
            for entry in found.entries
            if entry.name.startswith(_PICTURES) and extension(entry.name) in IMAGES
        }
        lists = [] if self._list is None else [self._list]
        super().__init__(origin, found, [*lists, *self._notes.values()], place=origin)

    def samples(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        """Return the images of the part, in the order of its list, else by name."""
        names = sorted(self._notes)
        if self._list is not None:
            (data,) = read_whole(self.place, [self._list], workers=1)
            rows = [line.split() for line in data.decode("utf-8", "replace").splitlines()]
            names = [row[0].encode() for row in rows if row and row[1:2] != [_ABSENT]]
        source = printable(self._list.name) if self._list else "Annotations"
        known = [name for name in names if name in self._notes]
        texts = read_whole(self.place, [self._notes[name] for name in known], workers=workers)
        found = {name: _parsed(text) for name, text in zip(known, texts, strict=True)}
        classes = self.classes_of(self._class_names(found, workers=workers))
        of_boxes = Array("int64", (None,), of=BOXES)
        objects = [each for notes in found.values() for each in notes.objects]
        flags = [name for name in _FLAGS if any(name in each for each in objects)]
        types: dict[str, FieldType] = {BOXES: Boxes(of=IMAGE), LABELS: classes}
        types |= {**dict.fromkeys(flags, of_boxes), IMAGE_ID: Text()}
        types = self.types_of({**types, ORIGINAL_SIZE: ImageSize(of=IMAGE)})
        number_of = {name: number for number, name in enumerate(classes.names)}
        return self.candidates_of(
            [self._sample(name, found.get(name), number_of) for name in names], types, source=source
        )

    def _class_names(self, found: Mapping[bytes, _Notes], *, workers: int) -> Sequence[str]:
        """Return the classes: those of Pascal VOC, else all that any annotation names, so that they
        are the same for all parts."""
        if _names_of(found) <= {*VOC_CLASSES}:
            return VOC_CLASSES
        others = [entry for name, entry in self._notes.items() if name not in found]
        texts = read_whole(self.place, others, workers=workers)
        rest = {entry.name: _parsed(text) for entry, text in zip(others, texts, strict=True)}
        return sorted(_names_of(found) | _names_of(rest))

    def _sample(self, name: bytes, notes: _Notes | None, numbers: Mapping[str, int]) -> Annotated:
        """Return an image and its objects."""
        picture = self._pictures.get(name)
        file = _PICTURES + name + b".jpg" if picture is None else picture.name
        source = f"{printable(_NOTES + name)}.xml"
        if notes is None:
            return Annotated(file, wrong=f"there is no {source}")
        if notes.wrong:
            return Annotated(file, wrong=f"{notes.wrong} ({source})")
        rows = notes.objects
        values = {field: [row.get(field, 0) for row in rows] for field in (BOXES, *_FLAGS)}
        labels = [numbers[row[LABELS]] for row in rows]
        more = {LABELS: labels, IMAGE_ID: name, ORIGINAL_SIZE: notes.size}
        return Annotated(file, {**values, **more})


def _list_of(origin: Origin, files: Sequence[Entry]) -> Entry | None:
    """Return the image list of the part that the user chose. By default this is the list of
    `train`, or None if there are no lists. Raises ConfigError."""
    lists = {
        printable(stem(entry.name.removeprefix(_LISTS))): entry
        for entry in files
        if entry.name.startswith(_LISTS) and extension(entry.name) == "txt"
    }
    parts = {name.removeprefix("Main/"): entry for name, entry in lists.items()}
    return check_split(origin, parts, where="ImageSets/Main")


@dataclass(frozen=True, slots=True)
class _Notes:
    """The content of an XML file. size: height and width, 0 x 0 if unknown. objects: the values of
    each by field, its class by name. wrong: why the file can't be read; "" if it is good."""

    size: Sequence[int] = (0, 0)
    objects: Sequence[Mapping[str, Any]] = ()
    wrong: str = ""


def _parsed(data: bytes) -> _Notes:
    """Parse an XML file."""
    try:
        root = ElementTree.fromstring(data)
        size = [_number(root.find("size"), side, int, 0) for side in ("height", "width")]
        return _Notes(size, [*map(_object, count(), root.findall("object"))])
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        return _Notes(wrong=f"the annotation can't be read: {error}")


def _object(number: int, element: ElementTree.Element) -> dict[str, Any]:
    """Return the values of an object. Raises ValueError if they are wrong."""
    name = (element.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"object {number} has no name")
    try:
        box, flags = element.find("bndbox"), [f for f in _FLAGS if element.find(f) is not None]
        corners = [_number(box, side, float) for side in ("xmin", "ymin", "xmax", "ymax")]
        return {LABELS: name, BOXES: corners, **{f: _number(element, f, int, 0) for f in flags}}
    except ValueError as error:
        raise ValueError(f"object {number} ({name}): {error}") from None


def _number(
    within: ElementTree.Element | None, name: str, kind: type[Any], missing: int | None = None
) -> Any:
    """Return a number in an element. missing: the value if it isn't there. Raises ValueError."""
    text = None if within is None else within.findtext(name)
    if text is None or not text.strip():
        if missing is not None:
            return missing
        raise ValueError(f"it has no {name}")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} is {text.strip()!r:.40}, wanted a number") from None


def _names_of(found: Mapping[bytes, _Notes]) -> set[str]:
    return {each[LABELS] for notes in found.values() for each in notes.objects}


FORMAT = VocFormat()
