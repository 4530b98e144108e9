"""Describe the candidates for samples of a dataset before any is decoded, and group them into
shards.

`Candidates` is the result of listing a dataset in any format: the spans and values of each field,
or, for formats in chunks, the shards as their metadata describe them. Formats of spans list samples
and reject some; `without_rejected` and `grouped` then turn them into shards of good candidates.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, PenstockWarning, log
from penstock.readers.fieldtypes import DenseColumn, EncodedColumn, RaggedColumn, Schema
from penstock.readers.files import printable
from penstock.readers.formats.open_shard import MISSING, SampleLayout, Storage
from penstock.readers.origin import QuarantineEntry
from penstock.readers.types import MAX_PIXELS, Bools, Ints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike

    from penstock.readers.fieldtypes import Column, FieldTypes, TableFields
    from penstock.readers.formats.extents import ChunkedShard
    from penstock.readers.origin import Entry, LeftOut


_SHOWN = 5

PART_BYTES = 64 * 2**20
"""The target size of a shard, the same as of a pack. Items that can't be cut may be larger."""


def part_bounds(sizes: ArrayLike, *, target_bytes: int | None = None) -> Ints:
    """Return the bounds of contiguous parts of about one size: int64, shape (parts + 1,).

    sizes: bytes of each item, at least 0, shape (items,). Items aren't cut. target_bytes: size of a
    part; None means `PART_BYTES`. Part i is items [bounds[i], bounds[i + 1]). No part is empty, and
    there is at least one part if there are items. The parts are as equal as the items allow, so
    none is a small remainder: a part differs from the mean by at most one item.
    """
    ends = np.cumsum(np.asarray(sizes, np.int64))
    if not len(ends):
        return np.zeros(1, np.int64)
    total, target = int(ends[-1]), target_bytes or PART_BYTES
    count = max(1, min(len(ends), round(total / target)))
    # An item goes to the part that holds its middle. As floats: count * total may exceed 2^63.
    middles = (ends - np.asarray(sizes, np.int64) / 2) * (count / max(1, total))
    number = np.minimum(middles.astype(np.int64), count - 1)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    return np.append(first, len(ends)).astype(np.int64)


def cut_at(order: Ints, bounds: Sequence[int]) -> list[Ints]:
    """Cut positions into contiguous groups. bounds: where each starts, and where the last ends."""
    return [order[start:end] for start, end in pairwise(bounds)]


def group_positions(groups: Ints) -> list[Ints]:
    """Group positions by number, keeping their order inside a group. Numbers that don't occur are
    left out."""
    order = np.argsort(groups, kind="stable").astype(np.int64)
    counts = np.bincount(groups) if len(groups) else np.empty(0, np.int64)
    return cut_at(order, [0, *np.cumsum(counts[counts > 0]).tolist()])


# Part of the index format: with another salt, every folder would have another order.
_GROUP_SALT = b"penstock-group-1"


