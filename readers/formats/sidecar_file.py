"""Verify the checksum of a sidecar's file and read its columns strictly, for any format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from penstock.cache import CorruptShardError, IndexChangedError, ReadError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.files import (
    BROKEN,
    Columns,
    are_unsafe,
    map_buffer,
    only_batch,
    printable,
    read_buffer,
)
from penstock.readers.formats.local_files import REINDEX

if TYPE_CHECKING:
    from collections.abc import Sequence


def sidecar_etag(path: bytes) -> str:
    """The checksum of a sidecar's file, as a manifest notes it. Raises ReadError."""
    try:
        return _etag(map_buffer(path))
    except OSError as error:
        raise read_error(printable(path), error) from error


def _etag(buffer: Any) -> str:
    return f"crc32c-{crc32c(buffer):08x}"


def is_sidecar(path: bytes, etag: str) -> bool:
    """Whether a file is what the manifest promises. Raises OSError."""
    try:
        return _etag(read_buffer(path)) == etag
    except ValueError:  # empty
        return False


def sidecar_batch(path: bytes, columns: Columns, *, etag: str, url: str | None = None) -> Any:
    """Read a sidecar's columns; raises as `read_sidecar` does."""
    try:
        buffer = read_buffer(path)  # not mapped: what is checked here is what is used
        if _etag(buffer) != etag:
            raise ValueError("its checksum isn't what the manifest promises")
        return only_batch(buffer, columns)
    except FileNotFoundError:
        raise IndexChangedError(
            f"{url or printable(path)}: part of the index is gone; it was rebuilt while this "
            f"dataset was open, or deleted. Open the dataset again. If that doesn't help: {REINDEX}"
        ) from None
    except BROKEN as error:
        raise torn_sidecar_error(path, error, url) from error


def torn_sidecar_error(
    path: bytes, error: Exception, url: str | None = None
) -> CorruptShardError | ReadError:
    """The error for a sidecar that can't be read."""
    if machine_remedy(error) is not None:
        return read_error(printable(path), error)
    return CorruptShardError(
        f"{url or printable(path)}: this part of the index is torn ({error}). {REINDEX}"
    )


def check_names(names: Sequence[bytes]) -> None:
    """Whether all are paths below the dataset's folder, at least one. Raises ValueError."""
    if not names or are_unsafe(names):
        raise ValueError("a file's name isn't a path below the dataset")
