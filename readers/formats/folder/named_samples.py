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
import re
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import (
    ClassLabel,
    DenseColumn,
    fields_of,
    json_object,
    object_table,
)
from penstock.readers.files import FIELDS_BY_KIND, encoded_name, extension, kind_of, printable, stem
from penstock.readers.formats.candidates import Candidates, left_out_sentences
from penstock.readers.formats.file_kinds import TYPES, type_by_names
from penstock.readers.origin import QuarantineEntry, is_prose, may_be_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.readers.fieldtypes import Column, FieldType, FieldTypes
    from penstock.readers.files import Kind
    from penstock.readers.origin import Entry

    Read = Callable[[Sequence[Entry]], Sequence[bytes]]

LARGEST_JSON_BYTES = 2**20
"""The largest JSON file of a sample that is read."""

# Files that add fields to the sample of the same name.
_COMPANIONS: Sequence[Kind] = ("text", "array", "json")
_SHOWN_CLASSES, _SHOWN_FOLDERS = 5, 8
_IN_ROOT = "not in a class folder (a file next to the class folders has no label)"
_NO_CLASS = "its folder isn't a class: it holds no file that can be a sample"
_NO_SAMPLE = "the file of the same name isn't a sample"


def class_folder_samples(
    found: Iterable[Entry],
    read: Read,
    schema: FieldTypes,
    *,
    folders: Iterable[bytes] = (),
    allow_empty: bool = False,
    url: str = "",
) -> Candidates:
    """Return the samples of a folder whose fields the user didn't name.

    found: all files. read: returns the bytes of files. schema: given types. folders: those directly
    below the root, empty ones too. allow_empty: count empty folders as classes.

    Raises DatasetError (the schema lacks a class folder, or a value doesn't fit its type),
    DatasetNotFoundError (a class folder without samples).
    """
    found = list(found)
    main = _main_kind(found)
    files, companions = _split(found, main)
    files.sort(key=_class_order)
    classes, given = _classes(files, main), schema.get("label")
    # A given list of classes numbers them, whichever folders exist.
    if classes and (given is None or not given.class_names):
        classes = _with_empty(classes, folders, allow_empty=allow_empty, url=url)
    known = set(classes)
    left_out: dict[bytes, str] = {}
    samples: list[Entry] = []
    for file in files:
        top = _class_of(file.name)
        if not _may_be(main, file.name):
            left_out[file.name] = f"its name is of another kind than {main}"
        elif classes and top not in known:
            left_out[file.name] = _NO_CLASS if top else _IN_ROOT
        else:
            samples.append(file)
    types: dict[str, FieldType] = {main: TYPES[main]}
    values: dict[str, Column] = {}
    if classes:
        types["label"], values["label"] = _labels(samples, classes, given)
    columns: dict[str, Sequence[Entry | None]] = {main: samples}
    stems = [stem(file.name) for file in samples] if companions else []
    for kind in _COMPANIONS:
        mine, field = companions.get(kind, {}), FIELDS_BY_KIND[kind]
        if field and not mine.keys().isdisjoint(stems):
            types[field], columns[field] = TYPES[kind], [mine.get(each) for each in stems]
    known = set(stems)
    for mine in companions.values():
        left_out |= {file.name: _NO_SAMPLE for own, file in mine.items() if own not in known}
    quarantined = [
        QuarantineEntry(
            name=name,
            reason=why,
            is_counted=_may_be(main, name) and (kind_of(name) == main or not extension(name)),
        )
        for name, why in left_out.items()
    ]
    types |= {name: schema.get(name, types[name]) for name in types if name != "label"}
    unread = left_out_sentences("images", [q for q in quarantined if kind_of(q.name) == "image"])
    new = Candidates.of_files(columns, types, values=values, quarantined=quarantined, unread=unread)
    jsons = companions.get("json", {})
    rows = {row: jsons[own] for row, own in enumerate(stems) if own in jsons}
    return _with_json(new, rows, read, schema) if rows else new


def _may_be(kind: Kind, name: bytes) -> bool:
    """Return True if a file may be a sample of a kind by its name. Many images have no known
    extension."""
    return may_be_image(name) if kind == "image" else kind_of(name) == kind


