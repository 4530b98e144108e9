"""Fields in folders of their own, paired by name: images/a/x.jpg with masks/a/x.png.

`Dataset(url, fields={"image": "images", "mask": "masks"})` says which folder holds which field. A
place with a star is a pattern, whose star is the name that pairs: "masks/*_mask.png".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError, DatasetError
from penstock.readers.files.names import encoded_name, printable
from penstock.readers.formats.folder.kinds import stem, type_of
from penstock.readers.formats.folder.samples import Samples
from penstock.readers.origin.quarantine import QuarantineEntry
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.origin.origin import Entry

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Place:
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


def place_of(field: str, told: str) -> _Place:
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
        return _Place(field, told, prefix, suffix, is_pattern=True)
    return _Place(field, told, path + b"/" if path else b"", b"", is_pattern=False)


def paired(
    url: str,
    found: Iterable[Entry],
    places: Sequence[tuple[str, str]],
    schema: Mapping[str, FieldType],
) -> Samples:
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
    whole.sort(key=lambda pair: _order(first[pair][0].name))
    unpaired = list(_unpaired(files, wanted))
    ordered: list[Entry] = []
    numbers = {}
    types = {}
    for place in wanted:
        mine = [files[place.field][pair][0] for pair in whole]
        types[place.field] = schema.get(place.field) or _type(mine)
        numbers[place.field] = np.arange(len(ordered), len(ordered) + len(mine), dtype=np.int64)
        ordered += mine
    return Samples(
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


def _wanted(places: Sequence[tuple[str, str]]) -> list[_Place]:
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


def _nothing(files: Mapping[str, Mapping[bytes, Sequence[Entry]]], wanted: Sequence[_Place]) -> str:
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
    found: Iterable[Entry], wanted: Sequence[_Place]
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
    files: Mapping[str, Mapping[bytes, Sequence[Entry]]], wanted: Sequence[_Place]
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
    return Counter(type_of(file.name) for file in files).most_common(1)[0][0]


def _folders(others: Sequence[Entry], files: Mapping[str, Mapping[bytes, Sequence[Entry]]]) -> str:
    names = [file.name for file in others]
    names += [file.name for mine in files.values() for each in mine.values() for file in each]
    tops = sorted({name.partition(b"/")[0] for name in names if b"/" in name})
    listed = ", ".join(repr(printable(top)) for top in tops[:_SHOWN])
    return (listed or "none") + (", …" if len(tops) > _SHOWN else "")


def _example(files: Mapping[bytes, Sequence[Entry]]) -> str:
    return printable(min(file.name for each in files.values() for file in each))


def _order(name: bytes) -> tuple[bytes, bytes]:
    folder, _, base = name.rpartition(b"/")
    return folder, base
