"""Implement simple formats, whose files hold records that can be read one by one.

A whole format, for the records of CIFAR-10's binary version:

    class Cifar(RecordFormat):
        name = "cifar"
        suffix = ".bin"
        least_sample_bytes = 3073

        def schema(self, origin):
            return {"pixels": Array("uint8", (3, 32, 32)), "label": ClassLabel()}

        def records(self, file, entry, beside):
            data = np.frombuffer(file.read_at(0, entry.size_bytes), np.uint8).reshape(-1, 3073)
            starts = 3073 * np.arange(len(data)) + 1
            return Records(
                spans={"pixels": RecordSpans(starts, np.full(len(data), 3072), codec="|u1")},
                values={"label": data[:, 0]},
            )

    FORMAT = Cifar()

Listing, snapshots, the index and its sidecars, checks of every sample, the cache, remote data,
checksums and packing are common code. `format_registry` describes how to register a format.
"""

from __future__ import annotations

import os
import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import ConfigError, DatasetError, PenstockError
from penstock.readers.fieldtypes import (
    DenseColumn,
    EncodedColumn,
    Schema,
    TableFields,
    TextTable,
    fields_of,
    joined_columns,
)
from penstock.readers.files import is_passed_over, printable
from penstock.readers.formats.candidates import Candidates, Spans, left_out_sentences
from penstock.readers.formats.files_format import FilesFormat
from penstock.readers.formats.folder import list_folder
from penstock.readers.formats.open_shard import MISSING
from penstock.readers.formats.span_listing import SpanListing
from penstock.readers.formats.unindexed_files import DataFile, open_data_file, refusing
from penstock.readers.origin import Entry, Origin, QuarantineEntry

if TYPE_CHECKING:
    from penstock.readers.fieldtypes import Column, FieldType, FieldTypes
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.types import Ints, Numbers

    Values = Column | Numbers | Sequence[Any]

_MAX_BESIDE_BYTES = 2**28
_INVALID = (ValueError, LookupError, TypeError, ArithmeticError, EOFError, struct.error)


@dataclass(frozen=True, slots=True)
class RecordSpans:
    """The byte spans of one field of a file's n records.

    starts, sizes: bytes in the file, shape (n,); a start of -1 means that the record lacks the
    field. codec: numpy's `dtype.str` for arrays of bare numbers; None for data that describes
    itself (images, text, .npy files).
    """

    starts: Sequence[int] | Ints
    sizes: Sequence[int] | Ints
    codec: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The n records of one file.

    spans: fields whose bytes lie in the file. values: fields whose values are already known:
    numbers of shape (n, …), a list with a value for each record (a number, a str, bytes, lists of
    numbers, or None if the record lacks the field), or a column. names: of the records, for
    messages; None uses their numbers. rejected: the reasons why some records, by number, can't be
    samples.
    """

    spans: Mapping[str, RecordSpans] = field(default_factory=dict)
    values: Mapping[str, Values] = field(default_factory=dict)
    names: Sequence[bytes] | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        lengths = [len(each.starts) for each in self.spans.values()]
        return max([*lengths, *map(len, self.values.values())], default=0)


class RecordFormat(FilesFormat):
    """A format of files that hold records.

    suffix: end of the files' names. beside: suffixes of small files that may accompany a file of
    records, such as a text index: `photos.bin` and `photos.txt`. least_sample_bytes: of a record,
    at least 1. is_file_per_sample: False if each file at the dataset's root is a shard. True if the
    files are small, such as one for each sample: they may lie in subfolders, samples of about
    shard_bytes (None: 64 MiB) are one shard, and an invalid file is left out.
    """

    suffix: ClassVar[str]
    beside: ClassVar[tuple[str, ...]] = ()
    shard_bytes: ClassVar[int | None] = None

    @abstractmethod
    def schema(self, origin: Origin) -> FieldTypes:
        """Return the fields of a record, in order."""

    @abstractmethod
    def records(self, file: DataFile, entry: Entry, beside: Mapping[str, bytes]) -> Records:
        """Return the records of one file.

        beside: content of the accompanying files that exist, by suffix. Raises ValueError with the
        reason for a file that doesn't have this format.
        """

    def has_default_names(self, origin: Origin) -> bool:
        """Return True: records have no other places of fields."""
        return True

    def is_file(self, name: bytes) -> bool:
        """Return True if a name is that of a file of records."""
        own = name.rpartition(b"/")[2]
        return own.endswith(os.fsencode(self.suffix)) and not is_passed_over(own)

    def names_of_files(self) -> str:
        """Return the pattern of its files' names, for messages."""
        return f"*{self.suffix}"

    def beside_name(self, name: bytes, suffix: str) -> bytes:
        """Return the name of a file that may accompany a file of records."""
        return name.removesuffix(os.fsencode(self.suffix)) + os.fsencode(suffix)

    def files(self, origin: Origin) -> DatasetFiles:
        """List the files of records; `found` contains those that accompany them, by name."""
        files = super().files(origin)
        names = {self.beside_name(f.name, each) for f in files.entries for each in self.beside}
        if not names:
            others: list[Entry] = []
        elif origin.selection is not None:  # accompanying files needn't be selected
            others = [entry for name in sorted(names) if (entry := origin.entry(name)) is not None]
        elif self.in_folders or self.is_file_per_sample:
            others = [entry for entry in list_folder(origin).entries if entry.name in names]
        else:
            others = origin.entries(names.__contains__)
        return replace(files, found={entry.name: entry for entry in others})

    def list(self, origin: Origin) -> RecordListing:
        """List the files. Raises as `files` does, and ConfigError for unused arguments."""
        if origin.arrangement.manifest or origin.arrangement.places:
            raise ConfigError(f"{origin.url}: {self.name} files don't accept manifest=.")
        return RecordListing(self, origin)


