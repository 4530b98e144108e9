"""Write and read the file of a manifest, an Arrow table of shards.

The facts that hold for all shards are JSON in the table's metadata. The file is memory-mapped and
O(shards). It contains a checksum of itself, because a flipped bit would silently change the
dataset.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import stat
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import CorruptShardError, MissingDependencyError, OtherVersionError, ReadError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.files import (
    BROKEN,
    LazyColumn,
    map_buffer,
    metadata,
    only_batch,
    printable,
    read_buffer,
    write_batch,
)
from penstock.readers.formats import VERSION
from penstock.readers.index.manifest import (
    NAMES_AT_ONCE,
    Manifest,
    check_header,
    check_manifest,
    load_header,
)
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.origin import Entry, Origin

MANIFEST = b"manifest.arrow"
"""The name of the manifest in the index's folder."""

_ROOT, _SUM = b"penstock", b"penstock.crc32c"
_SUMMED = ("bytes", "samples", "files", "crc32c", "columns_crc32c")
COLUMNS = {
    "uri": "binary",
    "etag": "string",
    "bytes": "int64",
    "samples": "int64",
    "files": "int64",
    "units": "binary",
    "crc32c": "uint32",
    "columns_crc32c": "uint32",
}
"""The Arrow type of each column, in order."""
OF_CHUNKS = {"field_bytes": "binary"}
"""Additional columns for data in chunks."""

# A manifest has 112 bytes per shard and the names of the listed folders.
_MAX_MAPPED_BYTES, MAX_READ_BYTES = 2**30, 2**27
_PACKS, _MAX_SOURCE = ("pack", "arrow"), 1000  # the names of their format in manifests of packs
_VERSION_TEXT = re.compile(rb'"version": \d+')


def write_manifest(path: bytes, manifest: Manifest) -> None:
    """Write a manifest atomically. Raises WriteError."""
    from penstock.readers.files import write_whole  # readers of datasets need none of it

    columns = {
        "uri": pa.array(list(manifest.names), pa.binary()),
        "etag": pa.array(list(manifest.etags), pa.string()),
        "bytes": pa.array(manifest.shard_bytes, pa.int64()),
        "samples": pa.array(manifest.samples, pa.int64()),
        "files": pa.array(manifest.files, pa.int64()),
        "units": pa.array(list(manifest.units), pa.binary()),
        "crc32c": pa.array(manifest.crc32c, pa.uint32()),
        "columns_crc32c": pa.array(manifest.columns_crc32c, pa.uint32()),
    }
    if manifest.field_bytes is not None:
        columns["field_bytes"] = pa.array(list(manifest.field_bytes), pa.binary())
    about = {"version": VERSION, "penstock": __version__, **manifest.about.to_json()}
    text = json.dumps(about, sort_keys=True).encode("ascii")
    batch = pa.record_batch(columns)
    metadata = {_ROOT: text, _SUM: f"{_checksum(text, batch):08x}".encode()}
    write_whole(path, lambda temp: write_batch(temp, batch.replace_schema_metadata(metadata)))


def read_manifest(
    path: bytes, *, remedy: str, mapped: bool = True, url: str | None = None
) -> Manifest:
    """Read a manifest. remedy: the advice in an error's message. url: the remote object that this
    file is a copy of, or None. mapped: False reads the file into memory. This is for a cache's
    file: pyarrow ends the process if the offsets in mapped memory change, so a bit flip on disk
    must not reach it.

    Raises CorruptShardError if the file is incomplete, damaged or contains impossible values,
    OtherVersionError, FileNotFoundError.
    """
    try:
        status, max_bytes = os.stat(path), _MAX_MAPPED_BYTES if mapped else MAX_READ_BYTES
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it isn't a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it has {status.st_size:,} bytes, wanted at most {max_bytes:,}")
        buffer = map_buffer(path) if mapped else read_buffer(path)
        noted = metadata(buffer)
        text = noted[_ROOT]
        values = load_header(text)
        form = values.pop("version")
        if type(form) is not int:
            raise ValueError("its version isn't a number")
        by = str(values.get("penstock"))[:40]
    except FileNotFoundError:
        raise
    except BROKEN as error:
        raise _damaged(path, url, error, remedy) from error
    if form != VERSION and not _was_ours(buffer, text, noted.get(_SUM)):
        raise _other_version(url or printable(path), form, by, _remake(values) or remedy)
    try:
        if form != VERSION:
            raise ValueError("its version was changed")
        batch = only_batch(buffer, COLUMNS | OF_CHUNKS, optional=frozenset(OF_CHUNKS))
        if int(noted[_SUM], 16) != _checksum(text, batch):
            raise ValueError("its checksum is wrong")
        manifest = Manifest(
            about=check_header(values),
            names=LazyColumn(batch.column("uri")),
            etags=LazyColumn(batch.column("etag")),
            shard_bytes=batch.column("bytes").to_numpy(),
            samples=batch.column("samples").to_numpy(),
            files=batch.column("files").to_numpy(),
            units=LazyColumn(batch.column("units")),
            crc32c=batch.column("crc32c").to_numpy(),
            columns_crc32c=batch.column("columns_crc32c").to_numpy(),
            field_bytes=(
                LazyColumn(batch.column("field_bytes"))
                if "field_bytes" in batch.schema.names
                else None
            ),
        )
        check_manifest(manifest)
        return manifest
    except MissingDependencyError as error:  # a field of a type that isn't installed
        raise MissingDependencyError(f"{url or printable(path)}: {error}") from error
    except BROKEN as error:
        raise _damaged(path, url, error, remedy) from error


