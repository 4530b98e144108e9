"""The sidecar of a shard: what an index notes of its samples, and all that it takes to read them.

It is an Arrow file of one row of lists, because a shard has as many files as it likes, and its
fields as many bytes, lengths and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields.arrays import as_bits
from penstock.readers.fields.columns import DenseColumn
from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import LazyColumn, write_batch
from penstock.readers.files.pages import BROKEN
from penstock.readers.formats.candidates import MISSING
from penstock.readers.formats.limits import MAX_SHARD_BYTES, MAX_SHARD_SAMPLES, VERSION
from penstock.readers.formats.noted import as_noted, notes_of
from penstock.readers.formats.shard_files import ShardFiles
from penstock.readers.formats.sidecar_file import check_names, sidecar_batch, sidecar_etag, torn
from penstock.readers.formats.sidecar_lists import (
    EXTENTS,
    FILES,
    NAMES,
    NOTES,
    ROWS,
    UNITS,
    Lists,
    ListsDraft,
    columns_of,
    is_of_chunks,
    noted_column,
    own_copy,
)
from penstock.readers.formats.span_notes import SpanNotes
from penstock.readers.formats.span_shard import FilesShard, MappedShard, SpanBlob
from penstock.readers.formats.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob, Segment
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.fields.columns import Column
    from penstock.readers.fields.facts import Facts
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.chunked_shard import ChunkedShard, Extents
    from penstock.readers.formats.layout import Layout
    from penstock.readers.formats.shard import OpenShard
    from penstock.readers.formats.summary import FieldNotes, ShardSummary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sidecar:
    """What an index notes of one shard's n samples, at least one.

    layout: of the dataset. is_file_per_sample: as its format says. rows: n. names: of the samples,
    for people; none where the format tells them. files: those that spans lie in, in order. spans,
    values: of each field that is stored so or noted. present: of noted fields that some samples
    lack, bool, shape (n,). extents, units, notes: of a shard of chunks, see `ChunkedShard`.
    """

    layout: Layout
    is_file_per_sample: bool
    rows: int
    names: Sequence[bytes]
    files: ShardFiles
    spans: Mapping[str, SpanNotes]
    values: Mapping[str, Column]
    present: Mapping[str, NDArray[np.bool_]]
    notes: bytes = b""
    extents: Extents | None = None
    units: Sequence[int] = ()

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return self.rows

    @property
    def size_bytes(self) -> int:
        """The bytes of the shard's files, or of a shard of chunks those that are its samples'."""
        return self.files.size_bytes if self.extents is None else self.extents.size_bytes

    @property
    def suffix(self) -> bytes:
        """What the stem of the sidecar's name ends in: the identity of a file that is the shard, so
        that processes agree on its blob by the manifest alone, and before there is one."""
        if self.is_file_per_sample or len(self.files) != 1:
            return b""
        (file,) = self.files.entries()
        return b"-" + file.identity.encode()

    def segments(self, fields: Sequence[str] = (), *, may_lack: bool = False) -> Sequence[Segment]:
        """The objects that the shard is made of, in a remote dataset. fields: of a shard of chunks,
        whose bytes alone are wanted; may_lack: an object of it that isn't there is no error."""
        if self.extents is None:
            return self.files.segments()
        from penstock.readers.formats.blob_extents import BlobExtents  # spans need none of it

        return BlobExtents(self, fields).segments(may_lack=may_lack)

    def field_notes(self, progressive: Mapping[str, int]) -> dict[str, FieldNotes]:
        """What is noted of each field."""
        notes: dict[str, FieldNotes] = {}
        for name in self.layout.schema:
            if name in self.spans:
                notes[name] = self.spans[name].notes(progressive=progressive.get(name))
            else:
                storage, present = self.layout.storage[name], self.present.get(name)
                notes[name] = notes_of(self.values[name], storage, present)
        return notes

    def summary(self, *, progressive: Mapping[str, int] | None = None) -> ShardSummary:
        """The shard's contribution to the manifest. progressive: JPEGs of that kind, of each field
        where they were counted."""
        return summarise(
            self.layout.schema,
            self.field_notes(progressive or {}),
            samples=self.samples,
            size_bytes=self.size_bytes,
            files=len(self.files),
        )

    def open_local(self, root: bytes) -> OpenShard:
        """Open the shard below a local folder: a file that is a shard is mapped, others are read.
        Raises IndexChangedError, DatasetError."""
        files, table, rows = self.files, self._table(), self._rows()
        if not self.is_file_per_sample and len(files) == 1:
            return MappedShard(root, files, table, names=self.names, columns=rows)
        return FilesShard(
            root, files, table, names=self.names, columns=rows, are_samples=self._are_files()
        )

    def open_blob(self, remote: Remote, blob: Blob) -> OpenShard:
        """Open the shard in a blob of the cache, in which its files lie end to end."""
        return SpanBlob(remote, blob, self._table(), names=self.names, columns=self._rows())

    def _are_files(self) -> bool:
        """Whether each sample is a file, whole, and nothing else that is read."""
        if len(self.spans) != 1 or len(self.files) != self.samples:
            return False
        (notes,) = self.spans.values()
        return bool(
            np.array_equal(notes.files, np.arange(self.samples))
            and np.array_equal(notes.sizes, self.files.sizes)
        )

    def _rows(self) -> dict[str, Column]:
        return {name: self.values[name] for name in self.layout.stored("rows")}

    def _table(self) -> NDArray[np.int64]:
        columns = self.layout.table
        table = np.zeros((self.samples, columns.count), np.int64)
        begins = self.files.starts
        for name, place in columns.spans.items():
            self.spans[name].fill(table, place, begins)
        for name, at in columns.values.items():
            column = self.values[name]
            assert isinstance(column, DenseColumn)
            table[:, at] = as_bits(column.values)
        for name, at in columns.present.items():
            table[:, at] = self.present.get(name, 1)
        return table

    def write(self, path: bytes) -> str:
        """Write the sidecar whole; returns its etag (a checksum of the file). Raises WriteError."""
        draft, files = ListsDraft(self.layout), self.files
        draft.add({NAMES: list(self.names), ROWS: [self.rows], NOTES: [self.notes]})
        if self.extents is not None:
            told = self.extents
            columns = (told.files, told.starts, told.sizes, told.fields)
            draft.add(dict(zip(EXTENTS, columns, strict=True)))
            draft.add({UNITS: np.array(self.units, np.int64)})
        facts = (list(files.names), files.sizes, files.mtimes_ns, list(files.versions))
        draft.add(dict(zip(FILES, facts, strict=True)))
        for name in self.layout.schema:
            if self.layout.storage[name] == "chunks":
                continue
            if name in self.spans:
                draft.add({f"{name}/{k}": v for k, v in self.spans[name].lists().items()})
            else:
                everyone = np.ones(self.samples, np.bool_)
                draft.add_noted(name, self.values[name], self.present.get(name, everyone))
        batch = draft.batch({"penstock.sidecar": str(VERSION)})
        write_whole(path, lambda temp: write_batch(temp, batch))
        return sidecar_etag(path)


