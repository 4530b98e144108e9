"""Which files and values make up each sample of a folder, however the folder is laid out."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError
from penstock.readers.fields.field_types import ClassLabel, MultiLabel, Value
from penstock.readers.fields.mask_names import masks_by_name
from penstock.readers.fields.schema import Schema
from penstock.readers.files.names import printable
from penstock.readers.formats.candidates import MISSING, Candidates, Spans
from penstock.readers.formats.folder.hints import pictures_of_numbers
from penstock.readers.formats.grouping import Grouping, grouping
from penstock.readers.origin.quarantine import QuarantineEntry
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.fields.tables import Fields
    from penstock.readers.origin.origin import Entry
    from penstock.readers.origin.quarantine import LeftOut

_log = logging.getLogger("penstock")

VIRTUAL_SHARD_BYTES = 64 * 2**20
"""Mean size of a virtual shard: what one fetch of an object store moves well (8 ranges of 8
MiB)."""

# Part of the index format: another salt is another order of every folder.
_GROUP_SALT = b"penstock-group-1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """n samples of a folder, as names, sizes and tables tell them.

    names: each sample's own, as a rule its first file's. files: what fields lie in. places: of each
    field that lies in files, the file's number for each sample or MISSING, int64, shape (n,).
    types: of all fields, in order. values, present: of the fields that are known by now. rejected:
    by sample, why it is none. quarantined: other files that can't be one; passed_over: files that
    are no part of a sample, by extension. notes: what was decided, a sentence each; left_out: what
    isn't read though it seems to be meant, a sentence each. has_papers, unnamed: see
    `Candidates`.
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
    has_papers: bool = False
    unnamed: Mapping[str, LeftOut] = field(default_factory=dict)

    def with_table(self, found: Fields) -> Samples:
        """With a table's fields behind the others; a field that is there already stays."""
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

    def good(self) -> Samples:
        """Without the rejected ones, which are quarantined by name."""
        if not self.rejected:
            return self
        rows = np.array([i for i in range(len(self.names)) if i not in self.rejected], np.int64)
        bad = (
            QuarantineEntry(name=self.names[row], reason=reason)
            for row, reason in sorted(self.rejected.items())
        )
        first = min(self.rejected)
        told = (
            f"{len(self.rejected):,} samples are left out, as values don't fit, such as "
            f"{printable(self.names[first])}: {self.rejected[first]}. All are in the index's "
            "quarantine.jsonl."
        )
        return replace(
            self,
            left_out=[*self.left_out, told],
            names=[self.names[row] for row in rows.tolist()],
            places={name: numbers[rows] for name, numbers in self.places.items()},
            values={name: column.take(rows) for name, column in self.values.items()},
            present={name: values[rows] for name, values in self.present.items()},
            rejected={},
            quarantined=[*self.quarantined, *bad],
        )


def candidates_of(samples: Samples, schema: Mapping[str, FieldType], *, url: str) -> Candidates:
    """Good samples as what an index is built from. schema: types that were given,
    which the values have by now.

    Raises ConfigError for types of fields that aren't there, or that their files can't have.
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
    # Of what is fetched: noted values lie in the index.
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
        shards=virtual_shards(samples.names, sizes),
        shard_bytes=VIRTUAL_SHARD_BYTES,
        quarantined=sorted(samples.quarantined, key=lambda q: q.name),
        passed_over=dict(samples.passed_over),
        present=present,
        has_papers=samples.has_papers,
        unnamed=samples.unnamed,
    )


def _merged(samples: Samples, schema: Mapping[str, FieldType], url: str) -> Schema:
    unknown = [name for name in schema if name not in samples.types]
    if unknown:
        raise ConfigError(
            f'schema: got "{unknown[0]}", and {url} has {list(samples.types)}. Give types of '
            "those, or of a table's columns."
        )
    types = {**samples.types, **{n: t for n, t in schema.items() if n in samples.places}}
    for name, type in schema.items():
        if name in samples.places and isinstance(type, Value | ClassLabel | MultiLabel):
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, and "{name}" lies in files of its own, whose '
                f"content is no such value. Put the values into a table (manifest=), or say Text()."
            )
    in_files = {name: type for name, type in types.items() if name in samples.places}
    extensions = {name: _extensions(samples, name) for name in in_files if name not in schema}
    masks, notes = masks_by_name(in_files, extensions, given=schema)
    for note in notes:
        _log.info("%s: %s.", url, note)
    types.update(masks)
    for hint in pictures_of_numbers(types, extensions):
        _log.warning("%s: %s", url, hint)
    return Schema(types)


def _extensions(samples: Samples, name: str) -> set[str]:
    numbers = samples.places[name]
    return {extension(samples.files[number].name) for number in numbers[numbers != MISSING]}


def virtual_shards(
    names: Sequence[bytes], sizes: NDArray[np.int64], *, shard_bytes: int = VIRTUAL_SHARD_BYTES
) -> Grouping:
    """Group samples into about total bytes / shard_bytes shards by a hash of their names.

    Depends on names and sizes alone, and is decided before any file is judged, so that an index and
    an unshuffled pack agree.
    """
    count = max(1, -(-int(sizes.sum()) // shard_bytes))
    if count == 1:
        return grouping(np.zeros(len(names), np.int64))
    hashes = (hashlib.blake2b(name, digest_size=8, key=_GROUP_SALT).digest() for name in names)
    numbers = np.frombuffer(b"".join(hashes), "<u8") % np.uint64(count)
    return grouping(numbers.astype(np.int64))