def virtual_shards(names: Sequence[bytes], sizes: ArrayLike, *, shard_bytes: int) -> list[Ints]:
    """Group samples into about total bytes / shard_bytes shards, by a hash of their names.

    The grouping depends on names and sizes alone. It is computed before any file is checked, so
    that an index and an unshuffled pack agree.
    """
    count = max(1, -(-int(np.sum(sizes)) // shard_bytes))
    if count == 1:
        return group_positions(np.zeros(len(names), np.int64))
    hashes = (hashlib.blake2b(name, digest_size=8, key=_GROUP_SALT).digest() for name in names)
    numbers = np.frombuffer(b"".join(hashes), "<u8") % np.uint64(count)
    return group_positions(numbers.astype(np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """The byte spans of one field of n candidates; all arrays are int64 of shape (n,).

    files: numbers in `Candidates.files`, MISSING if the sample lacks the field. starts, sizes:
    bytes in that file. codec: for an array of bare numbers, without an .npy header, numpy's
    `dtype.str`. Its shape is the schema's, in which one length may be None.
    """

    files: Ints
    starts: Ints
    sizes: Ints
    codec: str | None = None

    def take(self, at: Ints) -> Spans:
        """Return the spans of the candidates at these positions, in this order."""
        return replace(self, files=self.files[at], starts=self.starts[at], sizes=self.sizes[at])


def left_out_sentences(what: str, entries: Sequence[QuarantineEntry]) -> list[str]:
    """Return one sentence about quarantined data, with an example; none if nothing is."""
    return [
        f"{len(entries):,} {what} are left out, such as {printable(first.name)}: {first.reason}. "
        "All are in the index's quarantine.jsonl."
        for first in entries[:1]
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The candidates for samples, as known from names, sizes and metadata.

    schema: the fields in order; dtype and shape of an Array may still be unknown. files: the files
    that spans lie in, by number. names: of the samples, below the dataset's root, for messages and
    quarantines. spans: of each field whose bytes lie in files. values: of every other field,
    already known (labels, values of a table or a JSON file). present: which samples have a value,
    for fields that some samples lack, bool, shape (n,). shards: the positions of the candidates of
    each shard, including empty shards. shard_bytes: the mean size to which shards were cut; None if
    the data determine the shards. quarantined: entries that can't be candidates. passed_over: files
    that belong to no sample, counted by extension. chunked: shards of chunks, described by their
    metadata; there are no candidates then, because no sample is examined. left_out: the reason why
    data isn't a field, by the name that the field would have. unnamed: samples that are left out
    without a quarantine entry, by reason. max_pixels: of an image or a mask.

    A listing also has these, until `grouped` uses them. shard_of: the number of each sample's file,
    which is its shard, ascending, int64, shape (n,); None groups the samples by a hash of their
    names, into shards of about shard_bytes, by default 64 MiB. rejected: the reason for each
    rejected sample, by number. notes: one sentence for each decision. unread: one for each decision
    that may be wrong, and for each thing that isn't read though it seems to be meant.
    """

    schema: Schema
    files: Sequence[Entry] | Mapping[int, Entry] = ()
    names: Sequence[bytes] = ()
    spans: Mapping[str, Spans] = field(default_factory=dict)
    values: Mapping[str, Column] = field(default_factory=dict)
    shards: Sequence[Ints] = ()
    shard_bytes: int | None = None
    quarantined: Sequence[QuarantineEntry] = ()
    passed_over: Mapping[str, int] = field(default_factory=dict)
    present: Mapping[str, Bools] = field(default_factory=dict)
    chunked: Sequence[ChunkedShard] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    unnamed: Mapping[str, LeftOut] = field(default_factory=dict)
    max_pixels: int = MAX_PIXELS
    shard_of: Ints | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    unread: Sequence[str] = ()

    @classmethod
    def of_files(
        cls, columns: Mapping[str, Sequence[Entry | None]], types: FieldTypes, **more: Any
    ) -> Candidates:
        """Return candidates whose fields are whole files.

        columns: the file of each sample by field, None if the sample lacks it. The first field is
        the sample's own file, which names it. types: of all fields. more: further attributes.
        """
        file_of = {each.name: each for column in columns.values() for each in column if each}
        number_of = {name: number for number, name in enumerate(file_of)}
        sizes = np.array([*(each.size_bytes for each in file_of.values()), 0], np.int64)
        spans = {}
        for name, column in columns.items():
            numbers = np.array([number_of[e.name] if e else MISSING for e in column], np.int64)
            starts = np.zeros(len(numbers), np.int64)
            spans[name] = Spans(files=numbers, starts=starts, sizes=sizes[numbers])
        names = [each.name for each in next(iter(columns.values())) if each is not None]
        files = list(file_of.values())
        return cls(schema=Schema(types), names=names, files=files, spans=spans, **more)

    def __len__(self) -> int:
        return len(self.names)

    def with_table(self, found: TableFields, *, of: str) -> Candidates:
        """Return these candidates with a table's fields added; fields that exist already are kept.

        of: what the table's columns are, for messages, such as "keys of json".
        """
        old = {*self.spans, *self.values}
        new = [name for name in found.types if name not in old]
        taken = [name for name in found.types if name in old]
        reasons = {**found.left_out, **dict.fromkeys(taken, "another field has this name")}
        listed = "; ".join(f'"{n}": {why.rstrip(".")}' for n, why in [*reasons.items()][:_SHOWN])
        more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        remedy = "To read one, give its type in schema=."
        unread = [f"{of} are left out: {listed}{more}. {remedy}"] if reasons else []
        return replace(
            self,
            schema=Schema({**self.schema, **{name: found.types[name] for name in new}}),
            values={**self.values, **{name: found.values[name] for name in new}},
            present={**self.present, **{n: found.present[n] for n in new if n in found.present}},
            rejected={**found.rejected, **self.rejected},
            notes=(*self.notes, *found.notes),
            unread=(*self.unread, *found.doubts, *unread),
        )

    def take(self, positions: Ints) -> Candidates:
        """Select some candidates for a worker: they form one shard, in this order."""
        used = (spans.files[positions].tolist() for spans in self.spans.values())
        numbers = {number for files in used for number in files} - {MISSING}
        return replace(
            self,
            files={number: self.files[number] for number in numbers},
            names=tuple(self.names[position] for position in positions.tolist()),
            spans={name: each.take(positions) for name, each in self.spans.items()},
            values={name: column.take(positions) for name, column in self.values.items()},
            present={name: each[positions] for name, each in self.present.items()},
            shard_of=None if self.shard_of is None else self.shard_of[positions],
            shards=[np.arange(len(positions))],
            quarantined=(),
            passed_over={},
            chunked=(),
            left_out={},
        )

    def without_rejected(self) -> Candidates:
        """Return the candidates without the rejected ones, which are quarantined by name."""
        if not self.rejected:
            return self
        found = sorted(self.rejected.items())
        bad = [QuarantineEntry(name=self.names[row], reason=reason) for row, reason in found]
        kept = self.take(np.setdiff1d(np.arange(len(self)), list(self.rejected)))
        every = [*self.quarantined, *bad]
        return replace(
            kept, files=self.files, passed_over=self.passed_over, rejected={}, quarantined=every
        )

    def report(self, url: str) -> None:
        """Log the decisions, and warn of what is left out. url: of the dataset."""
        for note in self.notes:
            log.info("%s: %s", url, note.removeprefix(f"{url}: "))
        if self.unread:
            text = " ".join(self.unread).replace(f"{url}: ", "")
            warnings.warn(f"{url}: {text}", PenstockWarning, stacklevel=9)

    def grouped(self, given: FieldTypes, *, url: str) -> Candidates:
        """Return the candidates of a listing in shards.

        given: types from the user's schema, which are already those of the values. Raises
        ConfigError for types of fields that don't exist or that can't lie in files.
        """
        for name, type in given.items():
            if name not in self.schema:
                first = next(iter(self.quarantined), None)  # it may have held the missing field
                example = f" (left out: {printable(first.name)}: {first.reason})" if first else ""
                raise ConfigError(
                    f'schema: got "{name}", but {url} has {list(self.schema)}{example}. Give types '
                    "of these fields, of a table's columns, or of the extensions of tar members."
                )
            if name in self.spans and not type.in_files:
                raise ConfigError(
                    f'schema["{name}"]: got {type!r}, but "{name}" lies in files of its own, which '
                    "can't hold such values. Put the values into a table (manifest=), or use "
                    "Text(), or for .npy files an Array."
                )
        shard_bytes = None
        if self.shard_of is None:
            # Of fetched bytes, if there are any: values lie in the index.
            sizes = [each.sizes for each in self.spans.values()]
            sizes = sizes or [column_bytes(column) for column in self.values.values()]
            shard_bytes = self.shard_bytes or PART_BYTES
            shards = virtual_shards(self.names, np.sum(sizes), shard_bytes=shard_bytes)
        else:
            bounds = np.searchsorted(self.shard_of, np.arange(len(self.files) + 1))
            shards = cut_at(np.arange(len(self)), bounds.tolist())
        types = {n: given.get(n, t) if n in self.spans else t for n, t in self.schema.items()}
        return replace(
            self,
            schema=Schema(types),
            shards=shards,
            shard_bytes=shard_bytes,
            quarantined=sorted(self.quarantined, key=lambda each: each.name),
            present={name: each for name, each in self.present.items() if not each.all()},
            shard_of=None,
            notes=(),
            unread=(),
        )

    @property
    def layout(self) -> SampleLayout:
        """Return how the samples are stored, as far as that is known before they are read.

        Raises ConfigError for a field that wasn't found, or whose values have no known type.
        """
        storage = {name: self._storage(name) for name in self.schema}
        return SampleLayout(schema=self.schema, storage=storage)

    def _storage(self, name: str) -> Storage:
        if self.chunked:
            return "chunks"
        if name in self.spans:
            return "span"
        type = self.schema[name]
        if name not in self.values:
            raise ConfigError(f'schema["{name}"]: got {type!r}, but no such field was found.')
        if type.number is not None:
            return "value"
        if not type.is_encoded and type.form is None:
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, wanted a dtype and a shape for values of a table.'
            )
        return "rows"

    @property
    def sizes(self) -> Ints:
        """Return the bytes of each candidate, over all its fields, int64, shape (n,)."""
        total = np.zeros(len(self), np.int64)
        for spans in self.spans.values():
            total += spans.sizes
        for column in self.values.values():
            total += column_bytes(column)
        return total


def column_bytes(column: Column) -> Ints:
    """Return the bytes of each sample of a column, int64, shape (n,)."""
    if isinstance(column, EncodedColumn):
        return np.array([len(sample) for sample in column.samples], np.int64)
    if isinstance(column, DenseColumn):
        return np.full(len(column), column.values[:1].nbytes, np.int64)
    assert isinstance(column, RaggedColumn)
    row_length = int(np.prod(column.values.shape[1:], dtype=np.int64))
    return np.diff(column.offsets) * column.values.dtype.itemsize * row_length
