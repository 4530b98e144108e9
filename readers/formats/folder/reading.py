"""Reading tables and other small files of a folder whole, before an index is built."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError
from penstock.readers.fields.rows import MAX_TABLE_BYTES
from penstock.readers.files.names import printable, unsafe_reason
from penstock.readers.formats.local_files import changed, unreadable
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.origin.origin import Entry, Origin

_AT_ONCE = 4096


def read_whole(origin: Origin, files: Sequence[Entry]) -> list[bytes]:
    """The bytes of files that a listing named, of remote ones many at once and kept nowhere.

    Raises IndexChangedError (another size since it was listed), DatasetError, FetchError.
    """
    if isinstance(origin, RemoteFolder):
        found: list[bytes] = []
        for first in range(0, len(files), _AT_ONCE):
            some = files[first : first + _AT_ONCE]
            found += (bytes(data) for data in origin.read([(f, f.size_bytes) for f in some]))
        return found
    if isinstance(origin, LocalFolder):
        return [_read(os.path.join(origin.root, file.name), file) for file in files]
    raise TypeError(f"unknown origin {origin!r}")


def manifest_entry(origin: Origin) -> Entry:
    """The table that the user names, as a listing says it; its name is an absolute path where it
    lies on this machine and not below the dataset's root. Raises ConfigError, FetchError."""
    told = origin.arrangement.manifest
    assert told
    path = origin.arrangement.local_manifest()
    name = os.fsencode(told)
    if path is None and (reason := unsafe_reason(name)) is not None:
        raise ConfigError(f"manifest: got {told!r}: {reason}. Give a name below {origin.url}.")
    here = origin if path is None else LocalFolder(b"/")
    entry = here.entry(name)
    if entry is None:
        raise ConfigError(
            f"manifest: there is no file {printable(name)}"
            + ("." if path else f" below {origin.url}. Of this machine give its full path.")
        )
    if entry.size_bytes > MAX_TABLE_BYTES:
        raise ConfigError(
            f"manifest: {printable(name)} has {entry.size_bytes:,} bytes, wanted at most "
            f"{MAX_TABLE_BYTES:,}. Split the dataset, or put the values into tar files."
        )
    return entry


def read_manifest(origin: Origin, entry: Entry) -> bytes:
    """The bytes of that table; raises as `read_whole` does."""
    if os.path.isabs(entry.name):
        return _read(entry.name, entry)
    return read_whole(origin, [entry])[0]


def _read(path: bytes, file: Entry) -> bytes:
    try:
        with open(path, "rb") as opened:
            data = opened.read(file.size_bytes + 1)
    except FileNotFoundError:
        raise changed(file.name, "it is gone") from None
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) != file.size_bytes:
        raise changed(file.name, f"it had {file.size_bytes} bytes and has another number")
    return data