def make_sidecar(
    candidates: Candidates,
    positions: NDArray[np.int64],
    facts: Sequence[Mapping[str, Facts]],
    *,
    layout: Layout,
    is_file_per_sample: bool,
) -> Sidecar:
    """The sidecar of a shard's good samples, at least one. positions: of those candidates, int64,
    shape (n,); facts: of each, by field."""
    spans = {name: candidates.spans[name] for name in layout.stored("span")}
    numbers = [each.files[positions] for each in spans.values()]
    used, local = _renumbered(numbers)
    return Sidecar(
        layout=layout,
        is_file_per_sample=is_file_per_sample,
        rows=len(positions),
        names=[candidates.names[i] for i in positions.tolist()],
        files=ShardFiles.of([candidates.files[number] for number in used]),
        spans={
            name: SpanNotes.of(files, each.starts[positions], [one.get(name) for one in facts])
            for (name, each), files in zip(spans.items(), local, strict=True)
        },
        values={
            name: as_noted(column.take(positions)) for name, column in candidates.values.items()
        },
        present={name: there[positions] for name, there in candidates.present.items()},
    )


def make_chunked_sidecar(shard: ChunkedShard, *, layout: Layout) -> Sidecar:
    """The sidecar of a shard of chunks, by its metadata alone."""
    return Sidecar(
        layout=layout,
        is_file_per_sample=False,
        rows=shard.samples,
        names=(),
        files=ShardFiles.of(shard.files),
        spans={},
        values={},
        present={},
        notes=shard.notes,
        extents=shard.extents,
        units=shard.units,
    )


