"""Read COCO's annotations: one JSON file that names images, and their objects or captions.

The file is passed as `manifest=`, or is called `_annotations.coco.json` and lies beside the images.
Classes are numbered from 0, in the order of their category ids, which `ClassLabels.ids` keeps.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    ImageSize,
    InstanceKeypoints,
    InstanceMasks,
    Texts,
    Value,
)
from penstock.readers.files import encoded_name, printable
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
    distinct_names,
)
from penstock.readers.formats.folder import list_folder, manifest_entry, read_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fieldtypes import ClassLabels, FieldType, FieldTypes
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.origin import Entry, Origin

BESIDE = b"_annotations.coco.json"
"""The name of a file of annotations that lies beside its images, as Roboflow exports them."""

AREA, CROWD, ANNOTATION_IDS, CAPTIONS = "area", "iscrowd", "annotation_ids", "captions"
_MAX_BYTES = 2**34  # Objects365 has 2.5 GB, LVIS 1.1 GB
_PANOPTIC = "segments_info"
_SHOWN = 4
_SIDES = {"left": "right", "right": "left", "L": "R", "R": "L", "l": "r", "r": "l"}


class CocoFormat(AnnotatedFormat):
    """The format of images with annotations in COCO's JSON."""

    name: ClassVar[str] = "coco"

    def recognises(self, origin: Origin) -> bool:
        """Return True if a file of annotations lies beside the images."""
        return origin.selection is None and BESIDE in origin.names().files

    def list(self, origin: Origin) -> CocoFiles:
        """List the images. Raises as `list_folder` does, and DatasetError without annotations."""
        if origin.arrangement.manifest:
            place, entry = manifest_entry(origin, max_bytes=_MAX_BYTES)
        else:
            beside = origin.entry(BESIDE)
            if beside is None:
                raise DatasetError(
                    f"{origin.url}: there is no {BESIDE.decode()}. Pass the file of annotations, "
                    'such as manifest="annotations/instances_train2017.json".'
                )
            place, entry = origin, beside
        return CocoFiles(origin, list_folder(origin), [entry], place=place)


