"""Read folders of images whose objects other files describe: the common part of COCO, VOC and YOLO.

A sample is an image, and has a row for each of its objects in the fields `boxes`, `labels` and so
on, which have torchvision's names. Images without objects are samples, too. A format parses its
files to one `Annotated` for each image.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import ClassLabels, FieldType, FieldTypes, Image, Schema, column_of
from penstock.readers.files import printable
from penstock.readers.formats.candidates import Candidates
from penstock.readers.formats.folder import MAX_TIMED_FILES, FolderFormat
from penstock.readers.formats.span_listing import SpanListing
from penstock.readers.origin import Entry, Origin, QuarantineEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.readers.formats.format import DatasetFiles

IMAGE, BOXES, LABELS, MASKS, KEYPOINTS = "image", "boxes", "labels", "masks", "keypoints"
IMAGE_ID, ORIGINAL_SIZE = "image_id", "original_size"

_SHOWN = 8

T = TypeVar("T")


class AnnotatedFormat(FolderFormat):
    """The base of formats whose files describe the objects in images."""

    def has_default_names(self, origin: Origin) -> bool:
        """Return True: the formats fix the names of the fields."""
        return True

    def may_recognise(self, origin: Origin) -> bool:
        """Return True unless the user selected files, or gave the folders of fields."""
        return origin.selection is None and FolderFormat.has_default_names(self, origin)


@dataclass(frozen=True, slots=True)
class Annotated:
    """An image and what its annotations say.

    name: of the image. values: by field, a number, or a list with a row for each object, or bytes
    if the type is encoded. wrong: why the sample, which has no values, is left out; "" if it is
    good.
    """

    name: bytes
    values: Mapping[str, Any] = field(default_factory=dict)
    wrong: str = ""


class AnnotatedFiles(SpanListing):
    """The images of a dataset, and the files that describe them.

    described: those files. place: the origin that reads them.
    """

    def __init__(
        self, origin: Origin, found: DatasetFiles, described: Sequence[Entry], *, place: Origin
    ) -> None:
        self.described, self.place = described, place
        if found.directories:  # to notice that one was edited
            times = {entry.name: entry.mtime_ns for entry in described[:MAX_TIMED_FILES]}
            found = replace(found, directories={**found.directories, **times})
        known = {entry.name for entry in found.entries}
        others = [entry for entry in described if entry.name not in known]
        super().__init__(origin, found, listed=[*found.entries, *others])

    def candidates_of(
        self, named: Sequence[Annotated], types: FieldTypes, source: str, unread: Sequence[str] = ()
    ) -> Candidates:
        """Return images as candidates, in this order; images without a file are quarantined.

        types: of all fields but the image. source: what names the images, for messages. Raises
        DatasetError if no image has a file.
        """
        find = FileNames(self.files)
        found = [(find(each.name), each) for each in named]
        why = f"the image isn't there ({source})"
        missing = [QuarantineEntry(name=n.name, reason=why) for entry, n in found if entry is None]
        if named and len(missing) == len(named):
            raise DatasetError(
                f"{self.origin.url}: none of the {len(named):,} images that {source} names is "
                f"there, such as {printable(named[0].name)}. Give the folder that holds the "
                "images as the URL."
            )
        pairs = [(entry, each) for entry, each in found if entry is not None]
        good = [each for _, each in pairs]
        samples = Candidates.of_files(
            {IMAGE: [entry for entry, _ in pairs]},
            {IMAGE: Image()},
            quarantined=missing,
            rejected={row: each.wrong for row, each in enumerate(good) if each.wrong},
            unread=unread,
        )
        columns = {
            name: column_of(type, [_cell(type, each.values.get(name)) for each in good])
            for name, type in types.items()
        }
        return replace(samples, schema=Schema({IMAGE: Image(), **types}), values=columns)

    def types_of(self, found: FieldTypes) -> dict[str, FieldType]:
        """Return the types of the fields, those of the user's schema where it has them. found: as
        the files define them. Raises ConfigError for a type that stores other values."""
        types = dict(found)
        for name, type_ in self.given.items():
            if name not in types:
                continue
            own = types[name]
            if _stored_as(type_) != _stored_as(own):
                raise ConfigError(
                    f'schema["{name}"]: got {type_!r}, but {self.origin.url} stores {own!r}. Give '
                    "a type that differs only in how values are delivered, or in names of classes."
                )
            if name != LABELS or not getattr(own, "ids", ()):  # `classes_of` has the given names
                types[name] = type_
        return types

    def classes_of(self, names: Sequence[str], ids: Sequence[int] = ()) -> ClassLabels:
        """Return the classes of the boxes: those of the user's schema, else these.

        ids: the classes' numbers in the files. Raises ConfigError if the user's classes lack one.
        """
        given = self.given.get(LABELS)
        if not isinstance(given, ClassLabels) or not given.names:
            return ClassLabels(tuple(names), of=BOXES, ids=tuple(ids))
        lacking = [name for name in names if name not in given.names]
        if lacking:
            raise ConfigError(
                f'schema["{LABELS}"]: {self.origin.url} has the class {lacking[0]!r}, which isn\'t '
                f"among the {len(given.names):,} classes of the schema. Add it."
            )
        id_of = dict(zip(names, ids, strict=False))
        found = tuple(id_of[name] for name in given.names if name in id_of)
        return replace(given, ids=found if len(found) == len(given.names) else ())


def check_split(origin: Origin, parts: Mapping[str, T], *, where: str) -> T | None:
    """Return the part of a dataset that the user chose by `split=`. The default is "train", or the
    only part, or None if there are no parts.

    parts: by name. where: they are named. Raises ConfigError.
    """
    split = origin.arrangement.split
    if split is None and not parts:
        return None
    name = split or ("train" if "train" in parts or len(parts) > 1 else next(iter(parts)))
    if name in parts:
        return parts[name]
    few = ", ".join(map(repr, sorted(parts, key=lambda part: (len(part), part))[:_SHOWN]))
    more = ", …" if len(parts) > _SHOWN else ""
    raise ConfigError(
        f"split: got {split!r}, wanted one of the parts that {where} of {origin.url} names: "
        f"{few or 'there are none'}{more}."
    )


def distinct_names(names: Sequence[str], ids: Sequence[int]) -> tuple[str, ...]:
    """Return names of classes that differ: those that occur twice with their ids."""
    counts = Counter(names)
    pairs = zip(names, ids, strict=True)
    return tuple(name if counts[name] == 1 else f"{name} ({own})" for name, own in pairs)


def _stored_as(type_: FieldType) -> tuple[Any, ...]:
    return type(type_), type_.stored, type_.reference, getattr(type_, "format", None)


def _cell(type: FieldType, value: Any) -> Any:
    """Convert a value to the form that `column_of` takes."""
    form = type.stored
    if form is None or value is None or not form.shape:
        return value
    return np.array(value, form.dtype).reshape(len(value), *form.shape[1:])


class FileNames:
    """Finds the file of a name. Annotations name files below the folder of images, below another
    folder above it, or by their last part alone."""

    def __init__(self, files: Iterable[Entry]) -> None:
        self._exact = {entry.name: entry for entry in files}
        self._by_base: dict[bytes, list[Entry]] | None = None

    def __call__(self, name: bytes) -> Entry | None:
        """Return the file; None if there is none, or if several fit."""
        if (found := self._exact.get(name)) is not None:
            return found
        if self._by_base is None:
            self._by_base = {}
            for entry in self._exact.values():
                self._by_base.setdefault(entry.name.rpartition(b"/")[2], []).append(entry)
        fitting = [
            entry
            for entry in self._by_base.get(name.rpartition(b"/")[2], ())
            if (b"/" + entry.name).endswith(b"/" + name) or name.endswith(b"/" + entry.name)
        ]
        return fitting[0] if len(fitting) == 1 else None
