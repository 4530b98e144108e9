"""Recognise, index and read datasets of Parquet files: a folder of them, or those that a URL names.

A file's footer has the schema and the places of column chunks; some values are decoded if no
metadata show what a column holds. Footers are untrusted: every number is checked before it is used,
invalid ones raise ValueError, and what pyarrow gets is written from the checked values.

pyarrow's own parser of footers isn't used because it aborts the process for 6 of 2,000 footers with
one to eight wrong bytes (an exception that Cython can't catch; pyarrow 26), and doesn't return the
schema as Thrift, which a chunk's decoding needs. It is faster: 17 ms against 110 for 100 row groups
of 50 columns, 73 ms against 400 for 1,000 files of 10 columns, but a process of its own takes
longer to start than that saves. pyarrow copies values out of their pages: views of the pages saved
4 us of CPU time for a photograph of 40 kB, which takes 870 to decode and crop.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from penstock.readers.files import printable
from penstock.readers.formats.parquet.thrift import (
    STRUCT,
    Long,
    Raw,
    Struct,
    ThriftReader,
    write_struct,
)
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES
from penstock.readers.formats.tables import (
    StoredChunk,
    TableFile,
    TableFormat,
    TableReader,
    arrow_errors,
    columns_of,
    max_decoded_bytes,
    tensor_of_json,
    values_table,
    without_dictionaries,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.fieldtypes import ArrayForm, FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.tables import ArrowColumn, Tensor
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded


MAGIC, ENCRYPTED = b"PAR1", b"PARE"
_IS_ENCRYPTED = "it is encrypted, which isn't supported: write it without encryption"
TAIL_BYTES = 8
"""The size of what follows the footer: its length and the magic bytes."""

MAX_FOOTER_BYTES = 2**24
_REQUIRED, _REPEATED = 0, 2
_MAX_COLUMNS, _MAX_GROUPS, _MAX_NESTING = 2**16, 2**20, 32
_BYTE_ARRAY = 6
_DATA_V1, _, _DICTIONARY, _DATA_V2 = range(4)
_INDICES = (2, 8)  # encodings
_MAX_HEAD_BYTES = 2**20  # statistics in a page's header can be long
_MAX_EXPANDED_BYTES = 2**30
"""Values are copied out of their dictionary if they can't take more than this."""


def as_file(footer: bytes) -> bytes:
    """Return a file that contains only a footer."""
    return MAGIC + footer + len(footer).to_bytes(4, "little") + MAGIC