class CocoFiles(AnnotatedFiles):
    """The images, and the file of annotations."""

    def samples(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        """Return the images that the file names, in the order of their ids."""
        (data,) = read_whole(self.place, self.described, workers=workers)
        source = printable(self.described[0].name.rpartition(b"/")[2])
        coco = CocoFile.parse(data, source=source)
        classes = self.classes_of(coco.class_names, coco.category_ids)
        types = self.types_of(coco.types(classes))
        orphans = coco.orphans
        more = f"{orphans:,} annotations are left out: their image_id is that of no image."
        return self.candidates_of(
            coco.samples(types, classes), types, source=source, unread=[more] * (orphans > 0)
        )


Object = dict[str, Any]


@dataclass(frozen=True)
class CocoFile:
    """The content of a file of annotations. source: its name, for messages. images, categories: in
    the order of their ids. annotations: of each image, in the order of the file."""

    source: str
    images: Sequence[Object]
    categories: Sequence[Object]
    annotations: Sequence[Sequence[Object]]
    orphans: int

    @classmethod
    def parse(cls, data: bytes, *, source: str) -> CocoFile:
        """Parse a file. Raises DatasetError if it isn't one of annotations, or if an id occurs
        twice."""
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"{source}: isn't JSON ({error}). Fetch or write it again."
            ) from error
        found = content if isinstance(content, dict) else {}
        lists = {name: found.get(name, []) for name in ("images", "annotations", "categories")}
        if "images" not in found or not all(map(_is_list_of_objects, lists.values())):
            got = f"the keys {[*found][:8]}" if found else f"a {type(content).__name__}"
            raise DatasetError(
                f"{source}: got {got}, wanted COCO's annotations, an object with the lists "
                '"images", "annotations" and "categories".'
            )
        if any(_PANOPTIC in each for each in lists["annotations"][:1]):
            raise DatasetError(
                f"{source}: panoptic annotations aren't supported yet. Pass those of instances, or "
                "read the segments' PNG files as masks (fields=)."
            )
        for name, values in lists.items():
            _check_ids(values, source=source, name=name)
        if not lists["images"]:
            raise DatasetError(f"{source}: lists no images.")
        if not lists["categories"] and any("category_id" in e for e in lists["annotations"]):
            raise DatasetError(
                f'{source}: its annotations have categories, but it lists none. Add "categories": '
                '[{"id": 1, "name": "person"}, …].'
            )
        images = sorted(lists["images"], key=lambda each: each["id"])
        row_of = {each["id"]: row for row, each in enumerate(images)}
        annotations: list[list[Object]] = [[] for _ in images]
        orphans = 0
        for each in lists["annotations"]:
            row = row_of.get(_integer(each.get("image_id")))
            if row is None:
                orphans += 1
            else:
                annotations[row].append(each)
        categories = sorted(lists["categories"], key=lambda each: each["id"])
        return cls(source, images, categories, annotations, orphans)

    @cached_property
    def keys(self) -> Counter[str]:
        """Return how many annotations have each key."""
        return Counter(key for some in self.annotations for each in some for key in each)

    @property
    def category_ids(self) -> list[int]:
        """Return the ids of the categories, ascending."""
        return [each["id"] for each in self.categories]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the categories."""
        names = [str(each.get("name", each["id"])) for each in self.categories]
        return distinct_names(names, self.category_ids)

    def types(self, classes: ClassLabels) -> dict[str, FieldType]:
        """Return the types of the fields that the annotations have. Raises DatasetError if there
        are neither boxes nor captions."""
        types: dict[str, FieldType] = {}
        has, one_each = self.keys, Array("int64", (None,), of=BOXES)
        if has["bbox"] or not has["caption"]:
            if not has["bbox"] and any(self.annotations):
                raise DatasetError(
                    f"{self.source}: its annotations have the keys {[*has][:12]}, wanted bbox or "
                    "caption."
                )
            types |= {BOXES: Boxes(of=IMAGE, format="xywh"), LABELS: classes}
            if has["segmentation"]:
                types[MASKS] = InstanceMasks(of=BOXES)
            if has["keypoints"]:
                types[KEYPOINTS] = self._keypoints()
            if has["area"]:
                types[AREA] = Array("float32", (None,), of=BOXES)
            types[CROWD] = one_each
            if has["id"]:
                types[ANNOTATION_IDS] = one_each
        if has["caption"]:
            types[CAPTIONS] = Texts()
        return {**types, IMAGE_ID: Value("int64"), ORIGINAL_SIZE: ImageSize(of=IMAGE)}

    def _keypoints(self) -> InstanceKeypoints:
        """Return the type of the keypoints, with the names of the category that has most."""
        found = (each.get("keypoints") for each in self.categories)
        lists = [tuple(map(str, names)) for names in found if isinstance(names, list)]
        names = max(lists, key=len, default=())
        given = [each.get("keypoints") for some in self.annotations for each in some]
        longest = max((len(each) for each in given if isinstance(each, list)), default=0) // 3
        if longest > len(names):
            names = ()
        points = len(names) or longest or 1
        return InstanceKeypoints(of=BOXES, points=points, names=names, mirrored=_mirrored(names))

    def samples(self, types: FieldTypes, classes: ClassLabels) -> list[Annotated]:
        """Return the images, with a reason for each that is wrong. types: of the fields."""
        number_of = {name: number for number, name in enumerate(classes.names)}
        pairs = zip(self.category_ids, self.class_names, strict=True)
        label_of = {category: number_of[name] for category, name in pairs}
        found = []
        for image, some in zip(self.images, self.annotations, strict=True):
            name = _file_name(image)
            if name is None:
                shown = f'"file_name" of image {image["id"]}'.encode()
                found.append(Annotated(shown, wrong=f"it names no file ({self.source})"))
                continue
            size = [_integer(image.get(side)) for side in ("height", "width")]
            values: dict[str, Any] = {IMAGE_ID: image["id"]}
            values[ORIGINAL_SIZE] = [0, 0] if None in size else size
            try:
                if CAPTIONS in types:
                    captions = [_caption(each) for each in some if "caption" in each]
                    values[CAPTIONS] = Texts.encode(captions)
                if BOXES in types:
                    boxed = [e for e in some if "bbox" in e or "caption" not in e]
                    values |= self._rows(boxed, types, label_of)
            except ValueError as error:
                found.append(Annotated(name, wrong=f"{error} ({self.source})"))
                continue
            found.append(Annotated(name, values))
        return found

    def _rows(
        self, annotations: Sequence[Object], types: FieldTypes, labels: Mapping[int, int]
    ) -> dict[str, Any]:
        """Return the values of an image's boxes. Raises ValueError for one that is wrong."""
        values: dict[str, Any] = {
            BOXES: [_numbers(each, "bbox", 4) for each in annotations],
            LABELS: [_label(each, labels) for each in annotations],
            CROWD: [_flag(each) for each in annotations],
            ANNOTATION_IDS: [each.get("id", -1) for each in annotations],
        }
        if AREA in types:
            values[AREA] = [
                _number(each, "area") if "area" in each else box[2] * box[3]
                for each, box in zip(annotations, values[BOXES], strict=True)
            ]
        if MASKS in types:
            shapes = [each.get("segmentation") or None for each in annotations]
            values[MASKS] = InstanceMasks.encode(shapes)
        if (points := types.get(KEYPOINTS)) is not None:
            assert isinstance(points, InstanceKeypoints)
            values[KEYPOINTS] = [_points(each, points.points) for each in annotations]
        return {name: value for name, value in values.items() if name in types}


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _integer(value: Any) -> int | None:
    """Return a whole number as an int, also one that was written as 3.0; None for anything else."""
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    return int(value) if is_whole else None


