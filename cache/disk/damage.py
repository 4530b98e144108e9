"""What tells damaged books from a disk that fails: SQLite's own codes, and checksums of ours.

SQLite notices damage to its own structure only, so what must be right carries a checksum of its
own: a wrong one is sqlite3.DatabaseError, as a torn page is.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# What SQLite says of a disk or of other processes: SQLITE_BUSY, LOCKED, NOMEM, READONLY, INTERRUPT,
# IOERR, FULL, CANTOPEN, PROTOCOL. All else is said of the file.
_DISK_CODES = frozenset((5, 6, 7, 8, 9, 10, 13, 14, 15))
_SHORT_READ, _FILE_MOVED = 522, 1032


class UncountedError(sqlite3.DatabaseError):
    """The books are new, and nobody has put into them what is there."""


class OtherVersionError(sqlite3.DatabaseError):
    """The books are of another version of the schema."""


class ForeignBooksError(sqlite3.DatabaseError):
    """The file in the place of the books is somebody else's: it is moved away, not removed."""


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the books are damaged, and not that the disk is full or busy."""
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # ours
        return not isinstance(error, sqlite3.OperationalError)
    return code in (_SHORT_READ, _FILE_MOVED) or code & 0xFF not in _DISK_CODES


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn every error that a damaged file causes inside into sqlite3.DatabaseError: sqlite3 raises
    UnicodeDecodeError where its message quotes a damaged schema, and rows hold any values."""
    try:
        yield
    except UnicodeEncodeError:  # of what is to be written
        raise
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"its schema is damaged ({error.reason})") from error
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise sqlite3.DatabaseError(
            f"a row has other values than were written ({error})"
        ) from error


def row_checksum(row: Sequence[Any]) -> int:
    """Compute the checksum of a row; of a blob's row, of all but its last use."""
    return int(crc32c(repr((*row[:7], *row[8:])).encode("utf-8", "surrogateescape")))


def with_checksum(name: str, value: str) -> str:
    """Put the checksum of a named value behind it."""
    return f"{value} {crc32c(f'{name} {value}'.encode()):08x}"


def whole(value: object) -> int:
    """Return a number as it was written. Raises sqlite3.DatabaseError for anything else."""
    if not isinstance(value, int) or value < 0:
        raise sqlite3.DatabaseError(f"{value!r} stands where a number was written")
    return value
