"""Read and parse the footers of Parquet files: the schema, and where column chunks lie.

Footers may come from anybody: every number is checked before it is used, and the parts that are
handed to pyarrow are written anew from what was checked. What can't be is a ValueError. All files'
footers are read at once and never again: two requests a file at most.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError
from penstock.readers.files import printable
from penstock.readers.formats.parquet.thrift import (
    I32,
    I64,
    LIST,
    STRUCT,
    Struct,
    ThriftReader,
    write_list,
    write_number,
    write_struct,
    write_text,
)
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES
from penstock.readers.formats.unindexed_files import read_file_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.origin import Entry, Origin

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
TAIL_BYTES = 8
"""Behind the footer: its length and the magic."""

MAX_FOOTER_BYTES = 2**24
_REQUIRED, _REPEATED = 0, 2
_MAX_COLUMNS, _MAX_GROUPS, _MAX_NESTING = 2**16, 2**20, 32

START, SIZE, DATA, CODEC, VALUES, DECODED, NULLS, PAGES, PAGES_SIZE = range(9)
"""What is known of a column chunk: where it begins and its bytes in the file, its first data page
counted from there, its codec's number, values (nulls too), bytes decompressed, nulls (-1: not
told), and where its offset index lies (0 bytes: there is none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A column that is stored. path: its names from the top; elements: of the schema, from below
    the root to the leaf itself, as Thrift; physical: the number of its type; is_required: it holds
    no null; is_flat: it has a value a row, and no lists."""

    path: tuple[str, ...]
    elements: tuple[bytes, ...]
    physical: int
    is_required: bool
    is_flat: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footer:
    """What a file's footer says.

    size_bytes: of the file; checksum: CRC-32C of the footer. schema, keys, writer: as Thrift, for
    pyarrow. leaves: the stored columns. rows: of each row group, int64. chunks: int64, shape
    (groups, leaves, 9), see START; encrypted: names of columns that can't be read.
    """

    size_bytes: int
    checksum: int
    schema: bytes
    keys: bytes
    writer: bytes
    leaves: tuple[Leaf, ...]
    rows: NDArray[np.int64]
    chunks: NDArray[np.int64]
    encrypted: frozenset[str]

    def arrow_schema(self) -> Any:
        """The schema as pyarrow reads it. Raises ValueError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = {
            1: write_number(2),
            2: (LIST, self.schema),
            3: write_number(0, I64),
            4: write_list(STRUCT, []),
        }
        if self.keys:
            fields[5] = (LIST, self.keys)
        fields[6] = write_text(self.writer)
        try:
            return pq.read_schema(io.BytesIO(as_file(write_struct(fields))))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"its schema can't be understood ({error})") from error


def as_file(footer: bytes) -> bytes:
    """A footer as a file that has nothing else."""
    return MAGIC + footer + len(footer).to_bytes(4, "little") + MAGIC


def footer_bytes(tail: bytes, size_bytes: int) -> int:
    """The length of the footer of a file, by its last TAIL_BYTES. Raises ValueError."""
    magic = tail[-4:]
    if magic == ENCRYPTED:
        raise ValueError("it is encrypted, which isn't read: write it without encryption")
    if len(tail) < TAIL_BYTES or magic != MAGIC or size_bytes < len(MAGIC) + TAIL_BYTES:
        raise ValueError("it doesn't end as a Parquet file: truncated, or no Parquet file")
    found = int.from_bytes(tail[-8:-4], "little")
    if found > size_bytes - TAIL_BYTES - len(MAGIC):
        raise ValueError(
            f"its footer would have {found:,} bytes, and the file has {size_bytes:,}: truncated, "
            "or damaged"
        )
    if found > MAX_FOOTER_BYTES:
        raise ValueError(
            f"its footer has {found:,} bytes, wanted at most {MAX_FOOTER_BYTES:,}: write larger "
            "row groups, or fewer columns in a file"
        )
    return found