def _check_ids(objects: Sequence[Object], *, source: str, name: str) -> None:
    """Make ids integers. Raises DatasetError for others, and for those that occur twice.
    Annotations may lack ids."""
    ids = [each.get("id") for each in objects]
    if name == "annotations" and all(each is None for each in ids):
        return
    for each, given in zip(objects, ids, strict=True):
        found = _integer(given)
        if found is None or not -(2**63) <= found < 2**63:
            raise DatasetError(
                f'{source}: got "id" = {given!r} among its {name}, wanted an integer for each. '
                "Number them."
            )
        each["id"] = found
    twice = [each for each, count in Counter(ids).items() if count > 1]
    if twice:
        raise DatasetError(
            f"{source}: {len(twice):,} ids of its {name} occur more than once, such as {twice[0]}. "
            "Give each an id of its own: evaluation would mix them up."
        )


def _file_name(image: Object) -> bytes | None:
    """Return the name of an image's file: the last part of coco_url if it has none of its own, as
    in LVIS."""
    name = image.get("file_name")
    if name is None and isinstance(url := image.get("coco_url"), str):
        name = url.rpartition("/")[2]
    found = encoded_name(name) if isinstance(name, str) else None
    return found if found and b"\0" not in found else None


def _who(annotation: Object) -> str:
    return f"annotation {annotation['id']}" if "id" in annotation else "an annotation"


def _caption(annotation: Object) -> str:
    text = annotation["caption"]
    if not isinstance(text, str):
        raise ValueError(f"{_who(annotation)} has the caption {text!r:.80}, wanted a text")
    return text


def _wrong(annotation: Object, key: str, wanted: str) -> ValueError:
    value = annotation.get(key)
    return ValueError(f'{_who(annotation)} has "{key}" = {value!r:.80}, wanted {wanted}')


def _numbers(annotation: Object, key: str, count: int) -> list[float]:
    value: Any = annotation.get(key)
    is_list = isinstance(value, list) and len(value) == count
    if not is_list or not all(type(each) in (int, float) for each in value):
        raise _wrong(annotation, key, f"{count} numbers")
    return value  # type: ignore[no-any-return]


def _number(annotation: Object, key: str) -> float:
    if type(annotation[key]) not in (int, float):
        raise _wrong(annotation, key, "a number")
    return float(annotation[key])


def _flag(annotation: Object) -> int:
    if (value := annotation.get("iscrowd", 0)) not in (0, 1):
        raise _wrong(annotation, "iscrowd", "0 or 1")
    return int(value)


def _label(annotation: Object, labels: Mapping[int, int]) -> int:
    label = labels.get(_integer(annotation.get("category_id")))  # type: ignore[arg-type]
    if label is None:
        few = ", ".join(map(str, [*labels][:_SHOWN])) + ", …" * (len(labels) > _SHOWN)
        raise _wrong(annotation, "category_id", f"the id of one of the categories, {few}")
    return label


def _points(annotation: Object, points: int) -> Any:
    """Return the keypoints of an annotation, (points, 3): zeros for those that it lacks."""
    found = np.zeros((points, 3), np.float32)
    value = annotation.get("keypoints")
    if value:
        count = 3 * min(points, len(value) // 3) if isinstance(value, list) else 3 * points
        numbers = np.array(_numbers(annotation, "keypoints", count), np.float32)
        found[: len(numbers) // 3] = numbers.reshape(-1, 3)
    return found


def _mirrored(names: Sequence[str]) -> tuple[int, ...]:
    """Return the point that each becomes if its image is mirrored: left_eye becomes right_eye."""
    number_of = {name: number for number, name in enumerate(names)}
    parts = (name.split("_") for name in names)
    swapped = ["_".join(_SIDES.get(part, part) for part in each) for each in parts]
    found = tuple(number_of.get(other, own) for own, other in enumerate(swapped))
    return found if sorted(found) == [*range(len(names))] and found != (*range(len(names)),) else ()


FORMAT = CocoFormat()