class ChunkPlace(NamedTuple):
    """Where a leaf's chunk lies in the bytes of a unit's column: its first byte and its size; and
    the footer's numbers of its values and of its decompressed bytes."""

    start: int
    size: int
    values: int
    decoded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A column as Parquet stores it, a leaf of the schema's tree, and how its chunks are stored.

    path: its names from the top. elements: of the schema, from below the root to the leaf itself,
    as Thrift. physical: the number of its type. has_levels: it may have nulls. is_flat: it has one
    value per row, so no lists.

    These belong to its chunks. parts: how many names of the path lead through structs to the
    values; the others are those of lists. writer: the file's `created_by`; codec: its number.
    tensor: how its tensors are stored.
    """

    path: tuple[str, ...]
    elements: tuple[bytes, ...]
    physical: int
    parts: int = 0
    writer: bytes = b""
    codec: int = 0
    is_flat: bool = False
    has_levels: bool = True
    tensor: Tensor | None = None

    def stored(self, place: ChunkPlace) -> tuple[tuple[Leaf, ...], tuple[ChunkPlace, ...]]:
        """Return the leaves of a chunk, and their places in it. place: of all of its bytes."""
        return (self,), (place,)

    def to_json(self) -> dict[str, Any]:
        """Return an object that `of_json` reads."""
        elements = [base64.b64encode(each).decode() for each in self.elements]
        writer = base64.b64encode(self.writer).decode()
        found = {**asdict(self), "elements": elements, "writer": writer}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def of_json(cls, notes: Any) -> Leaf:
        """Read a leaf. Raises ValueError, TypeError, KeyError."""
        tensor = notes.get("tensor")
        return cls(
            path=tuple(map(str, notes["path"])),
            elements=tuple(map(base64.b64decode, notes["elements"])),
            physical=int(notes["physical"]),
            parts=int(notes["parts"]),
            writer=base64.b64decode(notes["writer"]),
            codec=int(notes["codec"]),
            tensor=None if tensor is None else tensor_of_json(tensor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafTree:
    """The leaves of one column, whose chunks lie one after the other, and their places in a unit.

    Such a column holds lists of structs, which are read as JSON. places: of each leaf's chunk.
    """

    leaves: tuple[Leaf, ...]
    places: tuple[ChunkPlace, ...]

    def stored(self, place: ChunkPlace) -> tuple[tuple[Leaf, ...], tuple[ChunkPlace, ...]]:
        """Return the leaves of a chunk, and their places in it. place: of all of its bytes. Raises
        ValueError if they are outside of it."""
        if any(each.start < 0 or each.start + each.size > place.size for each in self.places):
            raise ValueError("a part of its chunk is outside of it")
        return self.leaves, self.places

    def to_json(self) -> dict[str, Any]:
        """Return an object that `form_of_json` reads."""
        return {"leaves": [each.to_json() for each in self.leaves], "places": [*self.places]}


def form_of_json(notes: Any) -> Leaf | LeafTree:
    """Read a leaf, or those of one column. Raises ValueError, TypeError, KeyError."""
    if "leaves" not in notes:
        return Leaf.of_json(notes)
    places = tuple(ChunkPlace(*map(int, place)) for place in notes["places"])
    tree = LeafTree(leaves=tuple(map(Leaf.of_json, notes["leaves"])), places=places)
    if not tree.leaves or len(places) != len(tree.leaves) or min(map(min, places)) < 0:
        raise ValueError("the leaves of a column have no places")
    return tree


def max_expanded_bytes(data: Encoded, values: int) -> int:
    """Check the headers of a chunk's pages, and return how many bytes its values may take at most
    if they are copied out of its dictionary.

    values: their number in the footer. Raises ValueError if the pages have another number, or would
    take far more memory than the chunk's bytes can decode to.
    """
    at = total = numbers = indices = entry = 0
    while at < len(data):
        reader = ThriftReader(data.data[at : at + _MAX_HEAD_BYTES])
        try:
            header = reader.struct()
        except ValueError:
            raise ValueError(f"it has no valid page header at byte {at:,}") from None
        kind, decoded, size = header.count(1), header.count(2), header.count(3)
        start = at + reader.at
        if min(kind, decoded, size) < 0:
            raise ValueError(f"its page at byte {at:,} has no kind or size")
        if size > len(data) - start:
            raise ValueError(f"its page at byte {at:,} has {size:,} bytes, more than are left")
        total += decoded
        if total > max_decoded_bytes(len(data)):
            raise ValueError(
                f"its pages claim {total:,} decompressed bytes, more than its {len(data):,} bytes "
                "can hold"
            )
        if kind == _DICTIONARY:
            entry = max(entry, decoded)
        elif (own := header.part({_DATA_V1: 5, _DATA_V2: 8}.get(kind, -1))) is not None:
            count, encoding = own.count(1), own.count(4 if kind == _DATA_V2 else 2)
            if min(count, encoding) < 0:
                raise ValueError(f"its page at byte {at:,} has no number of values, or no encoding")
            numbers += count
            indices += count if encoding in _INDICES else 0
        at = start + size
    if numbers != values:
        raise ValueError(f"its pages have {numbers:,} values, expected {values:,} by its footer")
    return indices * entry  # each value may be the largest of the dictionary


def decode_chunk(
    data: Encoded, form: Leaf | LeafTree, type: FieldType, *, rows: int, values: int, decoded: int
) -> Any:
    """Decode a chunk from its bytes alone, and return its values as `values_table` does.

    pyarrow reads files, not chunks, so it is given the chunk as the only one of a file, whose
    footer consists of checked numbers. This copies no bytes of the chunk. rows, values, decoded:
    the footer's numbers of rows, values and decompressed bytes. Raises ValueError for damage.
    """
    leaves, places = form.stored(ChunkPlace(0, len(data), values, decoded))
    parts = ((data[each.start : each.start + each.size], each.values) for each in places)
    max_bytes = sum(max_expanded_bytes(*part) for part in parts)
    is_kept = leaves[0].physical == _BYTE_ARRAY and max_bytes > _MAX_EXPANDED_BYTES
    footer = _chunk_footer(leaves, places, rows=rows)
    with arrow_errors("its bytes are damaged, or pyarrow can't read files of their writer"):
        file = pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(data)),
            metadata=pq.ParquetFile(pa.BufferReader(as_file(footer))).metadata,
            read_dictionary=[".".join(leaf.path) for leaf in leaves] if is_kept else None,
            # Values of a row group may take more than 2 GiB. A dictionary is only kept if no type
            # is requested.
            binary_type=None if is_kept else pa.large_binary(),
            list_type=pa.LargeListType,
            page_checksum_verification=True,
            arrow_extensions_enabled=False,
            pre_buffer=False,
        )
        column = file.read_row_group(0, use_threads=False).column(0)
        first = leaves[0]
    return values_table(type, column, first.path[1 : first.parts], first.tensor)


def _chunk_footer(leaves: Sequence[Leaf], places: Sequence[ChunkPlace], *, rows: int) -> bytes:
    """Return the footer of a file with one column, whose chunks lie at these places."""
    chunks = [
        {
            1: leaf.physical,
            2: [],
            3: [name.encode() for name in leaf.path],
            4: leaf.codec,
            5: Long(place.values),
            6: Long(place.decoded),
            7: Long(place.size),
            # A dictionary page that comes first is recognised by its own header.
            9: Long(place.start),
        }
        for leaf, place in zip(leaves, places, strict=True)
    ]
    decoded = sum(place.decoded for place in places)
    group = {1: [{2: Long(0), 3: each} for each in chunks], 2: Long(decoded), 3: Long(rows)}
    elements = [Raw(STRUCT, each) for each in _elements_of(leaves)]
    root = {4: b"schema", 5: 1}
    writer = leaves[0].writer
    return write_struct({1: 2, 2: [root, *elements], 3: Long(rows), 4: [group], 6: writer})


def _elements_of(leaves: Sequence[Leaf]) -> list[bytes]:
    """Return the elements of a schema's part with these leaves, depth first."""
    if len(leaves) == 1:
        return [*leaves[0].elements]
    elements: dict[tuple[str, ...], bytes] = {}
    for leaf in leaves:
        for end, element in enumerate(leaf.elements, start=1):
            elements.setdefault(leaf.path[:end], element)
    children = Counter(path[:-1] for path in elements)
    return [
        _element(ThriftReader(element).struct(), element, children=children[path])
        for path, element in elements.items()
    ]


