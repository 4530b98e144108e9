"""Write Arrow IPC files of one record batch, and read them strictly, as untrusted input.

Before a batch is read, its schema must be the expected one, and the batch must be neither
compressed nor encoded by a dictionary: otherwise a few bytes could become gigabytes. pyarrow
doesn't report that without reading, so this module parses the two flatbuffer tables that do.
Source: the Arrow columnar format, "IPC File Format"; Flatbuffers, "Internals".
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MAGIC = b"ARROW1"
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_TYPE, _MESSAGE_HEADER = 1, 2
_RECORD_BATCH = 3
_BATCH_COMPRESSION = 3

Columns = dict[str, str]
"""The name and Arrow type of each column, in order."""


class LazyColumn(Sequence[Any]):
    """The values of an Arrow column, decoded one at a time: 10^6 of them cost no memory."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, i: Any) -> Any:
        found = self._column[i]
        return found.to_pylist() if isinstance(i, slice) else found.as_py()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._column.to_pylist())


def write_batch(path: bytes, batch: Any) -> None:
    """Write one record batch as an uncompressed Arrow IPC file."""
    with pa.OSFile(os.fsdecode(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def metadata(buffer: Any) -> Mapping[bytes, bytes]:
    """Return the metadata in a file's schema. Raises one of BROKEN."""
    found: Mapping[bytes, bytes] = pa.ipc.open_file(pa.BufferReader(buffer)).schema.metadata or {}
    return found


def only_batch(
    buffer: Any, columns: Columns, *, optional: frozenset[str] = frozenset(), is_full: bool = True
) -> Any:
    """Return the only record batch of a mapped Arrow IPC file.

    columns: the expected ones, of which those in `optional` may be absent. is_full: check the
    values too, which may not be missing; unchecked offsets may point anywhere, and unchecked text
    may not be UTF-8. Raises one of BROKEN.
    """
    reader = pa.ipc.open_file(pa.BufferReader(buffer))
    found = [(field.name, str(field.type)) for field in reader.schema]
    names = {name for name, _ in found}
    wanted = [(n, kind) for n, kind in columns.items() if n in names or n not in optional]
    if found != wanted:
        got, expected = _differing(found, wanted), _differing(wanted, found)
        raise ValueError(f"its columns are {got}, wanted {expected}")
    _refuse_packed(memoryview(buffer))
    batch = reader.get_batch(0)
    batch.validate(full=is_full)  # without it, offsets out of bounds would crash the process
    if is_full and any(column.null_count for column in batch.columns):
        raise ValueError("a column has missing values")
    return batch


def _differing(columns: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> str:
    """Return the columns that the others don't contain, for messages."""
    odd = [each for each in columns if each not in others]
    return ", ".join(f"{name[:32]} {kind[:32]}" for name, kind in (odd or columns)[:12]) or "none"


def footer_start(buffer: Any) -> int:
    """Return the position of the footer in a buffer that holds at least the last 10 bytes of a
    file. Raises ValueError."""
    view = memoryview(buffer)
    try:
        if bytes(view[-6:]) != _MAGIC:
            raise ValueError("its end mark is missing")
        start = len(view) - 10 - _number(view, "<i", len(view) - 10)
    except struct.error as error:
        raise ValueError(f"its footer points outside the file ({error})") from error
    if not 0 <= start <= len(view) - 10:
        raise ValueError("its footer points outside the file")
    return start


def batch_head_end(buffer: Any) -> int:
    """Return the position at which the numbers of the only record batch begin, from a buffer that
    ends with the file's footer. The metadata before that position locates them. Raises
    ValueError."""
    view = memoryview(buffer)
    try:
        start = _only_block(view)
        end = _number(view, "<q", start) + _number(view, "<i", start + 8)
    except (struct.error, IndexError) as error:
        raise ValueError(f"its footer points outside the file ({error})") from error
    if not 0 <= end <= len(view):
        raise ValueError("its footer points outside the file")
    return end


def _only_block(view: memoryview) -> int:
    """Return the position of the entry of the only record batch in the footer. Raises ValueError,
    struct.error and IndexError."""
    footer = footer_start(view)
    root = footer + _number(view, "<I", footer)
    if _vector(view, root, _FOOTER_DICTIONARIES)[1]:
        raise ValueError("it has dictionaries")
    start, count = _vector(view, root, _FOOTER_BATCHES)
    if count != 1:
        raise ValueError(f"{count} record batches, wanted 1")
    return start


def _refuse_packed(view: memoryview) -> None:
    """Reject compression and dictionaries. Raises ValueError."""
    try:
        message = _number(view, "<q", _only_block(view))
        if _number(view, "<I", message) == 0xFFFFFFFF:  # absent in files of before Arrow 0.15
            message += 4
        message += 4
        root = message + _number(view, "<I", message)
        kind, header = _field(view, root, _MESSAGE_TYPE), _field(view, root, _MESSAGE_HEADER)
        if kind is None or header is None or view[kind] != _RECORD_BATCH:
            raise ValueError("its message isn't a record batch")
        batch = header + _number(view, "<I", header)
        if _field(view, batch, _BATCH_COMPRESSION) is not None:
            raise ValueError("it is compressed")
    except (struct.error, IndexError) as error:
        raise ValueError(f"its footer points outside the file ({error})") from error


def _number(view: memoryview, kind: str, at: int) -> int:
    if at < 0:
        raise IndexError("before the file's start")
    (number,) = struct.unpack_from(kind, view, at)
    return int(number)


def _field(view: memoryview, table: int, number: int) -> int | None:
    """Return the position of a field in a flatbuffer table, or None if it is absent."""
    vtable = table - _number(view, "<i", table)
    if 4 + 2 * number >= _number(view, "<H", vtable):
        return None
    offset = _number(view, "<H", vtable + 4 + 2 * number)
    return table + offset if offset else None


def _vector(view: memoryview, table: int, number: int) -> tuple[int, int]:
    """Return the position of the first element and the length of a vector in a table."""
    at = _field(view, table, number)
    if at is None:
        return 0, 0
    start = at + _number(view, "<I", at)
    return start + 4, _number(view, "<I", start)
