"""Make up the samples of a folder from the names of its files alone.

Without a word from the user, samples are images where there are any, else arrays, texts, sound or
video, each in a file. Class = first-level sub-folder, files below it recursively: torchvision's
ImageFolder, in its order. Next to x.jpg, x.txt is its caption, x.json its values, x.npy its array.
Two images of one sample are never guessed from their names.

`Dataset(url, fields={"image": "images", "mask": "masks"})` says which folder holds which field;
files are paired by name: images/a/x.jpg with masks/a/x.png. A place with a star is a pattern, whose
star is the name that pairs: "masks/*_mask.png".
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fields import (
    Array,
    Audio,
    ClassLabel,
    DenseColumn,
    Image,
    Text,
    TextTable,
    Video,
    fields_of,
    json_object,
    object_table,
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
    type_by_name,
)
from penstock.readers.formats.folder.folder_samples import FolderSamples
from penstock.readers.origin import QuarantineEntry, is_other_kind, is_prose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Column, FieldType
    from penstock.readers.origin import Entry

LARGEST_JSON_BYTES = 2**20
"""As large a JSON file beside a sample is read."""

_CAPTION, _ARRAY, _JSON, _AUDIO, _VIDEO = "caption", "array", "json", "audio", "video"
_ROLES = {
    **dict.fromkeys(sorted(TEXTS), _CAPTION),
    **dict.fromkeys(ARRAYS, _ARRAY),
    "json": _JSON,
    **dict.fromkeys(sorted(AUDIO), _AUDIO),
    **dict.fromkeys(sorted(VIDEO), _VIDEO),
}
# The role of files that are samples, by the field that they are; "" are all without a role.
_OWN = {"image": "", _ARRAY: _ARRAY, "text": _CAPTION, _AUDIO: _AUDIO, _VIDEO: _VIDEO}
_OTHER = {_AUDIO: "not sound, by its name", _VIDEO: "not a video, by its name"}
_SHOWN_CLASSES = 5
_BESIDE = "not in a class folder (a file beside the class folders has no label)"
_NO_CLASS = "its folder is no class: nothing in it can be a sample"


def class_folder_samples(
    found: Iterable[Entry],
    read: Callable[[Sequence[Entry]], Sequence[bytes]],
    schema: Mapping[str, FieldType],
    *,
    folders: Iterable[bytes] = (),
    allow_empty: bool = False,
    url: str = "",
) -> FolderSamples:
    """The samples of a folder. found: all files; read: their bytes; schema: types that were given;
    folders: directly below the root, empty ones too; allow_empty: these are classes all the same.

    Raises DatasetError (class folders that a schema doesn't name, values that fit nothing),
    DatasetNotFoundError (a class folder without samples).
    """
    main, companions, field, type = _roles(found)
    stray: list[QuarantineEntry] = []
    if field in _OTHER:  # as Bytes any file would do
        is_own = [_ROLES.get(extension(file.name)) == field for file in main]
        stray = [
            QuarantineEntry(name=file.name, reason=_OTHER[field])
            for file, is_mine in zip(main, is_own, strict=True)
            if not is_mine
        ]
        main = [file for file, is_mine in zip(main, is_own, strict=True) if is_mine]
    files = sorted(main, key=_class_order)
    classes = _classes(files, field)
    given = schema.get("label")
    # A list of classes numbers them by itself, whichever folders there are.
    is_listed = isinstance(given, ClassLabel) and bool(given.names)
    if classes and not is_listed:
        classes = _with_empty(classes, folders, allow_empty=allow_empty, url=url)
    if classes:
        known = set(classes)
        stray += [
            QuarantineEntry(name=file.name, reason=_NO_CLASS if _class_of(file.name) else _BESIDE)
            for file in files
            if _class_of(file.name) not in known
        ]
        files = [file for file in files if _class_of(file.name) in known]
    types: dict[str, FieldType] = {field: type}
    values: dict[str, Column] = {}
    if classes:
        types["label"], values["label"] = _labels(files, classes, given)
    samples = FolderSamples(
        names=[file.name for file in files],
        files=files,
        places={field: np.arange(len(files), dtype=np.int64)},
        types=types,
        values=values,
        quarantined=stray,
        left_out=_lost(stray),
    )
    return _with_companions(samples, companions, read, schema) if companions else samples


def _lost(stray: Sequence[QuarantineEntry]) -> list[str]:
    """Images without a class are no paper that lies about."""
    lost = [each for each in stray if extension(each.name) in IMAGES]
    if not lost:
        return []
    return [
        f"{len(lost):,} images are left out, such as {printable(lost[0].name)}: {lost[0].reason}."
    ]


def _roles(
    found: Iterable[Entry],
) -> tuple[list[Entry], dict[tuple[bytes, str], Entry], str, FieldType]:
    """The files that are samples, what lies beside them by stem and role, and the field that the
    samples are."""
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
        if role in _KINDS and key[0] in stems and key not in companions:
            companions[key] = file
        else:
            main.append(file)  # whoever reads it says why it is no sample
    return main, companions, field, type


def _field(files: Sequence[Entry], extensions: Sequence[str]) -> tuple[str, FieldType]:
    """What the samples are: images where there are any, or anything that may be one."""
    if any(_may_be_image(file.name) for file in files):
        return "image", Image()
    counts = Counter(_ROLES.get(each) for each in extensions)
    if counts[_ARRAY]:
        return _ARRAY, Array()
    texts = [f.name for f in files if _ROLES.get(extension(f.name)) == _CAPTION]
    if not all(map(is_prose, texts)):
        return "text", Text()
    if counts[_AUDIO] or counts[_VIDEO]:
        is_sound = counts[_AUDIO] >= counts[_VIDEO]
        return (_AUDIO, Audio()) if is_sound else (_VIDEO, Video())
    return "image", Image()


def _may_be_image(name: bytes) -> bool:
    """Images may have any extension, or none; what has that of another kind is none."""
    return not is_other_kind(name) and not is_prose(name)


def _classes(files: Sequence[Entry], field: str) -> list[bytes]:
    """The first-level folders with a file that may be a sample, by its name. If none has one: none
    where such files lie beside the folders, else all, so that the message says what is wrong with
    their files."""
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
    """The classes of all folders. Raises DatasetNotFoundError for folders without a sample, which
    would shift the numbers of the classes behind them."""
    empty = sorted({*folders} - {*classes})
    if not empty:
        return classes
    if allow_empty:
        return sorted({*classes, *empty})
    some = ", ".join(repr(printable(name)) for name in empty[:_SHOWN_CLASSES])
    are = "are folders" if len(empty) > 1 else "is a folder"
    raise DatasetNotFoundError(
        f"{url}: {some}{', …' if len(empty) > _SHOWN_CLASSES else ''} {are} without a sample "
        f"beside {len(classes):,} class folder{'s' * (len(classes) != 1)}. Classes are numbered by "
        "the sorted names of their folders, so a class that lacks its files here, and has them "
        "elsewhere, would shift the labels. Put the files there or remove the folder; pass "
        "allow_empty=True (--allow-empty), which numbers it too, as in torchvision; or list the "
        'classes by schema={"label": ClassLabel([…])}.'
    )


def _labels(
    files: Sequence[Entry], classes: Sequence[bytes], given: FieldType | None
) -> tuple[ClassLabel, DenseColumn]:
    names = tuple(os.fsdecode(name) for name in classes)
    type = ClassLabel(names)
    if given is not None and not isinstance(given, ClassLabel):
        raise ConfigError(
            f'schema["label"]: got {given!r}, and labels are class folders here: wanted '
            "ClassLabel(names), whose order numbers them."
        )
    if given is not None and given.names:
        unknown = sorted(set(names) - set(given.names))
        if unknown:
            raise DatasetError(
                f'schema["label"]: the class folder {unknown[0]!r} is not among its '
                f"{len(given.names):,} names, and {len(unknown):,} folders aren't. Add the names, "
                "or take the folders out of the dataset."
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
    """The samples with the fields that lie beside them."""
    stems = [stem(name) for name in samples.names]
    used = {each for each in stems if any((each, role) in companions for role in _KINDS)}
    files = list(samples.files)
    types, places = dict(samples.types), dict(samples.places)
    for role, type in ((_CAPTION, Text()), (_ARRAY, Array())):
        numbers = _numbers(stems, role, companions, files) if used else None
        if numbers is not None:
            types[role], places[role] = type, numbers
    left_out = [*samples.left_out]
    rejected: dict[int, str] = {}
    jsons = {row: each for row, s in enumerate(stems) if (each := companions.get((s, _JSON)))}
    here = set(stems)
    alone = [
        QuarantineEntry(name=file.name, reason="what it lies beside is no sample")
        for (of, _), file in companions.items()
        if of not in here
    ]
    quarantined = [*samples.quarantined, *alone]
    samples = replace(samples, files=files, types=types, places=places, quarantined=quarantined)
    if jsons:
        objects, rejected = _objects(jsons, len(stems), read)
        table = _table(objects, [printable(name) for name in samples.names], rejected)
        given = {name: type for name, type in schema.items() if name not in types}
        found = fields_of(table, given, is_lenient=True)
        left_out += [
            f'"{n}" of the json files is left out: {w}.' for n, w in found.left_out.items()
        ]
        left_out += [
            f'"{name}" of the json files is left out: a field of this name lies beside them.'
            for name in found.types
            if name in types
        ]
        samples = samples.with_table(found)
    return replace(samples, rejected={**samples.rejected, **rejected}, left_out=left_out)


_KINDS = (_CAPTION, _ARRAY, _JSON)


def _numbers(
    stems: Sequence[bytes],
    role: str,
    companions: Mapping[tuple[bytes, str], Entry],
    files: list[Entry],
) -> NDArray[np.int64] | None:
    """The companion of each sample, as numbers of files, to which it is added."""
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
    """Each sample's JSON object, and why a sample's can't be one."""
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


def _table(
    objects: list[dict[str, object] | None], places: Sequence[str], rejected: dict[int, str]
) -> TextTable:
    """The objects as a table; one that can't be a row is rejected."""
    try:
        return object_table(objects, source="json", places=places, unit="file")
    except DatasetError:
        pass  # one file's fault, or that of all together: which?
    for row, each in enumerate(objects):
        try:
            object_table([each], source="json", places=[places[row]], unit="file")
        except DatasetError as error:
            rejected[row], objects[row] = str(error), None
    return object_table(objects, source="json", places=places, unit="file")


def _class_of(name: bytes) -> bytes | None:
    top, slash, _ = name.partition(b"/")
    return top if slash else None


def _class_order(file: Entry) -> tuple[bytes, bytes, bytes]:
    folder, _, base = file.name.rpartition(b"/")
    return file.name.partition(b"/")[0] if folder else b"", folder, base


_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _FieldPlace:
    """Where a field lies: what its files' names begin and end with."""

    field: str
    told: str
    prefix: bytes
    suffix: bytes
    is_pattern: bool

    def pair(self, name: bytes) -> bytes | None:
        """What pairs a file with those of other fields; None for a file that isn't of this one."""
        enough = len(name) > len(self.prefix) + len(self.suffix)
        if not (enough and name.startswith(self.prefix) and name.endswith(self.suffix)):
            return None
        middle = name[len(self.prefix) : len(name) - len(self.suffix)]
        return middle if self.is_pattern else stem(middle)


def place_of(field: str, told: str) -> _FieldPlace:
    """A folder below the dataset's root, or a pattern with one star. Raises ConfigError."""
    parts = told.replace("\\", "/").split("/")
    path = encoded_name("/".join(part for part in parts if part not in ("", ".")))
    odd = told.startswith("/") or ".." in parts or told.count("*") > 1 or not told
    if odd or path is None:
        raise ConfigError(
            f'fields["{field}"]: got {told!r}, wanted a folder below the dataset\'s root, or a '
            'pattern with one star such as "masks/*_mask.png".'
        )
    if b"*" in path:
        prefix, _, suffix = path.partition(b"*")
        return _FieldPlace(field, told, prefix, suffix, is_pattern=True)
    return _FieldPlace(field, told, path + b"/" if path else b"", b"", is_pattern=False)


def paired_samples(
    url: str,
    found: Iterable[Entry],
    places: Sequence[tuple[str, str]],
    schema: Mapping[str, FieldType],
) -> FolderSamples:
    """The samples: names that all fields have, in the order of the first field's files. What one
    field lacks is quarantined, file by file.

    Raises ConfigError, and DatasetError where a field has no file, or nothing pairs.
    """
    wanted = _wanted(places)
    files, others = _by_pair(found, wanted)
    for place in wanted:
        if not files[place.field]:
            raise DatasetError(
                f'fields["{place.field}"]: {url} has no file in {place.told!r}. '
                f"Folders there: {_folders(others, files)}."
            )
    first = files[wanted[0].field]
    whole = [
        pair
        for pair in first
        if all(len(files[place.field].get(pair, ())) == 1 for place in wanted)
    ]
    if not whole:
        raise DatasetError(f"{url}: {_nothing(files, wanted)}")
    whole.sort(key=lambda pair: _name_order(first[pair][0].name))
    unpaired = list(_unpaired(files, wanted))
    ordered: list[Entry] = []
    numbers = {}
    types = {}
    for place in wanted:
        mine = [files[place.field][pair][0] for pair in whole]
        types[place.field] = schema.get(place.field) or _type(mine)
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
            f"{len(unpaired):,} files are left out, as a field lacks their name, such as "
            f"{printable(each.name)}: {each.reason}. All are in the index's quarantine.jsonl."
            for each in unpaired[:1]
        ],
    )


