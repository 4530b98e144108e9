"""Recognise, index and read datasets of Arrow IPC files: a folder of them, or those that a URL
names.

Their footers, and the heads of their record batches, show where each column of each batch is.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock.cache import DatasetError
from penstock.readers.files import printable
from penstock.readers.formats.arrow.ipc_chunks import (
    ColumnChunk,
    array_types,
    decode_chunk,
    note_of,
    storage_type,
    stored_arrays,
    type_of_text,
    type_to_text,
)
from penstock.readers.formats.arrow.ipc_metadata import footer_bytes, read_contents
from penstock.readers.formats.tables import (
    ColumnChunks,
    TableFile,
    TableFormat,
    TableReader,
    columns_of,
    read_ends,
    refusing,
    tensor_of_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import ArrayForm, FieldType
    from penstock.readers.formats.arrow.ipc_chunks import IpcArray
    from penstock.readers.formats.arrow.ipc_metadata import BatchMetadata, IpcContents
    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.tables import ArrowColumn
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]


class ArrowFile(TableFile):
    """The metadata of a file or stream. A unit is a record batch that has rows."""

    def __init__(self, entry: Entry, contents: IpcContents) -> None:
        """Raises DatasetError with the file's name, ValueError for types that nest too deep."""
        self.entry, self.checksum = entry, contents.checksum
        self.columns = columns_of(contents.schema, printable(entry.name))
        self._batches = [each for each in contents.batches if each.dictionary is None and each.rows]
        self._types = [
            each
            for field in contents.schema
            for each in array_types((field.name,), storage_type(field.type))
        ]
        self._numbers = dict(enumerate(contents.numbers))
        self._dictionaries: dict[int, list[BatchMetadata]] = {}
        for batch in contents.batches:
            if batch.dictionary is not None:
                known = self._dictionaries.setdefault(batch.dictionary, [])
                if known and not batch.is_delta:
                    raise DatasetError(
                        f"{printable(entry.name)}: one of its dictionaries is replaced after some "
                        "batches, which isn't read. Write it with one dictionary "
                        "(table.unify_dictionaries()) or with deltas (emit_dictionary_deltas=True)."
                    )
                known.append(batch)
        self.rows = np.array([batch.rows for batch in self._batches], np.int64)
        self.sizes = np.array([int(b.buffers[:, 1].sum()) for b in self._batches], np.int64)

    @cached_property
    def _arrays(self) -> list[list[IpcArray]]:
        """The arrays of each unit."""
        return [stored_arrays(batch, self._types) for batch in self._batches]

    def chunks(self, column: ArrowColumn, form: ArrayForm | None) -> ColumnChunks:
        """Return the chunks of a column of this file."""
        path, depth = column.path, len(column.path)
        # The arrays along the path through structs, and all those inside the last one.
        chosen = [n for n, (own, _) in enumerate(self._types) if own[:depth] == path[: len(own)]]
        inside = arrow = self._types[chosen[depth - 1]][1]
        for part in reversed(path[1:]):
            arrow = pa.struct([(part, arrow)])
        units = [[arrays[number] for number in chosen] for arrays in self._arrays]
        if any(arrays[0].shape[0] != rows for arrays, rows in zip(units, self.rows, strict=True)):
            raise ValueError(
                f'its column "{column.name}" has another number of rows than its batch'
            )
        # A struct and its part may be null in different rows: this is the least that lack it.
        nulls = [max(array.shape[1] for array in arrays[:depth]) for arrays in units]
        if pa.types.is_run_end_encoded(inside):  # its nulls are counted by run, not by row
            nulls = [
                min(arrays[0].shape[0], count + arrays[depth + 1].shape[1])
                for count, arrays in zip(nulls, units, strict=True)
            ]
        dictionaries = None
        if pa.types.is_dictionary(inside) and units:
            number = self._numbers.get(chosen[depth - 1])
            parts = [] if number is None else self._dictionaries.get(number, [])
            if not parts:
                raise ValueError(f'its column "{column.name}" has no dictionary')
            types = [*array_types((), inside.value_type)]
            values = [stored_arrays(part, types) for part in parts]
            dictionaries = _column_chunks(
                inside.value_type, parts, values, [own[0].shape[1] for own in values], form
            )
        return _column_chunks(arrow, self._batches, units, nulls, form, depth, dictionaries)

    def notes_of_fields(self, columns: Sequence[ArrowColumn]) -> dict[str, Any]:
        """Return where the values of fields are in structs, and how their tensors are stored."""
        tensors = [[n, *column.tensor] for n, column in enumerate(columns) if column.tensor]
        parts = {"parts": [column.path[1:] for column in columns]}
        return {**parts, "tensors": tensors} if tensors else parts