class ChunkNumbers(NamedTuple):
    """The numbers of a chunk in a footer: its first byte in the file and its size, the number of
    its codec, its values with nulls, its bytes decompressed, and its nulls (-1: unknown)."""

    start: int
    size: int
    codec: int
    values: int
    decoded: int
    nulls: int


class ParquetSchema:
    """A schema, which files may share.

    leaves: of its tree. below: the numbers of the leaves below each path. columns: those that may
    be fields, by name.
    """

    def __init__(self, root: Struct, data: bytes, file: str) -> None:
        """root: the footer; data: its bytes; file: its name. Raises ValueError."""
        self.leaves = tuple(_leaves(root.structs(2), data))
        self.below: dict[tuple[str, ...], list[int]] = {}
        for number, leaf in enumerate(self.leaves):
            for end in range(1, len(leaf.path) + 1):
                self.below.setdefault(leaf.path[:end], []).append(number)
        parts, metadata = (
            [Raw(STRUCT, data[each.start : each.end]) for each in root.structs(field)]
            for field in (2, 5)
        )
        footer = write_struct({1: 2, 2: parts, 3: Long(0), 4: [], 5: metadata, 6: _writer(root)})
        with arrow_errors("its schema can't be read"):
            schema = pq.read_schema(io.BytesIO(as_file(footer)))
        plain = [field.with_type(without_dictionaries(field.type)) for field in schema]
        self.columns = columns_of(pa.schema(plain, schema.metadata), file)


