"""Read YOLO's datasets: images, a text file of labels for each, and a data.yaml that names the
classes and the folders of each part.

A line of labels is a class and a box, a polygon, or a box and keypoints, in fractions of the image.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import Boxes, ImageSize, InstanceKeypoints, InstanceMasks, Text
from penstock.readers.files import extension, kind_of, parse_yaml, printable, stem
from penstock.readers.formats.annotated.annotated_format import (
    BOXES,
    IMAGE,
    IMAGE_ID,
    KEYPOINTS,
    LABELS,
    MASKS,
    ORIGINAL_SIZE,
    Annotated,
    AnnotatedFiles,
    AnnotatedFormat,
    FileNames,
    check_split,
    distinct_names,
)
from penstock.readers.formats.folder import list_folder, manifest_entry, read_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.origin import Entry, Origin

_PARTS = ("train", "val", "test")
_CLASSES = b"classes.txt"
_IMAGES, _LABELS = b"/images/", b"/labels/"
_VISIBLE = 2
_MOST_CLASSES = 2**20
_NAMES = re.compile(rb"^(names|nc)[ \t]*:", re.M)
_FIRST = (b"data.yaml", b"dataset.yaml")


class YoloFormat(AnnotatedFormat):
    """The format of images with YOLO's labels."""

    name: ClassVar[str] = "yolo"
    has_splits: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Return True if a YAML file at the root names classes and parts, or if a list of classes
        lies beside the folders of images and labels."""
        if not self.may_recognise(origin):
            return False
        names = origin.names()
        if _CLASSES in names.files and {b"images", b"labels"} <= {*names.folders}:
            return True
        return _description_in(origin) is not None

    def list(self, origin: Origin) -> YoloFiles:
        """List the images and labels. Raises as `list_folder` does, DatasetError for a wrong
        data.yaml, and ConfigError for a part that doesn't exist."""
        if origin.arrangement.manifest:
            place, entry = manifest_entry(origin)
            described: Entry | None = entry
        else:
            place, described = origin, _description_in(origin)
        found = list_folder(origin)
        if described is not None:
            (data,) = read_whole(place, [described], workers=1)
            description = Description.of(data, printable(described.name.rpartition(b"/")[2]))
            return YoloFiles(origin, found, [described], description)
        lists = [entry for entry in found.entries if entry.name.rpartition(b"/")[2] == _CLASSES]
        (data,) = read_whole(origin, lists[:1], workers=1) or (b"",)
        names = tuple(filter(None, map(str.strip, data.decode("utf-8", "replace").splitlines())))
        parts = {name: [name, f"images/{name}"] for name in _PARTS} | {"": ["."]}
        description = Description("the folder", names=names, parts=parts)
        return YoloFiles(origin, found, lists[:1], description)


def _description_in(origin: Origin) -> Entry | None:
    """Return the YAML file at the root that describes the dataset. Raises ConfigError if there are
    several."""
    names = [name for name in origin.names().files if extension(name) in ("yaml", "yml")]
    found: list[Entry] = []
    for name in sorted(names, key=lambda name: (name not in _FIRST, name)):
        entry = origin.entry(name)
        if entry is not None and entry.size_bytes < _MOST_YAML_BYTES:
            (data,) = read_whole(origin, [entry], workers=1)
            if _NAMES.search(data) and any(
                f"\n{part}:".encode() in b"\n" + data for part in _PARTS
            ):
                found.append(entry)
                if name in _FIRST:
                    break
    if len(found) > 1 and found[-1].name not in _FIRST:
        raise ConfigError(
            f"{origin.url}: {' and '.join(printable(entry.name) for entry in found)} describe "
            "datasets. Choose one by manifest=."
        )
    return found[-1] if found else None