def _wanted(places: Sequence[tuple[str, str]]) -> list[_FieldPlace]:
    wanted = [place_of(field, told) for field, told in places]
    taken: dict[tuple[bytes, bytes], str] = {}
    for place in wanted:
        other = taken.setdefault((place.prefix, place.suffix), place.field)
        if other != place.field:
            raise ConfigError(
                f'fields: "{other}" and "{place.field}" lie in one place, {place.told!r}. Tell '
                'them apart by a pattern with a star, such as "*.jpg" and "*_mask.png".'
            )
    return wanted


def _nothing(
    files: Mapping[str, Mapping[bytes, Sequence[Entry]]], wanted: Sequence[_FieldPlace]
) -> str:
    """Why no sample is whole."""
    if len(wanted) == 1:
        return f"each name in {wanted[0].told!r} is there twice, with several extensions."
    a, b = wanted[:2]
    return (
        f"nothing pairs: no file in {a.told!r} (such as {_example(files[a.field])}) has the name "
        f"of one in {b.told!r} (such as {_example(files[b.field])}). Names must be the same but "
        'for the extension; say what else differs with a star: "masks/*_mask.png".'
    )


def _by_pair(
    found: Iterable[Entry], wanted: Sequence[_FieldPlace]
) -> tuple[dict[str, dict[bytes, list[Entry]]], list[Entry]]:
    """The files of each field by what pairs them, and the files of none. A file belongs to the
    field whose place says most of its name."""
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
                    f"no file of its name in {other.told!r}"
                    if not theirs
                    else f"{len(theirs)} files of its name in {other.told!r}"
                )
                for file in mine:
                    yield QuarantineEntry(
                        name=file.name,
                        reason=f"{other.field}: {problem}",
                        is_counted=pair not in seen,
                    )
                    seen.add(pair)
                break


def _type(files: Sequence[Entry]) -> FieldType:
    """What most files are; checking the others says what is wrong with them."""
    return Counter(type_by_name(file.name) for file in files).most_common(1)[0][0]


def _folders(others: Sequence[Entry], files: Mapping[str, Mapping[bytes, Sequence[Entry]]]) -> str:
    names = [file.name for file in others]
    names += [file.name for mine in files.values() for each in mine.values() for file in each]
    tops = sorted({name.partition(b"/")[0] for name in names if b"/" in name})
    listed = ", ".join(repr(printable(top)) for top in tops[:_SHOWN])
    return (listed or "none") + (", …" if len(tops) > _SHOWN else "")


def _example(files: Mapping[bytes, Sequence[Entry]]) -> str:
    return printable(min(file.name for each in files.values() for file in each))


def _name_order(name: bytes) -> tuple[bytes, bytes]:
    folder, _, base = name.rpartition(b"/")
    return folder, base