def _writer(root: Struct) -> bytes:
    writer = root.get(6)
    return writer if isinstance(writer, bytes) else b""


class ParquetFile(TableFile):
    """The footer of a file. writer: the program that wrote the file. groups: the numbers of the
    chunks of each row group, in the order of the leaves."""

    def __init__(self, entry: Entry, data: bytes, schemas: dict[Any, Any]) -> None:
        """Parse a footer. data: its bytes. schemas: those of other files by their bytes, which most
        files of a dataset share; a new one is added. Raises ValueError."""
        root = ThriftReader(data).struct()
        if 8 in root:
            raise ValueError(_IS_ENCRYPTED)
        groups, total = root.structs(4), root.get(3)
        if not root.structs(2) or type(total) is not int:
            raise ValueError("its footer lacks the schema or the number of rows")
        parts = [root.structs(field) for field in (2, 5)]  # the schema, the metadata
        key = tuple(data[part[0].start : part[-1].end] if part else b"" for part in parts)
        if key not in schemas:
            schemas[key] = ParquetSchema(root, data, printable(entry.name))
        self.entry, self.checksum, self.schema = entry, crc32c(data), schemas[key]
        self.writer, self.columns, leaves = _writer(root), self.schema.columns, self.schema.leaves
        self.groups = [_group(n, each, leaves, entry.size_bytes) for n, each in enumerate(groups)]
        rows = [each.get(3, 0) for each in groups]
        if len(rows) > _MAX_GROUPS or sum(rows) != total:
            raise ValueError(f"its footer says {total:,} rows, and row groups have {sum(rows):,}")
        self.rows = np.array(rows, np.int64)
        sizes = [sum(chunk.size for chunk in group) for group in self.groups]
        self.sizes = np.array(sizes, np.int64)

    def chunks(self, column: ArrowColumn, form: ArrayForm | None) -> list[StoredChunk]:
        """Return the chunks of a column of this file."""
        depth, places = len(column.path), self.schema.below.get(column.path, [])
        if len(places) > 1 and form is None:
            return self._chunks_of_several(places, depth)
        if len(places) != 1:
            raise ValueError(f'its column "{column.name}" is stored {len(places)} times, not once')
        leaf = self.schema.leaves[places[0]]
        leaf = replace(leaf, parts=depth, writer=self.writer, tensor=column.tensor)
        # pyarrow's writer doesn't count the nulls of structs around a dictionary.
        is_uncounted = leaf.is_flat and column.in_dictionary and depth > 1
        found: list[StoredChunk] = []
        for rows, group in zip(self.rows.tolist(), self.groups, strict=True):
            numbers = group[places[0]]
            if not leaf.has_levels or is_uncounted:
                numbers = numbers._replace(nulls=-1 if leaf.has_levels else 0)
            own, note = replace(leaf, codec=numbers.codec), [*numbers[3:]]
            chunk = StoredChunk(start=numbers.start, size=numbers.size, form=own, note=note)
            chunk.lacking = _lacking(leaf, form, numbers, rows)
            chunk.nulls_inside = numbers.nulls != 0 and not leaf.is_flat
            found.append(chunk)
        return found

    def _chunks_of_several(self, places: Sequence[int], depth: int) -> list[StoredChunk]:
        """Return the chunks of a column of several leaves."""
        leaves = [replace(self.schema.leaves[n], parts=depth, writer=self.writer) for n in places]
        if len({leaf.path for leaf in leaves}) < len(leaves):
            raise ValueError(f'its column "{leaves[0].path[0]}" has two parts of one name')
        found: list[StoredChunk] = []
        for group in self.groups:
            numbers = [group[place] for place in places]
            start = min(each.start for each in numbers)
            size = max(each.start + each.size for each in numbers) - start
            stored = (replace(own, codec=n.codec) for own, n in zip(leaves, numbers, strict=True))
            parts = (ChunkPlace(n.start - start, n.size, n.values, n.decoded) for n in numbers)
            form = LeafTree(leaves=tuple(stored), places=tuple(parts))
            # A null list counts as an empty one.
            note = [sum(each.values for each in numbers), sum(each.decoded for each in numbers), 0]
            found.append(StoredChunk(start=start, size=size, form=form, note=note))
        return found


