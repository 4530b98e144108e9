"""Implement simple formats, in which every file is a shard of records that can be read one by one.

A whole format, for the records of CIFAR-10's binary version:

    class Cifar(RecordFormat):
        name = "cifar"
        suffix = ".bin"
        least_sample_bytes = 3073

        def schema(self, origin):
            return Schema({"pixels": Array("uint8", (3, 32, 32)), "label": ClassLabel()})

        def records(self, file, entry, beside):
            data = np.frombuffer(file.read_at(0, entry.size_bytes), np.uint8).reshape(-1, 3073)
            starts = 3073 * np.arange(len(data)) + 1
            return Records(
                spans={"pixels": RecordSpans(starts, np.full(len(data), 3072), codec="|u1")},
                values={"label": data[:, 0].astype(np.int64)},
            )

    FORMAT = Cifar()

Listing, snapshots, the index and its sidecars, checks of every sample, the cache, remote data,
checksums and packing are common code. `format_registry` describes how to register a format.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, ordered
from penstock.readers.fieldtypes import (
    DenseColumn,
    ListColumn,
    array_form,
    joined_columns,
    number_dtype,
)
from penstock.readers.files import is_passed_over, printable
from penstock.readers.formats.candidates import Candidates, Grouping, Spans
from penstock.readers.formats.format import Indexing, Snapshot, SpanFormat
from penstock.readers.formats.unindexed_files import drop_cached_copy, open_data_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, Schema
    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry, Origin

_MAX_BESIDE_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class RecordSpans:
    """The byte spans of one field of a file's n records.

    starts, sizes: bytes in the file, shape (n,). codec: numpy's `dtype.str` for arrays of bare
    numbers; None for data that describes itself (images, text, .npy files).
    """

    starts: Sequence[int] | NDArray[np.int64]
    sizes: Sequence[int] | NDArray[np.int64]
    codec: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The n records of one file.

    spans: fields whose bytes lie in the file. values: fields whose values are already known:
    numbers of shape (n, …), a list of str or bytes, or a column. names: of the records, for
    messages; None uses their numbers.
    """

    spans: Mapping[str, RecordSpans]
    values: Mapping[str, Column | NDArray[Any] | Sequence[str] | Sequence[bytes]] = field(
        default_factory=dict
    )
    names: Sequence[bytes] | None = None

    def __len__(self) -> int:
        return max(
            (len(each.starts) for each in self.spans.values()),
            default=max(map(len, self.values.values()), default=0),
        )

    def columns(self, schema: Schema) -> dict[str, Column]:
        """Return the values as columns. Raises ValueError for values that don't fit their field."""
        return {name: _column(name, values, schema) for name, values in self.values.items()}