def parse_footer(
    data: bytes, size_bytes: int, known: dict[bytes, tuple[Leaf, ...]] | None = None
) -> Footer:
    """What a footer says of a file of a size. known: the leaves of schemas that were seen, by their
    bytes: files of a dataset have one schema, mostly. Raises ValueError."""
    reader = ThriftReader(data)
    found: dict[int, Any] = {}
    groups: list[tuple[int, list[tuple[int, ...]]]] = []
    raw: dict[int, bytes] = {}
    leaves: tuple[Leaf, ...] = ()
    encrypted: set[str] = set()
    for field, kind in reader.fields():
        start = reader.at
        if field == 4 and kind == LIST:
            if not leaves:
                raise ValueError("it has row groups before its schema")
            for group in reader.structs(most=_MAX_GROUPS):
                groups.append(_group(group, leaves, size_bytes, encrypted, len(groups)))
        else:
            found[field] = reader.value(kind)
        raw[field] = data[start : reader.at]
        if field == 2:
            known = {} if known is None else known
            if (seen := known.get(raw[2])) is None:
                seen = known[raw[2]] = tuple(_leaves(found[2], data))
            leaves = seen
    if not leaves or not isinstance(found.get(3), int):
        raise ValueError("its footer lacks the schema or the number of rows")
    if 8 in found:
        raise ValueError("its footer is of an encrypted file, which isn't read")
    rows = np.array([count for count, _ in groups], np.int64)
    if int(rows.sum()) != found[3]:
        raise ValueError(f"it says {found[3]:,} rows, and its row groups have {int(rows.sum()):,}")
    writer = found.get(6, b"")
    return Footer(
        size_bytes=size_bytes,
        checksum=crc32c(data),
        schema=raw[2],
        keys=raw[5] if isinstance(found.get(5), list) else b"",
        writer=writer if isinstance(writer, bytes) else b"",
        leaves=leaves,
        rows=rows,
        chunks=np.array([each for _, each in groups], np.int64).reshape(
            len(groups), len(leaves), 9
        ),
        encrypted=frozenset(encrypted),
    )


def _leaves(elements: Any, data: bytes) -> Iterator[Leaf]:
    """The stored columns of a schema, which is a tree, its nodes listed from the top."""
    if not isinstance(elements, list) or not 1 <= len(elements) <= _MAX_COLUMNS:
        raise ValueError("its schema isn't a list of columns")
    at = 1
    # Of each open group: children that are still to come.
    open_: list[int] = [_children(elements[0])]
    names: list[str] = []
    path: list[bytes] = []
    kinds: list[Any] = []
    while open_:
        if not open_[-1]:
            open_.pop()
            if names:
                names.pop(), path.pop(), kinds.pop()
            continue
        open_[-1] -= 1
        if at >= len(elements):
            raise ValueError("its schema ends early")
        element = elements[at]
        at += 1
        names.append(_name(element))
        kinds.append(element.get(3))
        path.append(_element(element, data))
        children = _children(element)
        if children:
            open_.append(children)
            if len(open_) > _MAX_NESTING:
                raise ValueError(f"its schema nests deeper than {_MAX_NESTING}")
            continue
        if type(element.get(1)) is not int:
            raise ValueError(f"its column {names[-1]!r} has no type")
        yield Leaf(
            path=tuple(names),
            elements=tuple(path),
            physical=element[1],
            is_required=set(kinds) == {_REQUIRED},
            is_flat=_REPEATED not in kinds,
        )
        names.pop(), path.pop(), kinds.pop()
    if at != len(elements):
        raise ValueError("its schema has columns that are in no group")


def _children(element: Any) -> int:
    count = element.get(5, 0) if isinstance(element, Struct) else -1
    if type(count) is not int or not 0 <= count <= _MAX_COLUMNS:
        raise ValueError("its schema has a group of no number of columns")
    return count


def _name(element: Struct) -> str:
    name = element.get(4)
    if not isinstance(name, bytes):
        raise ValueError("its schema has a column without a name")
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise ValueError(f"its column {name!r:.80} isn't named in UTF-8") from None


def _element(element: Struct, data: bytes) -> bytes:
    """A schema's element that has one child at most, as Thrift."""
    fields: dict[int, tuple[int, bytes]] = {}
    for field in range(1, 10):
        value = element.get(field)
        if field == 4:
            fields[4] = write_text(element[4])
        elif type(value) is int:
            fields[field] = write_number(1 if field == 5 and value else value)
    logical = element.get(10)
    if isinstance(logical, Struct):
        fields[10] = (STRUCT, data[logical.start : logical.end])
    return write_struct(fields)


def _group(
    group: Struct, leaves: tuple[Leaf, ...], size_bytes: int, encrypted: set[str], place: int
) -> tuple[int, list[tuple[int, ...]]]:
    """The rows of a row group, and what is known of its chunks."""
    rows, columns = group.get(3), group.get(1)
    if type(rows) is not int or not isinstance(columns, list):
        raise ValueError(f"its row group {place} has no rows or columns")
    if not 0 <= rows <= MAX_SHARD_SAMPLES:
        raise ValueError(
            f"its row group {place} claims {rows:,} rows, wanted at most {MAX_SHARD_SAMPLES:,}"
        )
    if len(columns) != len(leaves):
        raise ValueError(
            f"its row group {place} has {len(columns)} columns, and its schema {len(leaves)}"
        )
    return rows, [
        _chunk(column, leaf, size_bytes, encrypted, place, rows)
        for column, leaf in zip(columns, leaves, strict=True)
    ]


_UNREADABLE = (0,) * 9