_MOST_YAML_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Description:
    """The content of a data.yaml. source: its name, for messages. path: the folder to which the
    places of the parts are relative. parts: the places of each part. points: the shape of the
    keypoints of a box, (points, 2 or 3), or none. mirrored: as for `InstanceKeypoints`."""

    source: str
    names: tuple[str, ...] = ()
    path: str = ""
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    points: tuple[int, ...] = ()
    mirrored: tuple[int, ...] = ()

    @classmethod
    def of(cls, data: bytes, source: str) -> Description:
        """Parse a data.yaml. Raises DatasetError."""
        try:
            values = parse_yaml(data.decode(), what=source)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{source}: can't be parsed ({error}). Correct it.") from error
        found = values if isinstance(values, dict) else {}
        if "val" not in found and "validation" in found:
            found["val"] = found["validation"]
        parts = {name: _texts(found.get(name)) for name in _PARTS}
        points: Any = found.get("kpt_shape") or ()
        mirrored: Any = found.get("flip_idx") or ()
        names = _class_names(found.get("names"))
        if "names" not in found and found.get("nc") in range(1, _MOST_CLASSES):
            names = [f"class_{number}" for number in range(found["nc"])]
        if names is None and "names" in found:
            raise DatasetError(
                f"{source}: got names: {found['names']!r:.80}, wanted the name of each class: a "
                "list, or a mapping of all numbers from 0 on."
            )
        if names is None or not any(parts.values()):
            raise DatasetError(
                f"{source}: got the keys {[*found][:12]}, wanted YOLO's: names (of the classes, a "
                "list or by number from 0) or nc (their number), and train, val or test (folders "
                "of images)."
            )
        if not _are_numbers(points) or (points and (len(points) != 2 or points[1] not in (2, 3))):
            raise DatasetError(
                f"{source}: got kpt_shape: {points!r:.60}, wanted the keypoints and 2 or 3 numbers "
                "for each, such as [17, 3]."
            )
        if not _are_numbers(mirrored) or (mirrored and sorted(mirrored) != [*range(points[0])]):
            raise DatasetError(
                f"{source}: got flip_idx: {mirrored!r:.60}, wanted each keypoint's number once."
            )
        count = found.get("nc", len(names))
        if count != len(names):
            raise DatasetError(
                f"{source}: got nc: {count!r:.20} and the names of {len(names)} classes. Correct "
                "one of them."
            )
        return cls(
            source,
            names=distinct_names(names, range(len(names))),
            path=found["path"] if isinstance(found.get("path"), str) else "",
            parts={name: places for name, places in parts.items() if places},
            points=tuple(points),
            mirrored=tuple(mirrored),
        )

    def line(self, words: Sequence[str]) -> tuple[int, Any, Any, Any]:
        """Return the class, the box (cx, cy, w, h), the polygon, None without one, and the
        keypoints, None without any, of a line. Raises ValueError."""
        try:
            label, *numbers = map(float, words)
        except ValueError:
            raise ValueError(f"{' '.join(words)!r:.60} isn't a list of numbers") from None
        if not (label.is_integer() and 0 <= label < (len(self.names) or 2**31)):
            most = f"to {len(self.names) - 1}" if self.names else "on"
            raise ValueError(f"{words[0]!r} isn't a class, which is a number from 0 {most}")
        if self.points:
            count, width = self.points
            if len(numbers) != 4 + count * width:
                raise ValueError(f"{len(words)} numbers, wanted {5 + count * width} (kpt_shape)")
            return int(label), numbers[:4], None, self._keypoints(numbers[4:])
        if len(numbers) == 4:
            return int(label), numbers, None, None
        if len(numbers) < 6 or len(numbers) % 2:
            raise ValueError(
                f"{len(words)} numbers, wanted a class and a box (5), or a polygon (7 or more)"
            )
        low = [min(numbers[0::2]), min(numbers[1::2])]
        high = [max(numbers[0::2]), max(numbers[1::2])]
        pairs = [*zip(low, high, strict=True)]
        box = [*((a + b) / 2 for a, b in pairs), *(b - a for a, b in pairs)]
        return int(label), box, [numbers], None

    def _keypoints(self, numbers: Sequence[float]) -> Any:
        """Return keypoints as x, y and the visibility. Without one in the file, points at 0, 0 and
        at negative places aren't labelled."""
        found = np.zeros((self.points[0], 3), np.float32)
        values = np.array(numbers, np.float32).reshape(self.points)
        found[:, : self.points[1]] = values
        if self.points[1] == 2:
            is_labelled = (values >= 0).all(axis=1) & (values > 0).any(axis=1)
            found[:, 2] = np.where(is_labelled, _VISIBLE, 0)
        return found


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(type(each) is int for each in values)


def _texts(value: Any) -> list[str]:
    """Return a text or a list of texts as a list; empty for anything else."""
    values = value if isinstance(value, list) else [value]
    return values if all(isinstance(each, str) and each for each in values) else []


def _class_names(value: Any) -> list[str] | None:
    """Return the names of the classes by number, from a list or a mapping of all numbers; None for
    anything else."""
    if isinstance(value, dict):
        keys = [int(key) if str(key).isdecimal() else -1 for key in value]
        if sorted(keys) != [*range(len(keys))]:
            return None
        value = [name for _, name in sorted(zip(keys, value.values(), strict=True))]
    return [*map(str, value)] if isinstance(value, list) else None