def _column_chunks(
    arrow: Any,
    batches: Sequence[BatchMetadata],
    units: Sequence[Sequence[IpcArray]],
    nulls: Sequence[int],
    form: ArrayForm | None,
    depth: int = 1,
    dictionaries: ColumnChunks | None = None,
) -> ColumnChunks:
    """Return the chunks of a type. units: their arrays; depth: how many of them lead to the
    values."""
    notes = [note_of(arrays, b.codec) for arrays, b in zip(units, batches, strict=True)]
    is_ragged = form is not None and form.is_ragged
    return ColumnChunks(
        starts=np.array([start for _, start, _ in notes], np.int64),
        sizes=np.array([size for _, _, size in notes], np.int64),
        forms=[type_to_text(arrow)] * len(units),
        note=lambda unit: notes[unit][0],
        lacking=np.array(nulls, np.int64) * (not is_ragged),
        nulls_inside=np.array([any(a.shape[1] for a in own[depth:]) for own in units], np.bool_),
        dictionaries=dictionaries,
    )


class ArrowReader(TableReader):
    """Reads rows of a shard; buffers that aren't compressed become arrays without a copy."""

    def read_notes(self, notes: Any, shard: ChunkedShardFacts, chunks: Ints) -> None:
        """Read the types and the buffers of chunks, and of each field the names that lead through
        structs to its values."""
        del chunks
        self._fields = np.asarray(shard.extents.fields).tolist()
        self._types = [type_of_text(str(text)) for text in notes["forms"]]
        sizes, forms = shard.extents.sizes.tolist(), len(self._types)
        self._decoding = [
            ColumnChunk.of_json(note, size, forms=forms, chunks=len(sizes))
            for note, size in zip(notes["chunks"], sizes, strict=True)
        ]
        self._parts = [[str(part) for part in each] for each in notes["parts"]]
        self._tensors = {
            int(number): tensor_of_json([shape, axes])
            for number, shape, axes in notes.get("tensors", ())
        }
        if len(self._parts) != len(shard.schema):
            raise ValueError("the number of its fields is wrong")

    def is_plain(self, extent: int) -> bool:
        """Return True if the chunk isn't compressed and has no dictionary."""
        chunk = self._decoding[extent]
        return not chunk.codec and not chunk.dictionaries

    def dictionaries(self, extent: int) -> Sequence[int]:
        """Return the extents that hold the values of a chunk's dictionary."""
        return self._decoding[extent].dictionaries

    def decode(
        self, extent: int, type: FieldType, data: Encoded, dictionaries: Sequence[Encoded]
    ) -> Any:
        """Return a chunk's table. Raises ValueError if its bytes are damaged."""
        chunks = [self._decoding[number] for number in (extent, *self.dictionaries(extent))]
        first, *others = (
            (part, chunk, self._types[chunk.form])
            for part, chunk in zip([data, *dictionaries], chunks, strict=True)
        )
        field = self._fields[extent]
        return decode_chunk(first, others, type, self._parts[field], self._tensors.get(field))


class ArrowFormat(TableFormat):
    """Arrow IPC files and streams. Packs consist of such files too, but are recognised first."""

    name: ClassVar[str] = "arrow"
    kind: ClassVar[str] = "Arrow"
    extensions: ClassVar[frozenset[str]] = frozenset(("arrow", "feather", "ipc", "arrows"))

    def read_files(
        self, origin: Origin, files: Sequence[Entry], *, workers: int
    ) -> Iterator[ArrowFile]:
        """Read the metadata of files."""
        for entry, tail in read_ends(origin, files, footer_bytes, workers=workers):
            with refusing(entry):
                contents = read_contents(origin, entry, tail, workers=workers)
                file = ArrowFile(entry, contents)
            yield file

    def reader(self, shard: ChunkedShardFacts) -> ArrowReader:
        """Open a shard."""
        return ArrowReader(shard)


FORMAT = ArrowFormat()
