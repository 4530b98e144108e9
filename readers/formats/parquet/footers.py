"""The footers of a dataset's files, read at once and never again: two requests a file at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import printable
from penstock.readers.formats.file_parts import read_parts
from penstock.readers.formats.parquet.footer import TAIL_BYTES, footer_bytes, parse_footer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.formats.parquet.footer import Footer, Leaf
    from penstock.readers.origin.origin import Entry, Origin

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
        tails = read_parts(
            origin,
            [(e, start, e.size_bytes) for e, start in zip(some, starts, strict=True)],
            workers=workers,
        )
        wanted = [_told(entry, tail) + TAIL_BYTES for entry, tail in zip(some, tails, strict=True)]
        long = [i for i, size in enumerate(wanted) if size > len(tails[i])]
        rest = read_parts(
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
                raise refused(entry, error) from error


def _told(entry: Entry, tail: bytes) -> int:
    try:
        return footer_bytes(tail[-TAIL_BYTES:], entry.size_bytes)
    except ValueError as error:
        raise refused(entry, error) from error


def refused(entry: Entry, error: object) -> DatasetError:
    """The error for a file that can't be read."""
    return DatasetError(
        f"{printable(entry.name)}: {error}. Write or fetch it again, or take it out of the dataset."
    )