def _renumbered(
    numbers: Sequence[NDArray[np.int64]],
) -> tuple[list[int], list[NDArray[np.int64]]]:
    """The files that some samples lie in, sample by sample, so that what is read together lies
    together; and the samples' files by number among those. numbers: of each field, shape (n,)."""
    if not numbers:
        return [], []
    found, first = np.unique(np.stack(numbers, axis=1), return_index=True)
    found, first = found[found != MISSING], first[found != MISSING]
    order = np.argsort(first)
    places = np.append(np.empty(len(order), np.int64), MISSING)
    places[order] = np.arange(len(order))
    local = [
        places[np.where(each == MISSING, len(order), np.searchsorted(found, each))]
        for each in numbers
    ]
    return found[order].tolist(), local


def read_sidecar(
    path: bytes, *, etag: str, layout: Layout, is_file_per_sample: bool, url: str | None = None
) -> Sidecar:
    """Read a sidecar that was written. etag: what the manifest promises; url: the object that this
    file is a copy of, if it is one. Raises IndexChangedError (it is gone), CorruptShardError (torn,
    changed, or it says what can't be), ReadError."""
    batch = sidecar_batch(path, columns_of(layout), etag=etag, url=url)
    try:
        return _content(Lists(batch), layout, is_file_per_sample=is_file_per_sample)
    except BROKEN as error:
        raise torn(path, error, url) from error


def _content(lists: Lists, layout: Layout, *, is_file_per_sample: bool) -> Sidecar:
    (rows,) = lists.numbers(ROWS, length=1).tolist()
    (notes,) = lists.arrow(NOTES, length=1).to_pylist()
    if not 1 <= rows <= MAX_SHARD_SAMPLES:
        raise ValueError(f"it has {rows:,} samples")
    is_chunked = is_of_chunks(layout)
    names = LazyColumn(own_copy(lists.arrow(NAMES, length=0 if is_chunked else rows)))
    files = _files(lists)
    extents, units = None, list[int]()
    if is_chunked:
        extents = _extents(lists, files, fields=len(layout.schema))
        units = lists.numbers(UNITS).tolist()
    spans, values, present = {}, {}, {}
    for name, type in layout.schema.items():
        if layout.storage[name] == "chunks":
            continue
        if layout.storage[name] == "span":
            spans[name] = SpanNotes.read(lists, name, samples=rows)
            spans[name].check(files.sizes, type)
            continue
        values[name] = noted_column(lists, layout, name, samples=rows)
        there = lists.numbers(f"{name}/present", length=rows)
        if not there.all():
            present[name] = there
    return Sidecar(
        layout=layout,
        is_file_per_sample=is_file_per_sample,
        rows=rows,
        names=names,
        files=files,
        spans=spans,
        values=values,
        present=present,
        notes=notes,
        extents=extents,
        units=units,
    )


def _extents(lists: Lists, files: ShardFiles, *, fields: int) -> Extents:
    """The extents of a shard of chunks, which lie in its files. Raises ValueError."""
    count = len(lists.arrow(next(iter(EXTENTS))))
    columns = [lists.numbers(name, length=count).astype(np.int64) for name in EXTENTS]
    from penstock.readers.formats.chunked_shard import Extents

    extents = Extents(**dict(zip(("files", "starts", "sizes", "fields"), columns, strict=True)))
    if not count:
        return extents
    if min(int(column.min()) for column in columns) < 0:
        raise ValueError("its extents have numbers below 0")
    if extents.files.max() >= len(files) or extents.fields.max() >= fields:
        raise ValueError("its extents are of files or fields that aren't there")
    if float(extents.sizes.sum(dtype=np.float64)) > MAX_SHARD_BYTES:
        raise ValueError("its extents have more bytes than a shard")
    if (extents.sizes > files.sizes[extents.files] - extents.starts).any():
        raise ValueError("its extents lie outside of their files")
    return extents


def _files(lists: Lists) -> ShardFiles:
    name, size, mtime, version = FILES
    names = lists.arrow(name).to_pylist()
    sizes = lists.numbers(size, length=len(names))
    if names:
        check_names(names)
        if sizes.min() < 0 or float(sizes.sum(dtype=np.float64)) > MAX_SHARD_BYTES:
            raise ValueError("its files have sizes that can't be")
    return ShardFiles(
        names=names,
        sizes=sizes,
        mtimes_ns=lists.numbers(mtime, length=len(names)),
        versions=LazyColumn(lists.arrow(version, length=len(names))),
    )
