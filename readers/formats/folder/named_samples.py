"""Derive the samples of a folder from the names of its files alone.

By default, samples are images if there are any, else arrays, texts, audio or video, each in a file.
The class is the first-level sub-folder, with all files below it: torchvision's ImageFolder, in its
order. Next to x.jpg, x.txt is its caption, x.json holds its values, x.npy is its array. Names never
decide that two images belong to one sample.

`Dataset(url, fields={"image": "images", "mask": "masks"})` names the folder of each field. Files
are then paired by name: images/a/x.jpg with masks/a/x.png. A place with a star is a pattern; the
part that the star matches is the name that pairs: "masks/*_mask.png".
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import (
    Array,
    Audio,
    ClassLabel,
    DenseColumn,
    Image,
    Text,
    Video,
    fields_of,
    json_object,
    valid_object_table,
)
from penstock.readers.files import encoded_name, extension, printable
from penstock.readers.formats.candidates import MISSING
from penstock.readers.formats.folder.folder_files import (
    ARRAYS,
    AUDIO,
    IMAGES,
    TEXTS,
    VIDEO,
    stem,
    type_by_names,
)
from penstock.readers.formats.folder.folder_samples import FolderSamples
from penstock.readers.origin import QuarantineEntry, is_other_kind, is_prose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType
    from penstock.readers.origin import Entry

LARGEST_JSON_BYTES = 2**20
"""The largest JSON file of a sample that is read."""

_CAPTION, _ARRAY, _JSON, _AUDIO, _VIDEO = "caption", "array", "json", "audio", "video"
_ROLES = {
    **dict.fromkeys(sorted(TEXTS), _CAPTION),
    **dict.fromkeys(ARRAYS, _ARRAY),
    "json": _JSON,
    **dict.fromkeys(sorted(AUDIO), _AUDIO),
    **dict.fromkeys(sorted(VIDEO), _VIDEO),
}
# The role of the files that are samples, by their field; "" stands for all files without a role.
_OWN = {"image": "", _ARRAY: _ARRAY, "text": _CAPTION, _AUDIO: _AUDIO, _VIDEO: _VIDEO}
_WRONG_NAME = {_AUDIO: "its name isn't that of audio", _VIDEO: "its name isn't that of a video"}
_COMPANIONS = (_CAPTION, _ARRAY, _JSON)
_SHOWN_CLASSES, _SHOWN_FOLDERS = 5, 8
_IN_ROOT = "not in a class folder (a file next to the class folders has no label)"
_NO_CLASS = "its folder isn't a class: it holds no file that can be a sample"


def class_folder_samples(
    found: Iterable[Entry],
    read: Callable[[Sequence[Entry]], Sequence[bytes]],
    schema: Mapping[str, FieldType],
    *,
    folders: Iterable[bytes] = (),
    allow_empty: bool = False,
    url: str = "",
) -> FolderSamples:
    """Return the samples of a folder whose fields the user didn't name.

    found: all files. read: returns the bytes of files. schema: given types. folders: those directly
    below the root, empty ones too. allow_empty: count empty folders as classes.

    Raises DatasetError (the schema lacks a class folder, or a value doesn't fit its type),
    DatasetNotFoundError (a class folder without samples).
    """
    main, companions, field, type = _roles(found)
    stray: list[QuarantineEntry] = []
    if field in _WRONG_NAME:  # unlike for images, names decide
        others = [file for file in main if _ROLES.get(extension(file.name)) != field]
        stray = [QuarantineEntry(name=file.name, reason=_WRONG_NAME[field]) for file in others]
        main = [file for file in main if _ROLES.get(extension(file.name)) == field]
    files = sorted(main, key=_class_order)
    classes = _classes(files, field)
    given = schema.get("label")
    # A given list of classes numbers them, whichever folders exist.
    is_listed = isinstance(given, ClassLabel) and bool(given.names)
    if classes and not is_listed:
        classes = _with_empty(classes, folders, allow_empty=allow_empty, url=url)
    if classes:
        known = set(classes)
        stray += [
            QuarantineEntry(name=file.name, reason=_NO_CLASS if _class_of(file.name) else _IN_ROOT)
            for file in files
            if _class_of(file.name) not in known
        ]
        files = [file for file in files if _class_of(file.name) in known]
    types: dict[str, FieldType] = {field: type}
    values: dict[str, Column] = {}
    if classes:
        types["label"], values["label"] = _labels(files, classes, given)
    images = [each for each in stray if extension(each.name) in IMAGES]
    samples = FolderSamples(
        names=[file.name for file in files],
        files=files,
        places={field: np.arange(len(files), dtype=np.int64)},
        types=types,
        values=values,
        quarantined=stray,
        left_out=[
            f"{len(images):,} images are left out, such as {printable(each.name)}: {each.reason}."
            for each in images[:1]
        ],
    )
    return _with_companions(samples, companions, read, schema) if companions else samples


def _roles(
    found: Iterable[Entry],
) -> tuple[list[Entry], dict[tuple[bytes, str], Entry], str, FieldType]:
    """Separate the samples' own files from their companions, which are returned by stem and role.

    Also returns the field that the samples are.
    """
    files = list(found)
    extensions = [extension(file.name) for file in files]
    field, type = _field(files, extensions)
    own = _OWN[field]
    roles = [_ROLES.get(each, "") for each in extensions]
    main = [file for file, role in zip(files, roles, strict=True) if role == own]
    if len(main) == len(files):
        return main, {}, field, type
    stems = {stem(file.name) for file in main}
    companions: dict[tuple[bytes, str], Entry] = {}
    for file, role in zip(files, roles, strict=True):
        if role == own:
            continue
        key = (stem(file.name), role)
        if role in _COMPANIONS and key[0] in stems and key not in companions:
            companions[key] = file
        else:
            main.append(file)  # checking it reports why it isn't a sample
    return main, companions, field, type


def _field(files: Sequence[Entry], extensions: Sequence[str]) -> tuple[str, FieldType]:
    """Return the field of the samples: images if any file may be one."""
    if any(_may_be_image(file.name) for file in files):
        return "image", Image()
    counts = Counter(_ROLES.get(each) for each in extensions)
    if counts[_ARRAY]:
        return _ARRAY, Array()
    texts = [f.name for f in files if _ROLES.get(extension(f.name)) == _CAPTION]
    if not all(map(is_prose, texts)):
        return "text", Text()
    if counts[_AUDIO] or counts[_VIDEO]:
        is_audio = counts[_AUDIO] >= counts[_VIDEO]
        return (_AUDIO, Audio()) if is_audio else (_VIDEO, Video())
    return "image", Image()


def _may_be_image(name: bytes) -> bool:
    """Return True unless the name is that of another kind of file or of a README."""
    return not is_other_kind(name) and not is_prose(name)


def _classes(files: Sequence[Entry], field: str) -> list[bytes]:
    """Return the first-level folders with a file that may be a sample, by its name.

    If there are none, return none if such files lie directly in the root, else all folders, so that
    the error reports what is wrong with their files.
    """
    own = _OWN[field]
    tops = {top for file in files if (top := _class_of(file.name)) is not None}
    usable = {
        _class_of(file.name)
        for file in files
        if (_ROLES.get(extension(file.name)) == own if own else _may_be_image(file.name))
    }
    return sorted(tops & usable or (set() if None in usable else tops))


def _with_empty(
    classes: list[bytes], folders: Iterable[bytes], *, allow_empty: bool, url: str
) -> list[bytes]:
    """Return the classes of all folders.

    Raises DatasetNotFoundError for folders without a sample, because they would shift the numbers
    of the classes after them.
    """
    empty = sorted({*folders} - {*classes})
    if not empty:
        return classes
    if allow_empty:
        return sorted({*classes, *empty})
    some = ", ".join(repr(printable(name)) for name in empty[:_SHOWN_CLASSES])
    are = "are folders" if len(empty) > 1 else "is a folder"
    raise DatasetNotFoundError(
        f"{url}: {some}{', …' if len(empty) > _SHOWN_CLASSES else ''} {are} without a sample "
        f"next to {len(classes):,} class folder{'s' * (len(classes) != 1)}. Classes are numbered "
        "by the sorted names of their folders, so a class that lacks its files in this dataset but "
        "has them in another would shift the labels. Add the files or remove the folder; pass "
        "allow_empty=True (--allow-empty), which numbers it too, as torchvision does; or list the "
        'classes with schema={"label": ClassLabel([…])}.'
    )


def _labels(
    files: Sequence[Entry], classes: Sequence[bytes], given: FieldType | None
) -> tuple[ClassLabel, DenseColumn]:
    names = tuple(os.fsdecode(name) for name in classes)
    type = ClassLabel(names)
    if given is not None and not isinstance(given, ClassLabel):
        raise ConfigError(
            f'schema["label"]: got {given!r}, but the labels are class folders: wanted '
            "ClassLabel(names), whose order numbers them."
        )
    if given is not None and given.names:
        unknown = sorted(set(names) - set(given.names))
        if unknown:
            raise DatasetError(
                f'schema["label"]: the class folder {unknown[0]!r} is not among its '
                f"{len(given.names):,} names (folders without a name: {len(unknown):,}). Add the "
                "names, or remove the folders from the dataset."
            )
        type = given
    numbers = {name: number for number, name in enumerate(type.names)}
    label_of = {name: numbers[os.fsdecode(name)] for name in classes}
    tops = (_class_of(file.name) for file in files)
    labels = [label_of[top] for top in tops if top is not None]
    return type, DenseColumn(np.array(labels, np.int64))


def _with_companions(
    samples: FolderSamples,
    companions: Mapping[tuple[bytes, str], Entry],
    read: Callable[[Sequence[Entry]], Sequence[bytes]],
    schema: Mapping[str, FieldType],
) -> FolderSamples:
    """Add the fields whose files share the samples' names: captions, arrays and JSON."""
    stems = [stem(name) for name in samples.names]
    files = list(samples.files)
    types, places = dict(samples.types), dict(samples.places)
    for role, type in ((_CAPTION, Text()), (_ARRAY, Array())):
        numbers = _numbers(stems, role, companions, files)
        if numbers is not None:
            types[role], places[role] = type, numbers
    left_out = [*samples.left_out]
    rejected: dict[int, str] = {}
    jsons = {row: each for row, s in enumerate(stems) if (each := companions.get((s, _JSON)))}
    known = set(stems)
    alone = [
        QuarantineEntry(name=file.name, reason="the file of the same name isn't a sample")
        for (of, _), file in companions.items()
        if of not in known
    ]
    quarantined = [*samples.quarantined, *alone]
    samples = replace(samples, files=files, types=types, places=places, quarantined=quarantined)
    if jsons:
        objects, rejected = _objects(jsons, len(stems), read)
        names = [printable(name) for name in samples.names]
        table = valid_object_table(
            objects, rejected=rejected, source="json", places=names, unit="file"
        )
        given = {name: type for name, type in schema.items() if name not in types}
        found = fields_of(table, given, is_lenient=True)
        left_out += [
            f'"{name}" of the json files is left out: {why}.'
            for name, why in found.left_out.items()
        ]
        left_out += [
            f'"{name}" of the json files is left out: other files are a field of this name.'
            for name in found.types
            if name in types
        ]
        samples = samples.with_table(found)
    return replace(samples, rejected={**samples.rejected, **rejected}, left_out=left_out)


def _numbers(
    stems: Sequence[bytes],
    role: str,
    companions: Mapping[tuple[bytes, str], Entry],
    files: list[Entry],
) -> NDArray[np.int64] | None:
    """Append each sample's companion to files; return their numbers, or None if there are none."""
    number_of: dict[bytes, int] = {}
    numbers = np.full(len(stems), MISSING, np.int64)
    for row, each in enumerate(stems):
        file = companions.get((each, role))
        if file is None:
            continue
        if each not in number_of:
            number_of[each] = len(files)
            files.append(file)
        numbers[row] = number_of[each]
    return numbers if number_of else None


def _objects(
    jsons: Mapping[int, Entry], count: int, read: Callable[[Sequence[Entry]], Sequence[bytes]]
) -> tuple[list[dict[str, object] | None], dict[int, str]]:
    """Return each sample's JSON object, and the reasons for those that can't be read."""
    objects: list[dict[str, object] | None] = [None] * count
    rejected: dict[int, str] = {}
    small = {row: file for row, file in jsons.items() if file.size_bytes <= LARGEST_JSON_BYTES}
    for row in jsons.keys() - small.keys():
        rejected[row] = f"its .json file has more than {LARGEST_JSON_BYTES:,} bytes"
    for (row, file), data in zip(small.items(), read(list(small.values())), strict=True):
        try:
            objects[row] = json_object(data, what=printable(file.name))
        except DatasetError as error:
            rejected[row] = str(error)
    return objects, rejected


def _class_of(name: bytes) -> bytes | None:
    top, slash, _ = name.partition(b"/")
    return top if slash else None


def _class_order(file: Entry) -> tuple[bytes, bytes, bytes]:
    folder, _, base = file.name.rpartition(b"/")
    return file.name.partition(b"/")[0] if folder else b"", folder, base


@dataclass(frozen=True, slots=True)
class _FieldPlace:
    """The place of a field: the prefix and the suffix of its files' names."""

    field: str
    given: str
    prefix: bytes
    suffix: bytes
    is_pattern: bool

    def pair(self, name: bytes) -> bytes | None:
        """Return the part of a name that pairs fields, or None if the file isn't of this field."""
        enough = len(name) > len(self.prefix) + len(self.suffix)
        if not (enough and name.startswith(self.prefix) and name.endswith(self.suffix)):
            return None
        middle = name[len(self.prefix) : len(name) - len(self.suffix)]
        return middle if self.is_pattern else stem(middle)


def parse_field_place(field: str, place: str) -> _FieldPlace:
    """Parse the place of a field: a folder below the dataset's root, or a pattern with one star.

    Raises ConfigError.
    """
    parts = place.replace("\\", "/").split("/")
    path = encoded_name("/".join(part for part in parts if part not in ("", ".")))
    is_odd = place.startswith("/") or ".." in parts or place.count("*") > 1 or not place
    if is_odd or path is None:
        raise ConfigError(
            f'fields["{field}"]: got {place!r}, wanted a folder below the dataset\'s root, or a '
            'pattern with one star such as "masks/*_mask.png".'
        )
    if b"*" in path:
        prefix, _, suffix = path.partition(b"*")
        return _FieldPlace(field, place, prefix, suffix, is_pattern=True)
    return _FieldPlace(field, place, path + b"/" if path else b"", b"", is_pattern=False)


def paired_samples(
    url: str,
    found: Iterable[Entry],
    places: Sequence[tuple[str, str]],
    schema: Mapping[str, FieldType],
) -> FolderSamples:
    """Return a sample for each name that all fields have, in the order of the first field's files.

    Files whose name a field lacks are quarantined. Raises ConfigError, and DatasetError if a field
    has no file or if no name pairs.
    """
    wanted = _parse_places(places)
    files, others = _by_pair(found, wanted)
    for place in wanted:
        if not files[place.field]:
            raise DatasetError(
                f'fields["{place.field}"]: {url} has no file in {place.given!r}. '
                f"Its folders are {_folders(others, files)}."
            )
    first = files[wanted[0].field]
    whole = [
        pair
        for pair in first
        if all(len(files[place.field].get(pair, ())) == 1 for place in wanted)
    ]
    if not whole:
        raise DatasetError(f"{url}: {_why_nothing_pairs(files, wanted)}")
    whole.sort(key=lambda pair: first[pair][0].name.rpartition(b"/"))
    unpaired = list(_unpaired(files, wanted))
    ordered: list[Entry] = []
    numbers = {}
    types = {}
    for place in wanted:
        mine = [files[place.field][pair][0] for pair in whole]
        types[place.field] = schema.get(place.field) or type_by_names(f.name for f in mine)
        numbers[place.field] = np.arange(len(ordered), len(ordered) + len(mine), dtype=np.int64)
        ordered += mine
    return FolderSamples(
        names=[first[pair][0].name for pair in whole],
        files=ordered,
        places=numbers,
        types=types,
        quarantined=unpaired,
        passed_over=Counter(extension(file.name) or "(none)" for file in others),
        left_out=[
            f"{len(unpaired):,} files are left out because a field lacks their name, such as "
            f"{printable(each.name)}: {each.reason}. All are in the index's quarantine.jsonl."
            for each in unpaired[:1]
        ],
    )


def _parse_places(places: Sequence[tuple[str, str]]) -> list[_FieldPlace]:
    wanted = [parse_field_place(field, place) for field, place in places]
    field_at: dict[tuple[bytes, bytes], str] = {}
    for place in wanted:
        other = field_at.setdefault((place.prefix, place.suffix), place.field)
        if other != place.field:
            raise ConfigError(
                f'fields: "{other}" and "{place.field}" have the same place, {place.given!r}. '
                'Distinguish them by patterns with a star, such as "*.jpg" and "*_mask.png".'
            )
    return wanted


def _why_nothing_pairs(
    files: Mapping[str, Mapping[bytes, Sequence[Entry]]], wanted: Sequence[_FieldPlace]
) -> str:
    """Explain why no sample is complete."""
    if len(wanted) == 1:
        return f"each name in {wanted[0].given!r} occurs several times, with several extensions."
    a, b = wanted[:2]
    return (
        f"nothing pairs: no file in {a.given!r} (such as {_example(files[a.field])}) has the name "
        f"of one in {b.given!r} (such as {_example(files[b.field])}). Names must be equal except "
        'for the extension; if they differ otherwise, use a pattern such as "masks/*_mask.png".'
    )


def _by_pair(
    found: Iterable[Entry], wanted: Sequence[_FieldPlace]
) -> tuple[dict[str, dict[bytes, list[Entry]]], list[Entry]]:
    """Return the files of each field by the name that pairs them, and the files of no field.

    A file belongs to the field whose prefix and suffix match most of its name.
    """
    files: dict[str, dict[bytes, list[Entry]]] = {place.field: {} for place in wanted}
    others: list[Entry] = []
    closest = sorted(wanted, key=lambda place: -len(place.prefix) - len(place.suffix))
    for file in found:
        for place in closest:
            pair = place.pair(file.name)
            if pair is not None:
                files[place.field].setdefault(pair, []).append(file)
                break
        else:
            others.append(file)
    return files, others


def _unpaired(
    files: Mapping[str, Mapping[bytes, Sequence[Entry]]], wanted: Sequence[_FieldPlace]
) -> Iterable[QuarantineEntry]:
    seen: set[bytes] = set()
    for place in wanted:
        for pair, mine in files[place.field].items():
            for other in wanted:
                theirs = files[other.field].get(pair, ())
                if len(theirs) == 1:
                    continue
                problem = (
                    f"no file of its name in {other.given!r}"
                    if not theirs
                    else f"{len(theirs)} files of its name in {other.given!r}"
                )
                for file in mine:
                    yield QuarantineEntry(
                        name=file.name,
                        reason=f"{other.field}: {problem}",
                        is_counted=pair not in seen,
                    )
                    seen.add(pair)
                break


def _folders(others: Sequence[Entry], files: Mapping[str, Mapping[bytes, Sequence[Entry]]]) -> str:
    names = [file.name for file in others]
    names += [file.name for mine in files.values() for each in mine.values() for file in each]
    tops = sorted({name.partition(b"/")[0] for name in names if b"/" in name})
    listed = ", ".join(repr(printable(top)) for top in tops[:_SHOWN_FOLDERS])
    return (listed or "none") + (", …" if len(tops) > _SHOWN_FOLDERS else "")


def _example(files: Mapping[bytes, Sequence[Entry]]) -> str:
    return printable(min(file.name for each in files.values() for file in each))