class RecordFormat(SpanFormat, ABC):
    """A format of files that lie in one folder, each of which is a shard.

    name: for `format=`. suffix: end of the files' names. beside: suffixes of small files that may
    accompany a file of records, such as a text index: `photos.bin` and `photos.txt`.
    least_sample_bytes: of a record, at least 1.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]
    beside: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def schema(self, origin: Origin) -> Schema:
        """Return the fields of a record, in order."""

    @abstractmethod
    def records(self, file: DataFile, entry: Entry, beside: Mapping[str, bytes]) -> Records:
        """Return the records of one file.

        beside: content of the accompanying files that exist, by suffix. Raises ValueError with the
        reason for a file that doesn't have this format.
        """

    @property
    def indexing(self) -> RecordIndexing:
        """Return the indexing of a folder of such files."""
        return RecordIndexing(self)

    def recognises(self, origin: Origin) -> bool:
        """Return True if such files lie at the root, or if the user selected only such files."""
        if origin.selection is not None:
            names = (name.rpartition(b"/")[2] for name in origin.names().files)
            return all(map(self.is_file, names))
        return bool(origin.top(self.is_file).entries)

    def is_file(self, name: bytes) -> bool:
        """Return True if a name is that of a file of records."""
        return not is_passed_over(name) and name.endswith(os.fsencode(self.suffix))


@dataclass(frozen=True, slots=True)
class RecordIndexing(Indexing):
    """The indexing of files of records. Each opening compares their names, sizes and times; if any
    differs, all files are indexed again."""

    format: RecordFormat

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> RecordListing:
        """List the files. Raises DatasetNotFoundError, ConfigError, DatasetError or FetchError."""
        return RecordListing(self.format, origin)


class RecordListing:
    """The files of records at a dataset's root, by name, and the files that accompany each."""

    def __init__(self, format: RecordFormat, origin: Origin) -> None:
        if origin.arrangement.key:
            raise ConfigError(
                f"{origin.url}: {format.name} files accept neither manifest= nor schema=."
            )
        self._format, self._origin = format, origin
        suffixes = tuple(map(os.fsencode, (format.suffix, *format.beside)))
        top = origin.top(lambda name: not is_passed_over(name) and name.endswith(suffixes))
        is_file = format.is_file
        self._files = [e for e in top.entries if is_file(e.name.rpartition(b"/")[2])]
        self._beside = {entry.name: entry for entry in top.entries}
        if origin.selection is not None:  # accompanying files needn't be selected
            stems = [e.name.removesuffix(os.fsencode(format.suffix)) for e in self._files]
            names = (stem + os.fsencode(suffix) for stem in stems for suffix in format.beside)
            found = ((name, origin.entry(name)) for name in names)
            self._beside |= {name: entry for name, entry in found if entry is not None}
        if top.missing or not self._files:
            shown = printable(top.missing[0]) if top.missing else f"*{format.suffix}"
            raise DatasetNotFoundError(
                f"{origin.url}: contains no file {shown}; expected a folder of {format.name} files."
            )

    def snapshot(self) -> Snapshot:
        """Return the snapshot of the files."""
        return Snapshot.of(self._beside.values(), {})

    def candidates(self, *, workers: int) -> Candidates:
        """Return the records of all files as candidates."""
        return self._candidates(self._files, workers=workers)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """Yield the records of the shard's file, then the same without the cache's copy of it."""
        del number, total
        for entry in self._files:
            if name.endswith(b"-%s.arrow" % entry.identity.encode()):
                yield self._candidates([entry], workers=workers), 0
                drop_cached_copy(self._origin, entry)
                yield self._candidates([entry], workers=workers), 0

    def _candidates(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        schema = self._format.schema(self._origin)

        def read(entry: Entry) -> Records:
            return self._read(entry, schema)

        found = list(ordered(read, files, workers=workers, ahead=workers + 2, name="list"))
        counts = [len(records) for records in found]
        names = [
            b"%s[%s]" % (entry.name, b"%d" % row if own is None else own[row])
            for entry, records, count in zip(files, found, counts, strict=True)
            for own in (records.names,)
            for row in range(count)
        ]
        columns = [records.columns(schema) for records in found]
        return Candidates(
            schema=schema,
            files=files,
            names=names,
            spans={
                name: _joined([each.spans[name] for each in found], counts)
                for name in found[0].spans
            },
            values={name: joined_columns([each[name] for each in columns]) for name in columns[0]},
            shards=Grouping(
                order=np.arange(len(names), dtype=np.int64),
                bounds=np.cumsum([0, *counts], dtype=np.int64),
            ),
            shard_bytes=None,
            quarantined=[],
            passed_over={},
        )

    def _read(self, entry: Entry, schema: Schema) -> Records:
        beside = {}
        for suffix in self._format.beside:
            name = entry.name.removesuffix(os.fsencode(self._format.suffix)) + os.fsencode(suffix)
            if name in self._beside:
                beside[suffix] = self._content(self._beside[name])
        with open_data_file(self._origin, entry, whole=True) as opened:
            try:
                records = self._format.records(opened, entry, beside)
                _check(records, entry, schema)
            except (ValueError, IndexError, KeyError, TypeError) as error:
                if isinstance(error, DatasetError):
                    raise
                raise DatasetError(
                    f"{printable(entry.name)}: isn't a valid {self._format.name} file ({error}). "
                    "Write or fetch it again, or remove it from the folder."
                ) from error
            return records

    def _content(self, entry: Entry) -> bytes:
        if entry.size_bytes > _MAX_BESIDE_BYTES:
            raise DatasetError(
                f"{printable(entry.name)}: has {entry.size_bytes:,} bytes; expected at most "
                f"{_MAX_BESIDE_BYTES:,}."
            )
        with open_data_file(self._origin, entry) as opened:
            return opened.read_at(0, entry.size_bytes)


def _check(records: Records, entry: Entry, schema: Schema) -> None:
    """Check that all spans lie in their file and that all fields have as many records. Raises
    ValueError."""
    count = len(records)
    if {*records.spans, *records.values} != set(schema):
        raise ValueError(f"fields {[*records.spans, *records.values]}, expected {list(schema)}")
    for name, values in records.columns(schema).items():
        if len(values) != count:
            raise ValueError(f"{len(values):,} values of {name!r} for {count:,} records")
    for name, spans in records.spans.items():
        starts, sizes = np.asarray(spans.starts, np.int64), np.asarray(spans.sizes, np.int64)
        if starts.shape != (count,) or sizes.shape != (count,):
            raise ValueError(f"{len(starts):,} spans of {name!r} for {count:,} records")
        if count and not (
            starts.min() >= 0
            and sizes.min() >= 0
            and starts.max() <= entry.size_bytes
            and (sizes <= entry.size_bytes - starts).all()
        ):
            raise ValueError(
                f"spans of {name!r} lie outside of the file; the file or its index is truncated"
            )


def _joined(parts: Sequence[RecordSpans], counts: Sequence[int]) -> Spans:
    return Spans(
        files=np.repeat(np.arange(len(parts)), counts),
        starts=np.concatenate([np.asarray(part.starts, np.int64) for part in parts]),
        sizes=np.concatenate([np.asarray(part.sizes, np.int64) for part in parts]),
        codec=parts[0].codec,
    )


def _column(name: str, values: Any, schema: Schema) -> Column:
    if isinstance(values, np.ndarray):
        form, dtype = array_form(schema[name]), number_dtype(schema[name])
        expected = dtype if form is None else form.dtype
        if expected is None or not np.can_cast(values.dtype, expected, "same_kind"):
            raise ValueError(f"{values.dtype} for {name!r}, which is {schema[name]!r}")
        return DenseColumn(values.astype(expected))
    if isinstance(values, list | tuple):
        return ListColumn(list(values))
    found: Column = values
    return found