class RecordListing(SpanListing):
    """The files of records of a dataset, by name, and the files that accompany each."""

    def __init__(self, format: RecordFormat, origin: Origin) -> None:
        self._format, found = format, format.files(origin)
        self._beside: Mapping[bytes, Entry] = found.found
        listed = [*found.entries, *self._beside.values()]
        if origin.selection is None:
            listed.sort(key=lambda entry: entry.name)
        super().__init__(origin, found, listed=listed)

    def samples(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        """Return the records of some files, file by file."""
        given, fields = self.given, self._format.schema(self.origin)
        schema = Schema({name: given.get(name, type) for name, type in fields.items()})
        good, bad = self._records(files, schema, workers=workers)
        records = [each for _, each in good]
        firsts = np.cumsum([0, *map(len, records)]).tolist()
        numbers = np.repeat(np.arange(len(records)), list(map(len, records)))
        names = [name for entry, each in good for name in self._names(entry, each)]
        table = _table([each.values for each in records], names, schema, source=self.origin.url)
        numbered = zip(firsts, records, strict=False)
        return Candidates(
            schema=schema,
            names=names,
            files=[entry for entry, _ in good],
            spans={n: _joined([r.spans[n] for r in records], numbers) for n in records[0].spans},
            shard_of=None if self._format.is_file_per_sample else numbers,
            shard_bytes=self._format.shard_bytes,
            rejected={first + row: why for first, r in numbered for row, why in r.rejected.items()},
            quarantined=bad,
            unread=left_out_sentences("files", bad),
        ).with_table(table, of="values of records")

    def _records(
        self, files: Sequence[Entry], schema: Schema, *, workers: int
    ) -> tuple[list[tuple[Entry, Records]], list[QuarantineEntry]]:
        """Return the records of valid files, and the invalid files that are left out."""
        is_grouped = self._format.is_file_per_sample
        where = f"isn't a valid {self._format.name} file: "

        def read(file: DataFile, entry: Entry) -> Records | QuarantineEntry:
            if not is_grouped:
                with refusing(entry, where):
                    return self._read(file, entry, schema)
            try:
                return self._read(file, entry, schema)
            except _INVALID as error:
                if isinstance(error, PenstockError):
                    raise
                return QuarantineEntry(name=entry.name, reason=f"{where}{error}")

        found = self.read_each(files, read, workers=workers, whole=not is_grouped)
        bad = [each for each in found if isinstance(each, QuarantineEntry)]
        both = zip(files, found, strict=True)
        good = [(entry, each) for entry, each in both if isinstance(each, Records)]
        if not good:
            raise DatasetError(f"{self.origin.url}: {' '.join(left_out_sentences('files', bad))}")
        first, like = good[0]
        for entry, each in good:
            if each.spans.keys() != like.spans.keys():
                raise DatasetError(
                    f"{printable(entry.name)}: its spans are {list(each.spans)}, but those of "
                    f"{printable(first.name)} are {list(like.spans)}."
                )
        return good, bad

    def _names(self, entry: Entry, records: Records) -> list[bytes]:
        if records.names is not None:
            return [b"%s[%s]" % (entry.name, name) for name in records.names]
        if len(records) == 1 and self._format.is_file_per_sample:
            return [entry.name]
        return [b"%s[%d]" % (entry.name, row) for row in range(len(records))]

    def _read(self, file: DataFile, entry: Entry, schema: Schema) -> Records:
        beside = {}
        for suffix in self._format.beside:
            other = self._beside.get(self._format.beside_name(entry.name, suffix))
            if other is not None:
                if other.size_bytes > _MAX_BESIDE_BYTES:
                    raise ValueError(
                        f"{printable(other.name)} has {other.size_bytes:,} bytes; expected at most "
                        f"{_MAX_BESIDE_BYTES:,}"
                    )
                with open_data_file(self.origin, other) as opened:
                    beside[suffix] = opened.read_at(0, other.size_bytes)
        records = self._format.records(file, entry, beside)
        _check(records, entry, schema)
        return records


def _check(records: Records, entry: Entry, schema: Schema) -> None:
    """Check that all spans lie in their file and that all fields have as many records. Raises
    ValueError."""
    count = len(records)
    if {*records.spans, *records.values} != set(schema):
        raise ValueError(f"fields {[*records.spans, *records.values]}, expected {list(schema)}")
    if records.names is not None and len(records.names) != count:
        raise ValueError(f"{len(records.names):,} names for {count:,} records")
    for name, values in records.values.items():
        if len(values) != count:
            raise ValueError(f"{len(values):,} values of {name!r} for {count:,} records")
        _dense(values, schema[name], name)
    for name, spans in records.spans.items():
        if spans.codec is not None and schema[name].form is None:
            raise ValueError(f"bare numbers for {name!r}, which is {schema[name]!r}")
        starts, sizes = np.asarray(spans.starts, np.int64), np.asarray(spans.sizes, np.int64)
        if starts.shape != (count,) or sizes.shape != (count,):
            raise ValueError(f"{len(starts):,} spans of {name!r} for {count:,} records")
        is_inside = (starts >= 0) & (starts <= entry.size_bytes) & (sizes >= 0)
        if not ((is_inside & (sizes <= entry.size_bytes - starts)) | (starts == MISSING)).all():
            raise ValueError(
                f"spans of {name!r} lie outside the file: it or its index is truncated"
            )


def _dense(values: Values, type: FieldType, name: str) -> Numbers | None:
    """Return numbers of the type's shape as they are stored; None for values of other kinds, which
    are checked one by one. Raises ValueError if a dtype can't be converted."""
    form = type.form
    dtype, shape = (type.number, ()) if form is None else (form.dtype, form.shape)
    if not isinstance(values, np.ndarray) or dtype is None or values.dtype.kind not in "biufc":
        return None
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise ValueError(f"{values.dtype} for {name!r}, which is {type!r}")
    return values.astype(dtype, copy=False) if values.shape[1:] == shape else None


def _joined(parts: Sequence[RecordSpans], numbers: Ints) -> Spans:
    """Join the spans of several files. numbers: of each record's file."""
    starts = np.concatenate([np.asarray(part.starts, np.int64) for part in parts])
    sizes = np.concatenate([np.asarray(part.sizes, np.int64) for part in parts])
    has_field = starts != MISSING
    return Spans(
        files=np.where(has_field, numbers, MISSING),
        starts=np.where(has_field, starts, 0),
        sizes=np.where(has_field, sizes, 0),
        codec=parts[0].codec,
    )


def _table(
    parts: Sequence[Mapping[str, Values]], names: Sequence[bytes], schema: Schema, *, source: str
) -> TableFields:
    """Convert the values of several files to columns. Lists are checked value by value."""
    found, lists = TableFields(), dict[str, list[Any]]()
    for name in parts[0]:
        values: list[Any] = [part[name] for part in parts]
        dense = [each for part in values if (each := _dense(part, schema[name], name)) is not None]
        if len(dense) == len(parts):
            found.values[name] = DenseColumn(np.concatenate(dense))
        elif not any(isinstance(each, Sequence | np.ndarray) for each in values):
            found.values[name] = joined_columns(values)
        elif schema[name].in_tables:
            lists[name] = [_plain(each) for part in values for each in part]
        else:
            data = [np.frombuffer(each or b"", np.uint8) for part in values for each in part]
            found.values[name] = EncodedColumn(data)
            found.present[name] = np.array([each is not None for part in values for each in part])
    made = fields_of(TextTable(source=source, columns=lists, places=names, unit="record"), schema)
    return replace(
        made,
        types={name: made.types.get(name, schema[name]) for name in parts[0]},
        values=found.values | made.values,
        present=found.present | made.present,
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON would hold it: numpy's numbers as Python's, and bytes as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
