"""Recognise, index and read datasets of Parquet files: a folder of them, or those that a URL names.

A file's footer shows where each column of each row group is; some values are decoded if no metadata
show what a column holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock.cache import DatasetError
from penstock.readers.files import printable
from penstock.readers.formats.parquet.parquet_chunks import ChunkForm, decode_chunk
from penstock.readers.formats.parquet.parquet_footer import (
    CODEC,
    NULLS,
    SIZE,
    START,
    TAIL_BYTES,
    VALUES,
    footer_bytes,
    parse_footer,
)
from penstock.readers.formats.tables import (
    ColumnChunks,
    TableFile,
    TableFormat,
    TableReader,
    columns_of,
    read_ends,
    refusing,
    without_dictionaries,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import ArrayForm, FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.parquet.parquet_footer import Footer, Leaf
    from penstock.readers.formats.tables import ArrowColumn
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]


class ParquetFile(TableFile):
    """The footer of a file, with the columns of its schema.

    leaves: the leaves below each path of the schema, by number. forms: the forms of chunks that
    were needed before. Files of one schema share both.
    """

    def __init__(
        self,
        entry: Entry,
        footer: Footer,
        columns: Mapping[str, ArrowColumn],
        leaves: Mapping[tuple[str, ...], list[int]],
        forms: dict[tuple[int, int, bytes], ChunkForm],
    ) -> None:
        self.entry, self.columns, self.checksum = entry, columns, footer.checksum
        self.rows, self.sizes = footer.rows, footer.chunks[:, :, SIZE].sum(axis=1)
        self._footer, self._leaves, self._forms = footer, leaves, forms

    def chunks(self, column: ArrowColumn, form: ArrayForm | None) -> ColumnChunks:
        """Return the chunks of a column of this file."""
        found, footer = self._leaves.get(column.path, []), self._footer
        if len(found) != 1:
            raise ValueError(f'its column "{column.name}" is stored {len(found)} times, not once')
        leaf = footer.leaves[found[0]]
        if ".".join(leaf.path) in footer.encrypted:
            raise DatasetError(
                f'{printable(self.entry.name)}: its column "{column.name}" is encrypted, which '
                "isn't read. Write it without encryption."
            )
        numbers = footer.chunks[:, found[0]].copy()
        nulls = numbers[:, NULLS]
        if leaf.is_required:
            nulls[:] = 0
        elif leaf.is_flat and column.in_dictionary and len(column.path) > 1:
            nulls[:] = -1  # pyarrow's writer doesn't count the nulls of structs around a dictionary
        forms = []
        for codec in numbers[:, CODEC].tolist():
            key = found[0], codec, footer.writer
            if key not in self._forms:
                self._forms[key] = ChunkForm(
                    path=leaf.path,
                    elements=leaf.elements,
                    physical=leaf.physical,
                    parts=len(column.path),
                    writer=footer.writer,
                    codec=codec,
                    is_flat=leaf.is_flat,
                    has_levels=not leaf.is_required,
                    tensor=column.tensor,
                )
            forms.append(self._forms[key])
        return ColumnChunks(
            starts=numbers[:, START],
            sizes=numbers[:, SIZE],
            forms=forms,
            note=lambda unit: list(numbers[unit, VALUES : NULLS + 1].tolist()),
            lacking=_lacking(leaf, form, numbers, footer.rows),
            nulls_inside=(nulls != 0) & (not leaf.is_flat),
        )


def _lacking(leaf: Leaf, form: ArrayForm | None, numbers: Ints, rows: Ints) -> Ints:
    """Return how many rows of each chunk are null, -1 if nothing shows it: by the statistics, or by
    the number of values if each row has as many."""
    nulls = numbers[:, NULLS]
    if form is not None and form.is_ragged:
        return np.zeros(len(nulls), np.int64)
    size = 1 if leaf.is_flat or form is None else math.prod(form.fixed_shape)
    if size < 2:  # a null list and a list of one null look the same
        return nulls
    found, rest = np.divmod(rows * size - numbers[:, VALUES], size - 1)
    # Lists of other lengths aren't nulls: they are bad samples.
    found = np.where((rest == 0) & (found > 0), found, 0)
    return np.where(nulls < 0, found, np.minimum(found, nulls))


class ParquetReader(TableReader):
    """Reads rows of a shard."""

    def read_notes(self, notes: Any, shard: ChunkedShardFacts, chunks: Ints) -> None:
        """Read the form and the numbers of each chunk: the number of its form, its values, its
        bytes decompressed and its nulls (-1: unknown)."""
        self._chunk_forms = [ChunkForm.of_json(each) for each in notes["forms"]]
        self._decoding = np.array(notes["chunks"], np.int64).reshape(-1, 4)
        numbers = self._decoding
        if len(numbers) and not (
            numbers[:, :3].min() >= 0 and numbers[:, 0].max() < len(self._chunk_forms)
        ):
            raise ValueError("its chunks have forms that don't exist")
        self._rows = np.zeros(len(shard.extents) + 1, np.int64)  # the last is that of NO_CHUNK
        self._rows[chunks] = shard.units[:, None]

    def decode(
        self, extent: int, type: FieldType, data: Encoded, dictionaries: Sequence[Encoded]
    ) -> Any:
        """Return a column chunk's table. Raises ValueError if its bytes are damaged."""
        del dictionaries
        form, *numbers = self._decoding[extent].tolist()
        return decode_chunk(data, self._chunk_forms[form], type, int(self._rows[extent]), *numbers)


def _columns(footer: Footer, entry: Entry) -> Mapping[str, ArrowColumn]:
    schema = footer.arrow_schema()
    plain = [field.with_type(without_dictionaries(field.type)) for field in schema]
    return columns_of(pa.schema(plain, schema.metadata), printable(entry.name))


def _leaves_by_path(footer: Footer) -> Mapping[tuple[str, ...], list[int]]:
    paths: dict[tuple[str, ...], list[int]] = {}
    for number, leaf in enumerate(footer.leaves):
        for end in range(1, len(leaf.path) + 1):
            paths.setdefault(leaf.path[:end], []).append(number)
    return paths


class ParquetFormat(TableFormat):
    """Parquet files."""

    name: ClassVar[str] = "parquet"
    kind: ClassVar[str] = "Parquet"
    extensions: ClassVar[frozenset[str]] = frozenset(("parquet", "parq", "pq"))

    def read_files(
        self, origin: Origin, files: Sequence[Entry], *, workers: int
    ) -> Iterator[ParquetFile]:
        """Yield the footers of files."""
        known: dict[bytes, tuple[Leaf, ...]] = {}
        # By the schema and its metadata as Thrift, which most files of a dataset share.
        schemas: dict[tuple[bytes, bytes], tuple[Any, Any, Any]] = {}
        for entry, tail in read_ends(origin, files, footer_bytes, workers=workers):
            with refusing(entry):
                data = tail[-footer_bytes(tail, entry.size_bytes) : -TAIL_BYTES]
                footer = parse_footer(data, entry.size_bytes, known)
                key = footer.schema, footer.keys
                if key not in schemas:
                    schemas[key] = _columns(footer, entry), _leaves_by_path(footer), {}
            yield ParquetFile(entry, footer, *schemas[key])

    def reader(self, shard: ChunkedShardFacts) -> ParquetReader:
        """Open a shard."""
        return ParquetReader(shard)


FORMAT = ParquetFormat()