def _main_kind(files: Sequence[Entry]) -> Kind:
    """Return the kind of files that are samples: images if any file may be one by its name."""
    if any(may_be_image(file.name) for file in files):
        return "image"
    counts = Counter(kind_of(file.name) for file in files if not is_prose(file.name))
    if counts["array"] or counts["text"]:
        return "array" if counts["array"] else "text"
    if counts["audio"] or counts["video"]:
        return "audio" if counts["audio"] >= counts["video"] else "video"
    return "image"


def _split(
    files: Sequence[Entry], main: Kind
) -> tuple[list[Entry], dict[Kind, dict[bytes, Entry]]]:
    """Separate the samples' own files from their companions, which are returned by kind and stem.

    A file of another kind that is no companion is returned with the first.
    """
    own = {None, "image"} if main == "image" else {main}
    kinds = [kind_of(file.name) for file in files]
    stems = {stem(f.name) for f, kind in zip(files, kinds, strict=True) if kind in own}
    samples: list[Entry] = []
    companions: dict[Kind, dict[bytes, Entry]] = {}
    for file, kind in zip(files, kinds, strict=True):
        if kind is not None and kind not in own and kind in _COMPANIONS:
            name = stem(file.name)
            if name in stems and companions.setdefault(kind, {}).setdefault(name, file) is file:
                continue
        samples.append(file)
    return samples, companions


def _classes(files: Sequence[Entry], kind: Kind) -> list[bytes]:
    """Return the first-level folders with a file that may be a sample, by its name.

    If there are none, return none if such files lie directly in the root, else all folders, so that
    the error reports what is wrong with their files.
    """
    tops = {top for file in files if (top := _class_of(file.name)) is not None}
    usable = {_class_of(file.name) for file in files if _may_be(kind, file.name)}
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
) -> tuple[FieldType, DenseColumn]:
    names = tuple(os.fsdecode(name) for name in classes)
    if given is not None and not given.is_class:
        raise ConfigError(
            f'schema["label"]: got {given!r}, but the labels are class folders: wanted '
            "ClassLabel(names), whose order numbers them."
        )
    type = given if given is not None and given.class_names else ClassLabel(names)
    if unknown := sorted(set(names) - set(type.class_names)):
        raise DatasetError(
            f'schema["label"]: the class folder {unknown[0]!r} is not among its '
            f"{len(type.class_names):,} names (folders without a name: {len(unknown):,}). Add the "
            "names, or remove the folders from the dataset."
        )
    numbers = {os.fsencode(name): number for number, name in enumerate(type.class_names)}
    labels = [numbers[file.name.partition(b"/")[0]] for file in files]
    return type, DenseColumn(np.array(labels, np.int64))


def _with_json(
    samples: Candidates, jsons: Mapping[int, Entry], read: Read, schema: FieldTypes
) -> Candidates:
    """Add the values of JSON files, a field for each key. jsons: the files of some samples."""
    objects: list[dict[str, object] | None] = [None] * len(samples.names)
    rejected: dict[int, str] = {}
    small = {row: file for row, file in jsons.items() if file.size_bytes <= LARGEST_JSON_BYTES}
    for row in jsons.keys() - small.keys():
        rejected[row] = f"its .json file has more than {LARGEST_JSON_BYTES:,} bytes"
    for (row, file), data in zip(small.items(), read(list(small.values())), strict=True):
        try:
            objects[row] = json_object(data, what=printable(file.name))
        except DatasetError as error:
            rejected[row] = str(error)
    names = samples.names
    table = object_table(objects, rejected=rejected, source="json", places=names, unit="file")
    given = {name: type for name, type in schema.items() if name not in samples.schema}
    samples = samples.with_table(fields_of(table, given, is_lenient=True), of="keys of json files")
    return replace(samples, rejected={**samples.rejected, **rejected})


def _class_of(name: bytes) -> bytes | None:
    top, slash, _ = name.partition(b"/")
    return top if slash else None


def _class_order(file: Entry) -> tuple[bytes, bytes, bytes]:
    folder, _, base = file.name.rpartition(b"/")
    return file.name.partition(b"/")[0] if folder else b"", folder, base


