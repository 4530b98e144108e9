"""Define the samples of a folder, whatever its layout: the files and values of each.

The samples are grouped into virtual shards. If file names suggest another meaning than the one that
was chosen, a warning reports it, so that wrong labels are noticed.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.fieldtypes import (
    ClassLabel,
    Image,
    MultiLabel,
    Schema,
    Value,
    is_mask_name,
    masks_by_name,
)
from penstock.readers.files import extension, printable
from penstock.readers.formats.candidates import (
    MISSING,
    Candidates,
    Grouping,
    Spans,
    group_positions,
)
from penstock.readers.formats.folder.folder_files import IMAGES, stem
from penstock.readers.origin import QuarantineEntry, field_of, role_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType, TableFields
    from penstock.readers.origin import Entry, LeftOut

_log = logging.getLogger("penstock")

VIRTUAL_SHARD_BYTES = 64 * 2**20
"""Mean size of a virtual shard: an efficient fetch from an object store (8 ranges of 8 MiB)."""

# Part of the index format: with another salt, every folder would have another order.
_GROUP_SALT = b"penstock-group-1"

_NUMBERS = ("depth", "depths", "disp", "disparity", "disparities")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FolderSamples:
    """The n samples of a folder, derived from names, sizes and tables.

    names: one for each sample, usually that of its first file. files: all files that fields lie in.
    places: for each field that lies in files, the file's number for each sample or MISSING, int64,
    shape (n,). types: of all fields, in order. values, present: of the fields that are known
    already. rejected: the reason for each rejected sample, by number. quarantined: other files that
    can't be samples. passed_over: counts of files that belong to no sample, by extension. notes:
    one sentence for each decision. left_out: one sentence for each thing that isn't read though it
    seems to be meant. has_stray_files, unnamed: see `Candidates`.
    """

    names: Sequence[bytes]
    files: Sequence[Entry]
    places: Mapping[str, NDArray[np.int64]]
    types: Mapping[str, FieldType]
    values: Mapping[str, Column] = field(default_factory=dict)
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    quarantined: Sequence[QuarantineEntry] = ()
    passed_over: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    has_stray_files: bool = False
    unnamed: Mapping[str, LeftOut] = field(default_factory=dict)

    def with_table(self, found: TableFields) -> FolderSamples:
        """Return these samples with a table's fields added; fields that exist already are kept."""
        new = [name for name in found.types if name not in self.types]
        return replace(
            self,
            types={**self.types, **{name: found.types[name] for name in new}},
            values={**self.values, **{name: found.values[name] for name in new}},
            present={
                **self.present,
                **{name: found.present[name] for name in new if name in found.present},
            },
            rejected={**found.rejected, **self.rejected},
            notes=(*self.notes, *found.notes),
        )

    def without_rejected(self) -> FolderSamples:
        """Return the samples without the rejected ones, which are quarantined by name."""
        if not self.rejected:
            return self
        rows = np.array([i for i in range(len(self.names)) if i not in self.rejected], np.int64)
        bad = (
            QuarantineEntry(name=self.names[row], reason=reason)
            for row, reason in sorted(self.rejected.items())
        )
        first = min(self.rejected)
        message = (
            f"{len(self.rejected):,} samples are left out because of their values, such as "
            f"{printable(self.names[first])}: {self.rejected[first]}. All are in the index's "
            "quarantine.jsonl."
        )
        return replace(
            self,
            left_out=[*self.left_out, message],
            names=[self.names[row] for row in rows.tolist()],
            places={name: numbers[rows] for name, numbers in self.places.items()},
            values={name: column.take(rows) for name, column in self.values.items()},
            present={name: values[rows] for name, values in self.present.items()},
            rejected={},
            quarantined=[*self.quarantined, *bad],
        )


def candidates_of(
    samples: FolderSamples, schema: Mapping[str, FieldType], *, url: str
) -> Candidates:
    """Return the candidates from which an index is built.

    schema: given types, which are already those of the values. Raises ConfigError for types of
    fields that don't exist or that can't lie in files.
    """
    types = _merged(samples, schema, url)
    for note in samples.notes:
        _log.info("%s: %s", url, note)
    file_sizes = np.array([file.size_bytes for file in samples.files] + [0], np.int64)
    spans = {
        name: Spans(
            files=numbers, starts=np.zeros(len(numbers), np.int64), sizes=file_sizes[numbers]
        )
        for name, numbers in samples.places.items()
    }
    # Only of fetched bytes: values lie in the index.
    sizes = np.zeros(len(samples.names), np.int64)
    for each in spans.values():
        sizes += each.sizes
    present = {name: values for name, values in samples.present.items() if not values.all()}
    return Candidates(
        schema=types,
        files=samples.files,
        names=samples.names,
        spans=spans,
        values=samples.values,
        shards=virtual_shards(samples.names, sizes, shard_bytes=VIRTUAL_SHARD_BYTES),
        shard_bytes=VIRTUAL_SHARD_BYTES,
        quarantined=sorted(samples.quarantined, key=lambda q: q.name),
        passed_over=dict(samples.passed_over),
        present=present,
        has_stray_files=samples.has_stray_files,
        unnamed=samples.unnamed,
    )