def read_manifest_of(origin: Origin, entry: Entry, *, remedy: str) -> Manifest:
    """Read a manifest. A damaged copy in the cache is fetched once more."""
    name, size_bytes, version = entry.name, entry.size_bytes, entry.version
    url = None if origin.is_local else f"{origin.url.rstrip('/')}/{printable(name)}"

    def read() -> Manifest:
        path = origin.file(name, size_bytes=size_bytes, version=version)
        return read_manifest(path, remedy=remedy, mapped=origin.is_local, url=url)

    try:
        return read()
    except (CorruptShardError, FileNotFoundError):  # removed since it was fetched
        if not origin.drop(name, size_bytes=size_bytes, version=version):
            raise
        return read()


def _remake(values: Mapping[str, Any]) -> str | None:
    """Return the command that makes a pack again, if its source is known."""
    source = values.get("source")
    if values.get("kind") not in _PACKS or not isinstance(source, str):
        return None
    if not 0 < len(source) <= _MAX_SOURCE:
        return None
    shown = shlex.quote(printable(os.fsencode(source)))
    return f"Pack its source again: penstock pack {shown} DST"


def _other_version(shown: str, form: int, by: str, remedy: str) -> OtherVersionError:
    if form > VERSION:
        return OtherVersionError(
            f"{shown}: written by Penstock {by!r} in format {form}, which is newer than this "
            f"version reads (wanted {VERSION}). Upgrade penstock, or: {remedy}"
        )
    return OtherVersionError(
        f"{shown}: written by an earlier Penstock ({by!r}, format {form}); this version reads "
        f"format {VERSION} only. {remedy}"
    )


def _was_ours(buffer: Any, text: bytes, checksum: bytes | None) -> bool:
    """Return True if flipped bits changed the version number: the checksum is right with our
    version, and wrong with theirs."""
    try:
        batch = only_batch(buffer, COLUMNS | OF_CHUNKS, optional=frozenset(OF_CHUNKS))
        wanted = int(checksum or b"", 16)
    except BROKEN:
        return False
    ours = _VERSION_TEXT.sub(b'"version": %d' % VERSION, text)
    return _checksum(text, batch) != wanted == _checksum(ours, batch)


def _damaged(
    path: bytes, url: str | None, error: Exception, remedy: str
) -> CorruptShardError | ReadError:
    if machine_remedy(error) is not None:
        return read_error(printable(path), error)
    if url is not None and _is_web_page(path):
        return CorruptShardError(
            f"{url}: the server sent a web page, wanted a manifest. Servers send one if a login is "
            "needed, and some send one for any path. Open the URL in a browser, and check the URL "
            "and the login in storage_options."
        )
    return CorruptShardError(
        f"{url or printable(path)}: not a valid manifest ({error}). It is incomplete or was "
        f"changed. {remedy}"
    )


def _is_web_page(path: bytes) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(1000).lstrip().lower().startswith((b"<!doctype html", b"<html"))
    return False


def _checksum(text: bytes, batch: Any) -> int:
    total = crc32c(text)
    for name in _SUMMED:
        total = crc32c(np.ascontiguousarray(batch.column(name).to_numpy()), total)
    for name in ("uri", "etag", "units", *OF_CHUNKS.keys() & {*batch.schema.names}):
        total = _sum_names(batch.column(name), total)
    return int(total)


def _sum_names(column: Any, total: int) -> int:
    """Continue a CRC over all names joined by NUL, some at a time."""
    for start in range(0, len(column), NAMES_AT_ONCE):
        some = column[start : start + NAMES_AT_ONCE].to_pylist()
        some = [each.encode() if isinstance(each, str) else each for each in some]
        total = int(crc32c((b"\0" if start else b"") + b"\0".join(some), total))
    return total