def _chunk(
    column: Any, leaf: Leaf, size_bytes: int, encrypted: set[str], place: int, rows: int
) -> tuple[int, ...]:
    told = column.part(3) if isinstance(column, Struct) else None
    name = ".".join(leaf.path)
    if isinstance(column, Struct) and (8 in column or 9 in column):
        encrypted.add(name)
        return _UNREADABLE
    where = f'the column "{name}" of its row group {place}'
    if not rows:  # whatever it says of nothing
        return _UNREADABLE
    if told is None:
        raise ValueError(f"{where} isn't told")
    if column.get(1):
        raise ValueError(f"{where} lies in another file, which isn't read")
    sizes = [told.count(field) for field in (9, 7, 6, 5, 4)]
    if min(sizes) < 0:
        raise ValueError(f"{where} has no place, size, number of values or codec")
    data, size, decoded, values, codec = sizes
    if told.get(1) != leaf.physical:
        raise ValueError(f"{where} is of another type than its schema says")
    if values < rows or (leaf.is_flat and values != rows):
        raise ValueError(f"{where} has {values:,} values for {rows:,} rows")
    start, dictionary = data, told.get(11)
    if type(dictionary) is int and 0 < dictionary < data:
        start = dictionary
    if start < len(MAGIC) or start + size > size_bytes - TAIL_BYTES or data - start > size:
        raise ValueError(
            f"{where} would lie at bytes {start:,} to {start + size:,} of {size_bytes:,}"
        )
    statistics = told.part(12)
    nulls = -1 if statistics is None else statistics.count(3)
    if nulls > values:
        nulls = -1
    pages, pages_size = column.count(4), column.count(5)
    if not _is_inside(pages, pages_size, size_bytes):
        pages = pages_size = 0
    return start, size, data - start, codec, values, decoded, nulls, pages, pages_size


def _is_inside(start: Any, size: Any, size_bytes: int) -> bool:
    return (
        type(start) is int
        and type(size) is int
        and start > 0
        and 0 < size <= MAX_FOOTER_BYTES
        and start + size <= size_bytes
    )


def column_footer(
    leaf_elements: tuple[bytes, ...],
    path: tuple[str, ...],
    *,
    physical: int,
    codec: int,
    rows: int,
    values: int,
    size: int,
    decoded: int,
    writer: bytes,
) -> bytes:
    """The footer of a file that has one column chunk alone, at its first byte."""
    root = write_struct({4: write_text(b"schema"), 5: write_number(1)})
    meta = {
        1: write_number(physical),
        2: write_list(I32, []),
        3: write_list(8, [write_text(name.encode())[1] for name in path]),
        4: write_number(codec),
        5: write_number(values, I64),
        6: write_number(decoded, I64),
        7: write_number(size, I64),
        # A dictionary page is known by its own header when it comes first.
        9: write_number(0, I64),
    }
    chunk = write_struct({2: write_number(0, I64), 3: (STRUCT, write_struct(meta))})
    group = write_struct(
        {1: write_list(STRUCT, [chunk]), 2: write_number(decoded, I64), 3: write_number(rows, I64)}
    )
    fields = {
        1: write_number(2),
        2: write_list(STRUCT, [root, *leaf_elements]),
        3: write_number(rows, I64),
        4: write_list(STRUCT, [group]),
        6: write_text(writer),
    }
    return write_struct(fields)


_FIRST_BYTES = 2**16
"""Of a file's end: most footers are smaller."""

_AT_ONCE = 2048


def read_footers(origin: Origin, files: Sequence[Entry], *, workers: int) -> Iterator[Footer]:
    """The footers, in the order of the files. Raises DatasetError with the file's name, and what
    reading raises."""
    known: dict[bytes, tuple[Leaf, ...]] = {}
    for first in range(0, len(files), _AT_ONCE):
        some = files[first : first + _AT_ONCE]
        starts = [max(0, entry.size_bytes - _FIRST_BYTES) for entry in some]
        tails = read_file_parts(
            origin,
            [(e, start, e.size_bytes) for e, start in zip(some, starts, strict=True)],
            workers=workers,
        )
        wanted = [
            _parse_tail(entry, tail) + TAIL_BYTES for entry, tail in zip(some, tails, strict=True)
        ]
        long = [i for i, size in enumerate(wanted) if size > len(tails[i])]
        rest = read_file_parts(
            origin,
            [(some[i], some[i].size_bytes - wanted[i], starts[i]) for i in long],
            workers=workers,
        )
        for i, head in zip(long, rest, strict=True):
            tails[i] = head + tails[i]
        for entry, tail, size in zip(some, tails, wanted, strict=True):
            data = tail[len(tail) - size : -TAIL_BYTES]
            try:
                yield parse_footer(data, entry.size_bytes, known)
            except ValueError as error:
                raise refused_file_error(entry, error) from error


def _parse_tail(entry: Entry, tail: bytes) -> int:
    try:
        return footer_bytes(tail[-TAIL_BYTES:], entry.size_bytes)
    except ValueError as error:
        raise refused_file_error(entry, error) from error


def refused_file_error(entry: Entry, error: object) -> DatasetError:
    """The error for a file that can't be read."""
    return DatasetError(
        f"{printable(entry.name)}: {error}. Write or fetch it again, or take it out of the dataset."
    )