def _lacking(leaf: Leaf, form: ArrayForm | None, numbers: ChunkNumbers, rows: int) -> int:
    """Return how many rows of a chunk are null, -1 if nothing shows it: by the statistics, or by
    the number of values if each row has as many."""
    if form is not None and form.is_ragged:
        return 0
    size = 1 if leaf.is_flat or form is None else math.prod(form.fixed_shape)
    if size < 2:  # a null list and a list of one null look the same
        return numbers.nulls
    found, rest = divmod(rows * size - numbers.values, size - 1)
    if rest or found < 0:  # lists of other lengths aren't nulls: they are bad samples
        found = 0
    return found if numbers.nulls < 0 else min(found, numbers.nulls)


def _leaves(elements: list[Struct], data: bytes) -> Iterator[Leaf]:
    """Yield the leaves of a schema, a tree whose nodes are listed depth first."""
    following = iter(elements)

    def below(
        element: Struct, path: tuple[str, ...], parts: tuple[bytes, ...], kinds: tuple[Any, ...]
    ) -> Iterator[Leaf]:
        count = element.count(5) if 5 in element else 0
        if not 0 <= count <= len(elements) <= _MAX_COLUMNS:
            raise ValueError("its schema has an invalid number of columns")
        if len(path) > _MAX_NESTING:
            raise ValueError(f"its schema nests deeper than {_MAX_NESTING}")
        for _ in range(count):
            if (child := next(following, None)) is None:
                raise ValueError("its schema ends early")
            own = (*path, _name(child)), (*parts, _element(child, data)), (*kinds, child.get(3))
            yield from below(child, *own)
        if path and not count:
            if (physical := element.count(1)) < 0:
                raise ValueError(f"its column {path[-1]!r} has no type")
            yield Leaf(
                path=path,
                elements=parts,
                physical=physical,
                has_levels=set(kinds) != {_REQUIRED},
                is_flat=_REPEATED not in kinds,
            )

    yield from below(next(following), (), (), ())
    if next(following, None) is not None:
        raise ValueError("its schema has columns that are in no group")


def _name(element: Struct) -> str:
    name = element.get(4)
    if not isinstance(name, bytes):
        raise ValueError("its schema has a column without a name")
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise ValueError(f"its column {name!r:.80} isn't named in UTF-8") from None


def _element(element: Struct, data: bytes, *, children: int = 1) -> bytes:
    """Return an element of a schema as Thrift. children: its number of them, if it has any."""
    fields = {n: element[n] for n in range(1, 10) if n == 4 or type(element.get(n)) is int}
    if fields.get(5):
        fields[5] = children
    if (logical := element.part(10)) is not None:
        fields[10] = Raw(STRUCT, data[logical.start : logical.end])
    return write_struct(fields)


def _group(
    place: int, group: Struct, leaves: tuple[Leaf, ...], size_bytes: int
) -> list[ChunkNumbers]:
    """Return the numbers of each chunk of a row group, whose number of rows is valid."""
    rows, columns = group.get(3), group.structs(1)
    if type(rows) is not int or not 0 <= rows <= MAX_SHARD_SAMPLES:
        claim = f"{rows:,} rows" if type(rows) is int else "no number of rows"
        raise ValueError(f"its row group {place} has {claim}, wanted at most {MAX_SHARD_SAMPLES:,}")
    if len(columns) != len(leaves):
        raise ValueError(
            f"its row group {place} has {len(columns)} columns, and its schema {len(leaves)}"
        )
    if not rows:  # the numbers of an empty chunk don't matter
        return [ChunkNumbers(0, 0, 0, 0, 0, 0)] * len(leaves)
    found: list[ChunkNumbers] = []
    for column, leaf in zip(columns, leaves, strict=True):
        try:
            found.append(_chunk(column, leaf, size_bytes, rows))
        except ValueError as error:
            name = ".".join(leaf.path)
            raise ValueError(f'the column "{name}" of its row group {place} {error}') from None
    return found


