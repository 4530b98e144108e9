"""Decodes one column chunk of one row group, from its bytes alone.

pyarrow reads files, not chunks: so each chunk is given to it as the only one of a file of its own,
whose footer is written here from numbers that were checked. The bytes aren't copied for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.cache.base.machine import machine_remedy
from penstock.readers.formats.arrow.values import values_table
from penstock.readers.formats.parquet.footer import as_file, column_footer
from penstock.readers.formats.parquet.pages import pages_of, survey
from penstock.readers.formats.parquet.plain import LEAST_BYTES, are_plain, plain_values

if TYPE_CHECKING:
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arrow.types import Tensor
    from penstock.readers.types import Encoded

BYTE_ARRAY = 6
_EXPANDS_TO = 2**30
"""Values of a dictionary are copied out of it while they can't take more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkForm:
    """What chunks of one column have in common. path, elements, physical: see `footer.Leaf`;
    parts: names of path that lead to the values, the others are lists'; writer: of the file;
    codec: its number; is_flat: it has no lists; has_levels: its pages say of each value whether it
    is there; tensor: how its tensors are stored."""

    path: tuple[str, ...]
    elements: tuple[bytes, ...]
    physical: int
    parts: int
    writer: bytes
    codec: int
    is_flat: bool
    has_levels: bool
    tensor: Tensor | None = None


def decode_chunk(
    data: Encoded,
    form: ChunkForm,
    type: FieldType,
    *,
    rows: int,
    values: int,
    decoded: int,
    nulls: int,
) -> Any:
    """The table (`values.values_table`) of a chunk. values, decoded, nulls: as the footer tells
    them. Raises ValueError for damage."""
    pages = list(pages_of(data))
    found = survey(pages, values=values, size_bytes=len(data))
    if (
        form.physical == BYTE_ARRAY
        and form.is_flat
        and not nulls
        and decoded >= LEAST_BYTES * rows
        # Statistics of pyarrow's writer don't count the nulls of the structs around a dictionary.
        and not (found.is_dictionary and len(form.path) > 1)
        and are_plain(pages, form.codec)
    ):
        array = plain_values(
            data, pages, codec=form.codec, has_levels=form.has_levels, values=values
        )
        return values_table(type, array, ())
    is_kept = form.physical == BYTE_ARRAY and (found.is_dictionary or found.largest > _EXPANDS_TO)
    footer = as_file(
        column_footer(
            form.elements,
            form.path,
            physical=form.physical,
            codec=form.codec,
            rows=rows,
            values=values,
            size=len(data),
            decoded=decoded,
            writer=form.writer,
        )
    )
    try:
        metadata = pq.ParquetFile(pa.BufferReader(footer)).metadata
        file = pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(data)),
            metadata=metadata,
            read_dictionary=[".".join(form.path)] if is_kept else None,
            # Large, since the values of a row group may be; dictionaries are read as they are only
            # where no type is asked for.
            binary_type=None if is_kept else pa.large_binary(),
            list_type=pa.LargeListType,
            page_checksum_verification=True,
            arrow_extensions_enabled=False,
            pre_buffer=False,
        )
        column = file.read_row_group(0, use_threads=False).column(0)
        return values_table(type, column, form.path[1 : form.parts], form.tensor)
    except (pa.ArrowException, OSError, MemoryError) as error:
        if machine_remedy(error) is not None:
            raise
        why = _first_line(error)
        raise ValueError(
            f"its bytes are damaged, or pyarrow doesn't read what wrote them ({why})"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