class _FieldPlace(NamedTuple):
    """The place of a field. given: as the user wrote it. pattern: of its files' names; its group is
    the part that the star matches, or a path below the folder. literal: the number of bytes that it
    contains literally."""

    field: str
    given: str
    pattern: re.Pattern[bytes]
    literal: int

    def pair(self, name: bytes) -> bytes | None:
        """Return the part of a name that pairs fields, or None if the file isn't of this field."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        return found[1] if "*" in self.given else stem(found[1])


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
    if "*" not in place:
        path = path + b"/*" if path else b"*"
    prefix, _, suffix = path.partition(b"*")
    pattern = re.compile(re.escape(prefix) + b"(.+)" + re.escape(suffix), re.S)
    return _FieldPlace(field, place, pattern, len(path))


def paired_samples(
    url: str, found: Iterable[Entry], places: Sequence[tuple[str, str]], schema: FieldTypes
) -> Candidates:
    """Return a sample for each name that all fields have, in the order of the first field's files.

    A file belongs to the field whose place contains most of its name literally. Files whose name a
    field lacks are quarantined. Raises ConfigError, and DatasetError if a field has no file or if
    no name pairs.
    """
    wanted = [parse_field_place(field, place) for field, place in places]
    for i, place in enumerate(wanted):
        if (same := next((p for p in wanted[:i] if p.pattern == place.pattern), None)) is not None:
            raise ConfigError(
                f'fields: "{same.field}" and "{place.field}" have the same place, {place.given!r}. '
                'Distinguish them by patterns with a star, such as "*.jpg" and "*_mask.png".'
            )
    files: dict[str, dict[bytes, list[Entry]]] = {place.field: {} for place in wanted}
    closest = sorted(wanted, key=lambda place: -place.literal)
    passed_over: Counter[str] = Counter()
    for file in found:
        pairs = ((place.field, place.pair(file.name)) for place in closest)
        field, pair = next((each for each in pairs if each[1] is not None), ("", None))
        if pair is None:
            passed_over[extension(file.name) or "(none)"] += 1
        else:
            files[field].setdefault(pair, []).append(file)
    for place in wanted:
        if not files[place.field]:
            tops = {f.name.partition(b"/")[0] for f in found if b"/" in f.name}
            shown = ", ".join(repr(printable(top)) for top in sorted(tops)[:_SHOWN_FOLDERS])
            raise DatasetError(
                f'fields["{place.field}"]: {url} has no file in {place.given!r}. Its folders are '
                f"{shown or 'none'}{', …' if len(tops) > _SHOWN_FOLDERS else ''}."
            )
    whole: list[bytes] = []
    unpaired: list[QuarantineEntry] = []
    for pair in dict.fromkeys(pair for mine in files.values() for pair in mine):
        counts = [len(files[place.field].get(pair, ())) for place in wanted]
        odd = next((i for i, count in enumerate(counts) if count != 1), None)
        if odd is None:
            whole.append(pair)
            continue
        how_many = f"{counts[odd]} files" if counts[odd] else "no file"
        reason = f"{wanted[odd].field}: {how_many} of its name in {wanted[odd].given!r}"
        names = [file.name for mine in files.values() for file in mine.get(pair, ())]
        first, *others = (QuarantineEntry(name=name, reason=reason) for name in names)
        unpaired += [first, *(replace(entry, is_counted=False) for entry in others)]
    if not whole:
        each = (chain.from_iterable(files[place.field].values()) for place in wanted)
        shown = " and ".join(printable(min(file.name for file in mine)) for mine in each)
        raise DatasetError(
            f"{url}: nothing pairs: no name is that of one file in each of "
            f"{[place.given for place in wanted]} (such as {shown}). Names must be equal except "
            'for the extension; if they differ otherwise, use a pattern such as "masks/*_mask.png".'
        )
    own = files[wanted[0].field]
    whole.sort(key=lambda pair: own[pair][0].name.rpartition(b"/"))
    columns = {field: [mine[pair][0] for pair in whole] for field, mine in files.items()}
    types = {
        field: schema.get(field) or type_by_names(file.name for file in column)
        for field, column in columns.items()
    }
    unread = left_out_sentences("files", unpaired)
    return Candidates.of_files(
        columns, types, quarantined=unpaired, passed_over=passed_over, unread=unread
    )