class YoloFiles(AnnotatedFiles):
    """The images of one part, and their files of labels."""

    def __init__(
        self, origin: Origin, found: DatasetFiles, described: Sequence[Entry], content: Description
    ) -> None:
        """described: the data.yaml. content: of it. Raises ConfigError and DatasetError, and errors
        of reading."""
        self._by_name = {entry.name: entry for entry in found.entries}
        self.description = content
        images, lists = self._images_of(origin)
        self._labels = {entry.name: self._by_name.get(_label_name(entry.name)) for entry in images}
        texts = [entry for entry in self._labels.values() if entry is not None]
        chosen = replace(found, entries=images)
        super().__init__(origin, chosen, [*described, *lists, *texts], place=origin)

    def _images_of(self, origin: Origin) -> tuple[list[Entry], list[Entry]]:
        """Return the images of the part that the user chose, and the lists that name them."""
        description = self.description
        parts = {name: self._in_places(places) for name, places in description.parts.items()}
        if "" in parts:  # no file describes the parts
            parts = {name: found for name, found in parts.items() if found}
            if len(parts) > 1:
                del parts[""]
        found = check_split(origin, parts, where=description.source)
        lists = [entry for entry in found or () if extension(entry.name) == "txt"]
        if not found:
            places = description.parts.get(origin.arrangement.split or "train", ())
            raise DatasetError(
                f"{origin.url}: {description.source} names {', '.join(places) or 'no folder'}, but "
                "no images are there. Give the folder that contains them as the URL, and the file "
                "as manifest=."
            )
        named = {entry.name for entry in found if entry not in lists}
        for data in read_whole(origin, lists, workers=1):
            find = FileNames(self._by_name.values())
            for line in data.decode("utf-8", "surrogateescape").splitlines():
                name = posixpath.normpath(line.strip()).encode("utf-8", "surrogateescape")
                if line.strip() and (entry := find(name)) is not None:
                    named.add(entry.name)
        return [entry for entry in self._by_name.values() if entry.name in named], lists

    def _in_places(self, places: Sequence[str]) -> list[Entry]:
        """Return the images in the folders of a part, and the lists that it names."""
        found: dict[bytes, Entry] = {}
        for place in places:
            for option in self._options(place):
                if option in self._by_name:
                    found[option] = self._by_name[option]
                    break
                below = b"" if option == b"." else option + b"/"
                inside = {
                    name: entry
                    for name, entry in self._by_name.items()
                    if name.startswith(below) and kind_of(name) == "image"
                }
                if inside:
                    found |= inside
                    break
        return [*found.values()]

    def _options(self, place: str) -> list[bytes]:
        """Return the places below the root that a place may mean: paths in a data.yaml are relative
        to `path`, to the file itself, or to a folder of another machine."""
        joined = [posixpath.join(self.description.path, place), place]
        options = []
        for each in joined:
            parts = [part for part in posixpath.normpath(each).split("/") if part not in ("", "..")]
            options += ["/".join(parts[start:]) for start in range(len(parts))]
        return [each.encode("utf-8", "surrogateescape") for each in dict.fromkeys(options)]

    def samples(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        """Return the images of the part, by name."""
        about, described = self.description, [*filter(None, self._labels.values())]
        read = read_whole(self.place, described, workers=workers)
        texts = {entry.name: data for entry, data in zip(described, read, strict=True)}
        found = [self._sample(entry, texts) for entry in self.files]
        types: dict[str, FieldType] = {BOXES: Boxes(of=IMAGE, format="cxcywh_norm")}
        types[LABELS] = self.classes_of(about.names)
        if any(any(each.values.get(MASKS, ())) for each in found):
            types[MASKS] = InstanceMasks(of=BOXES, format="norm")
            masks = [InstanceMasks.encode(each.values.get(MASKS, [])) for each in found]
            pairs = zip(found, masks, strict=True)
            found = [replace(each, values={**each.values, MASKS: own}) for each, own in pairs]
        if about.points:
            types[KEYPOINTS] = InstanceKeypoints(
                of=BOXES, points=about.points[0], mirrored=about.mirrored, format="xy_norm"
            )
        types = self.types_of({**types, IMAGE_ID: Text(), ORIGINAL_SIZE: ImageSize(of=IMAGE)})
        return self.candidates_of(found, types, source=about.source)

    def _sample(self, image: Entry, texts: Mapping[bytes, bytes]) -> Annotated:
        """Return an image and its objects; without a file of labels it has none."""
        label = self._labels[image.name]
        data = b"" if label is None else texts[label.name]
        rows = []
        for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), start=1):
            if not (words := line.split()):
                continue
            try:
                rows.append(self.description.line(words))
            except ValueError as error:
                assert label is not None
                where = f"{printable(label.name)}, line {number}"
                return Annotated(image.name, wrong=f"{where}: {error}")
        fields = enumerate((LABELS, BOXES, MASKS, KEYPOINTS))
        values: dict[str, Any] = {name: [row[at] for row in rows] for at, name in fields}
        return Annotated(image.name, {**values, IMAGE_ID: stem(image.name.rpartition(b"/")[2])})


def _label_name(image: bytes) -> bytes:
    """Return the name of an image's file of labels: `labels` in place of the last `images`."""
    before, mark, after = (b"/" + stem(image)).rpartition(_IMAGES)
    return (before + _LABELS + after if mark else after)[1:] + b".txt"


FORMAT = YoloFormat()