def _merged(samples: FolderSamples, schema: Mapping[str, FieldType], url: str) -> Schema:
    unknown = [name for name in schema if name not in samples.types]
    if unknown:
        raise ConfigError(
            f'schema: got "{unknown[0]}", but {url} has {list(samples.types)}. Give '
            "types of these, or of a table's columns."
        )
    types = {**samples.types, **{n: t for n, t in schema.items() if n in samples.places}}
    for name, type in schema.items():
        if name in samples.places and isinstance(type, Value | ClassLabel | MultiLabel):
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, but "{name}" lies in files of its own, which '
                f"can't hold such values. Put the values into a table (manifest=), or use Text()."
            )
    in_files = {name: type for name, type in types.items() if name in samples.places}
    extensions = {
        name: {extension(samples.files[number].name) for number in places[places != MISSING]}
        for name, places in samples.places.items()
        if name not in schema
    }
    masks, notes = masks_by_name(in_files, extensions, given=schema)
    for note in notes:
        _log.info("%s: %s.", url, note)
    types.update(masks)
    for hint in pictures_of_numbers(types, extensions):
        _log.warning("%s: %s", url, hint)
    return Schema(types)


def virtual_shards(
    names: Sequence[bytes], sizes: NDArray[np.int64], *, shard_bytes: int
) -> Grouping:
    """Group samples into about total bytes / shard_bytes shards, by a hash of their names.

    The grouping depends on names and sizes alone. It is computed before any file is checked, so
    that an index and an unshuffled pack agree.
    """
    count = max(1, -(-int(sizes.sum()) // shard_bytes))
    if count == 1:
        return group_positions(np.zeros(len(names), np.int64))
    hashes = (hashlib.blake2b(name, digest_size=8, key=_GROUP_SALT).digest() for name in names)
    numbers = np.frombuffer(b"".join(hashes), "<u8") % np.uint64(count)
    return group_positions(numbers.astype(np.int64))


def hints_of_names(
    url: str, names: Sequence[bytes], types: Mapping[str, FieldType], *, has_labels: bool
) -> list[str]:
    """Return warnings about samples of one file each.

    names: of the samples. has_labels: the user's schema contains labels.
    """
    label = types.get("label")
    classes = label.names if isinstance(label, ClassLabel) else ()
    if not classes:
        return _pairing_hints(names)
    if has_labels or len(classes) != 1 or role_of(classes[0]) is None:
        return []
    return [
        f"{classes[0]!r} is the only folder, and is read as the only class: every label is 0. If "
        f"it isn't a class, give {url.rstrip('/')}/{classes[0]} as the URL; if it is one, pass "
        'schema={"label": ClassLabel()}.'
    ]


def _pairing_hints(names: Iterable[bytes]) -> list[str]:
    """Return a warning if images are named like others plus a suffix: 1_mask.png next to 1.jpg."""
    by_stem = {stem(name): name for name in names if extension(name) in IMAGES}
    found: Counter[tuple[bytes, bytes]] = Counter()
    example: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
    for own, name in by_stem.items():
        base, mark, suffix = own.rpartition(b"_")
        other = by_stem.get(base)
        if mark and other is not None and role_of(printable(suffix)) == "companion":
            kind = (other[len(base) :], name[len(base) :])
            found[kind] += 1
            example.setdefault(kind, (other, name))
    if not found:
        return []
    kind, count = found.most_common(1)[0]
    first, second = map(printable, example[kind])
    places = {"image": f"*{printable(kind[0])}"}
    other_field = field_of(printable(kind[1].rpartition(b".")[0].lstrip(b"_")))
    places[other_field] = f"*{printable(kind[1])}"
    listed = ", ".join(f'"{field}": "{place}"' for field, place in places.items())
    return [
        f"{count:,} images seem to belong to others, such as {second} to {first}, but each is read "
        f"as a sample of its own. To pair them by name pass fields={{{listed}}}."
    ]


def pictures_of_numbers(
    types: Mapping[str, FieldType], extensions: Mapping[str, Iterable[str]]
) -> list[str]:
    """Return warnings about image fields whose names suggest numbers.

    extensions: of the fields whose types weren't given.
    """
    images = [name for name, type in types.items() if isinstance(type, Image)]
    hints = []
    for name in images:
        found = {*extensions.get(name, ())}
        if len(images) < 2 or not found:
            continue
        other = next(each for each in images if each != name)
        if is_mask_name(name, ()) and not is_mask_name(name, found):
            hints.append(
                f'"{name}" is read as pictures: only PNG, TIFF and BMP preserve class numbers, and '
                f"its files are {', '.join(f'.{each}' for each in sorted(found))}. To read masks, "
                f'convert them and pass schema={{"{name}": Mask(of="{other}")}}.'
            )
        elif name.rpartition("_")[2] in _NUMBERS and not {"jpg", "jpeg"} & found:
            hints.append(
                f'"{name}" is read as pictures, which are decoded to 8 bits. To read the stored '
                f'numbers pass schema={{"{name}": Mask(of="{other}")}}.'
            )
    return hints
