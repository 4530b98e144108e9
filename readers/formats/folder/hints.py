"""What file names suggest and nobody acts on: told, so that wrong labels are seen."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.readers.fields.field_types import ClassLabel, Image
from penstock.readers.fields.mask_names import is_mask_name
from penstock.readers.files.names import printable
from penstock.readers.formats.folder.kinds import IMAGES, stem
from penstock.readers.origin.folder_names import field_of, role_of
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.readers.fields.field_types import FieldType

_NUMBERS = ("depth", "depths", "disp", "disparity", "disparities")


def hints_of_names(
    url: str, names: Sequence[bytes], types: Mapping[str, FieldType], *, asked: bool
) -> list[str]:
    """Sentences on samples that are a file each. names: theirs; asked: the user spoke of labels."""
    label = types.get("label")
    classes = label.names if isinstance(label, ClassLabel) else ()
    hints = [] if asked else _lone_class(url, classes)
    return hints if classes else [*hints, *_pairs(names)]


def _lone_class(url: str, classes: Sequence[str]) -> list[str]:
    if len(classes) != 1 or role_of(classes[0]) is None:
        return []
    return [
        f"{classes[0]!r} is the only folder, and read as the only class: every label is 0. If it "
        f"is none, give {url.rstrip('/')}/{classes[0]}; if it is, say so by "
        'schema={"label": ClassLabel()}.'
    ]


def _pairs(names: Iterable[bytes]) -> list[str]:
    """Images whose names are those of others and a word: 1_mask.png beside 1.jpg."""
    by_stem = {stem(name): name for name in names if extension(name) in IMAGES}
    found: Counter[tuple[bytes, bytes]] = Counter()
    example: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
    for own, name in by_stem.items():
        base, mark, word = own.rpartition(b"_")
        other = by_stem.get(base)
        if mark and other is not None and role_of(printable(word)) == "beside":
            kind = (other[len(base) :], name[len(base) :])
            found[kind] += 1
            example.setdefault(kind, (other, name))
    if not found:
        return []
    kind, count = found.most_common(1)[0]
    first, second = map(printable, example[kind])
    told = {"image": f"*{printable(kind[0])}"}
    told[field_of(printable(kind[1].rpartition(b".")[0].lstrip(b"_")))] = f"*{printable(kind[1])}"
    listed = ", ".join(f'"{field}": "{place}"' for field, place in told.items())
    return [
        f"{count:,} images seem to belong to others, such as {second} to {first}; here each is a "
        f"sample of its own. To pair them by name pass fields={{{listed}}}."
    ]


def pictures_of_numbers(
    types: Mapping[str, FieldType], extensions: Mapping[str, Iterable[str]]
) -> list[str]:
    """Sentences on fields that are images, and are numbers by their names. extensions: of those
    whose type nobody gave."""
    images = [name for name, type in types.items() if isinstance(type, Image)]
    hints = []
    for name in images:
        found = {*extensions.get(name, ())}
        word = name.rpartition("_")[2]
        if len(images) < 2 or not found:
            continue
        other = next(each for each in images if each != name)
        if is_mask_name(name, ()) and not is_mask_name(name, found):
            hints.append(
                f'"{name}" is read as pictures: class numbers are kept by PNG, TIFF and BMP, and '
                f"its files are {', '.join(f'.{each}' for each in sorted(found))}. Convert them "
                f'for masks, schema={{"{name}": Mask(of="{other}")}}.'
            )
        elif word in _NUMBERS and not {"jpg", "jpeg"} & found:
            hints.append(
                f'"{name}" is read as pictures, of 8 bits when they are decoded. For the numbers '
                f'as they are stored pass schema={{"{name}": Mask(of="{other}")}}.'
            )
    return hints