def _chunk(column: Struct, leaf: Leaf, size_bytes: int, rows: int) -> ChunkNumbers:
    """Return the numbers of a column chunk."""
    if 8 in column or 9 in column:
        raise ValueError("is encrypted, which isn't supported: write it without encryption")
    if column.get(1):
        raise ValueError("is stored in another file, which isn't supported")
    meta = column.part(3) or Struct()
    data, size, decoded, values, codec = sizes = [meta.count(field) for field in (9, 7, 6, 5, 4)]
    if min(sizes) < 0:
        raise ValueError("has no metadata, or these lack its offset, size, values or codec")
    if meta.get(1) != leaf.physical:
        raise ValueError("has another type than the schema")
    if values < rows or (leaf.is_flat and values != rows):
        raise ValueError(f"has {values:,} values for {rows:,} rows")
    start, dictionary = data, meta.count(11)
    if 0 < dictionary < data:
        start = dictionary
    if start < len(MAGIC) or start + size > size_bytes - TAIL_BYTES or data - start > size:
        raise ValueError(f"would lie at bytes {start:,} to {start + size:,} of {size_bytes:,}")
    statistics = meta.part(12)
    nulls = -1 if statistics is None else statistics.count(3)
    nulls = nulls if nulls <= values else -1
    return ChunkNumbers(start, size, codec, values, decoded, nulls)


class ParquetReader(TableReader):
    """Reads rows of a shard."""

    def read_notes(self, notes: Any, shard: ChunkedShardFacts) -> None:
        """Read the leaves, and the numbers of each chunk: the number of its leaf, its values, its
        bytes decompressed and its nulls."""
        self._leaves = [form_of_json(each) for each in notes["forms"]]
        self._decoding = numbers = np.array(notes["chunks"], np.int64).reshape(-1, 4)
        if (numbers[:, :3] < 0).any() or (numbers[:, 0] >= len(self._leaves)).any():
            raise ValueError("its chunks have forms that don't exist")

    def decode(
        self, extent: int, rows: int, type: FieldType, data: Encoded, others: Sequence[Encoded]
    ) -> Any:
        """Return a column chunk's table. Raises ValueError if its bytes are damaged."""
        number, values, decoded, _ = self._decoding[extent].tolist()
        leaf = self._leaves[number]
        return decode_chunk(data, leaf, type, rows=rows, values=values, decoded=decoded)


class ParquetFormat(TableFormat):
    """Parquet files."""

    name: ClassVar[str] = "parquet"
    reader_class = ParquetReader
    extensions: ClassVar[frozenset[str]] = frozenset(("parquet", "parq", "pq"))

    def footer_bytes(self, tail: bytes, size_bytes: int) -> int:
        """Return the length of a file's footer with what follows it."""
        magic = tail[-4:]
        if magic == ENCRYPTED:
            raise ValueError(_IS_ENCRYPTED)
        if len(tail) < TAIL_BYTES or magic != MAGIC or size_bytes < len(MAGIC) + TAIL_BYTES:
            raise ValueError("its last bytes aren't Parquet's: it is truncated, or no Parquet file")
        found = int.from_bytes(tail[-8:-4], "little")
        if found > size_bytes - TAIL_BYTES - len(MAGIC):
            raise ValueError(
                f"its footer would have {found:,} bytes, and the file has {size_bytes:,}: it is "
                "truncated or damaged"
            )
        if found > MAX_FOOTER_BYTES:
            raise ValueError(
                f"its footer has {found:,} bytes, wanted at most {MAX_FOOTER_BYTES:,}: write "
                "larger row groups, or fewer columns in a file"
            )
        return found + TAIL_BYTES

    def open_file(
        self, origin: Origin, entry: Entry, tail: bytes, *, known: dict[Any, Any], workers: int
    ) -> ParquetFile:
        """Parse a file's footer."""
        size = self.footer_bytes(tail, entry.size_bytes)
        return ParquetFile(entry, tail[-size:-TAIL_BYTES], known)


FORMAT = ParquetFormat()
