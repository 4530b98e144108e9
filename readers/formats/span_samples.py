"""Hold the samples that a listing has found, and turn them into candidates.

The formats whose samples are spans of files differ in how they find these spans: a folder's files
by their names or by a table, an archive's members, a file's records. The rest is the same: fields
with types, spans and values, and the reasons why some of the data can't be samples.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, PenstockWarning
from penstock.readers.fieldtypes import Schema
from penstock.readers.files import printable
from penstock.readers.formats import candidates as shard_sizes
from penstock.readers.formats.candidates import (
    MISSING,
    Candidates,
    Grouping,
    Spans,
    column_bytes,
    virtual_shards,
)
from penstock.readers.origin import QuarantineEntry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType, TableFields
    from penstock.readers.origin import Entry, LeftOut

_log = logging.getLogger("penstock")

_SHOWN = 5


def left_out_sentences(what: str, entries: Sequence[QuarantineEntry]) -> list[str]:
    """Return one sentence about quarantined data, with an example; none if nothing is."""
    return [
        f"{len(entries):,} {what} are left out, such as {printable(first.name)}: {first.reason}. "
        "All are in the index's quarantine.jsonl."
        for first in entries[:1]
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanSamples:
    """The n samples of a dataset, known from names, sizes and tables.

    names: one for each sample. files: all files that spans lie in. spans: of each field that lies
    in files. types: of all fields, in order. values, present: of the fields that are known already;
    present only of those that some samples lack. shard_of: the number of each sample's file, which
    is its shard, ascending, int64, shape (n,); None groups the samples by a hash of their names,
    into shards of about shard_bytes, by default 64 MiB.
    rejected: the reason for each rejected sample, by number. quarantined: other data that can't be
    samples. passed_over: counts of files that belong to no sample, by extension. notes: one
    sentence for each decision. hints: one for each decision that may be wrong. left_out: one for
    each thing that isn't read though it seems to be meant. has_stray_files, unnamed: see
    `Candidates`.
    """

    names: Sequence[bytes]
    files: Sequence[Entry]
    spans: Mapping[str, Spans]
    types: Mapping[str, FieldType]
    values: Mapping[str, Column] = field(default_factory=dict)
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    shard_of: NDArray[np.int64] | None = None
    shard_bytes: int | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)
    quarantined: Sequence[QuarantineEntry] = ()
    passed_over: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    hints: Sequence[str] = ()
    left_out: Sequence[str] = ()
    has_stray_files: bool = False
    unnamed: Mapping[str, LeftOut] = field(default_factory=dict)

    @classmethod
    def of_files(cls, columns: Mapping[str, Sequence[Entry | None]], **more: Any) -> SpanSamples:
        """Return samples whose fields are whole files.

        columns: the file of each sample by field, None if the sample lacks it. The first field is
        the sample's own file, which names it. more: further attributes.
        """
        file_of = {each.name: each for column in columns.values() for each in column if each}
        number_of = {name: number for number, name in enumerate(file_of)}
        sizes = np.array([*(each.size_bytes for each in file_of.values()), 0], np.int64)
        spans = {}
        for field_name, column in columns.items():
            numbers = np.array([number_of[e.name] if e else MISSING for e in column], np.int64)
            starts = np.zeros(len(numbers), np.int64)
            spans[field_name] = Spans(files=numbers, starts=starts, sizes=sizes[numbers])
        names = [each.name for each in next(iter(columns.values())) if each is not None]
        return cls(names=names, files=list(file_of.values()), spans=spans, **more)

    def with_table(self, found: TableFields, *, of: str) -> SpanSamples:
        """Return these samples with a table's fields added; fields that exist already are kept.

        of: what the table's columns are, for messages, such as "keys of json".
        """
        new = [name for name in found.types if name not in self.types]
        taken = [name for name in found.types if name in self.types]
        reasons = {**found.left_out, **dict.fromkeys(taken, "another field has this name")}
        listed = "; ".join(f'"{n}": {why.rstrip(".")}' for n, why in [*reasons.items()][:_SHOWN])
        more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        remedy = "To read one, give its type in schema=."
        unread = [f"{of} are left out: {listed}{more}. {remedy}"] if reasons else []
        return replace(
            self,
            types={**self.types, **{name: found.types[name] for name in new}},
            values={**self.values, **{name: found.values[name] for name in new}},
            present={**self.present, **{n: found.present[n] for n in new if n in found.present}},
            rejected={**found.rejected, **self.rejected},
            notes=(*self.notes, *found.notes),
            left_out=(*self.left_out, *found.doubts, *unread),
        )

    def without_rejected(self) -> SpanSamples:
        """Return the samples without the rejected ones, which are quarantined by name."""
        if not self.rejected:
            return self
        bad = [
            QuarantineEntry(name=self.names[row], reason=reason)
            for row, reason in sorted(self.rejected.items())
        ]
        rows = np.setdiff1d(np.arange(len(self.names)), list(self.rejected))
        return replace(
            self,
            names=[self.names[row] for row in rows.tolist()],
            spans={name: spans.take(rows) for name, spans in self.spans.items()},
            values={name: column.take(rows) for name, column in self.values.items()},
            present={name: values[rows] for name, values in self.present.items()},
            shard_of=None if self.shard_of is None else self.shard_of[rows],
            rejected={},
            quarantined=[*self.quarantined, *bad],
            left_out=[*self.left_out, *left_out_sentences("samples", bad)],
        )

    def report(self, url: str) -> None:
        """Log the decisions, and warn of what is left out. url: of the dataset."""
        for note in self.notes:
            _log.info("%s: %s", url, note.removeprefix(f"{url}: "))
        for hint in self.hints:
            _log.warning("%s: %s", url, hint)
        if self.left_out:
            text = " ".join(self.left_out).replace(f"{url}: ", "")
            warnings.warn(f"{url}: {text}", PenstockWarning, stacklevel=9)

    def candidates(self, given: Mapping[str, FieldType], *, url: str) -> Candidates:
        """Return the candidates from which an index is built.

        given: types from the user's schema, which are already those of the values. Raises
        ConfigError for types of fields that don't exist or that can't lie in files.
        """
        for name, type in given.items():
            if name not in self.types:
                first = next(iter(self.quarantined), None)  # it may have held the missing field
                example = f" (left out: {printable(first.name)}: {first.reason})" if first else ""
                raise ConfigError(
                    f'schema: got "{name}", but {url} has {list(self.types)}{example}. Give types '
                    "of these fields, of a table's columns, or of the extensions of tar members."
                )
            if name in self.spans and not type.in_files:
                raise ConfigError(
                    f'schema["{name}"]: got {type!r}, but "{name}" lies in files of its own, which '
                    "can't hold such values. Put the values into a table (manifest=), or use "
                    "Text()."
                )
        types = {**self.types, **{n: t for n, t in given.items() if n in self.spans}}
        shard_bytes = None
        if self.shard_of is None:
            # Of fetched bytes, if there are any: values lie in the index.
            sizes = [each.sizes for each in self.spans.values()]
            sizes = sizes or [column_bytes(column) for column in self.values.values()]
            shard_bytes = self.shard_bytes or shard_sizes.PART_BYTES
            shards = virtual_shards(self.names, np.sum(sizes), shard_bytes=shard_bytes)
        else:
            bounds = np.searchsorted(self.shard_of, np.arange(len(self.files) + 1))
            shards = Grouping(order=np.arange(len(self.names)), bounds=bounds)
        return Candidates(
            schema=Schema(types),
            files=self.files,
            names=self.names,
            spans=self.spans,
            values=self.values,
            shards=shards,
            shard_bytes=shard_bytes,
            quarantined=sorted(self.quarantined, key=lambda each: each.name),
            passed_over=dict(self.passed_over),
            present={name: each for name, each in self.present.items() if not each.all()},
            has_stray_files=self.has_stray_files,
            unnamed=self.unnamed,
        )
