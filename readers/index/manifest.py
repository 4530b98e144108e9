"""The manifest of an index: one Arrow table of shards and what is true of them all, as JSON beside
it.

The same file describes a folder (rows name sidecars) and a pack (rows name shard files). It is
memory-mapped and O(shards), and carries a checksum of itself: a bit that flips in it would be a
wrong dataset.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache.errors import CorruptShardError, DatasetError
from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import metadata, only_batch, write_batch
from penstock.readers.files.names import are_unsafe, printable
from penstock.readers.files.pages import BROKEN, map_buffer
from penstock.readers.formats.format import ShardEntry
from penstock.readers.formats.limits import (
    MAX_BYTES,
    MAX_SAMPLES,
    MAX_SHARD_BYTES,
    MAX_SHARD_SAMPLES,
    VERSION,
)
from penstock.readers.formats.registry import format_named
from penstock.readers.formats.summary import ShardSummary, Sums
from penstock.readers.index.about import About, check_about, load_values
from penstock.readers.index.sidecar_names import is_sidecar_name
from penstock.readers.index.totals import fingerprint, join_ranges, label_correlation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.formats.format import Format

MANIFEST = b"manifest.arrow"
_ROOT, _SUM = b"penstock", b"penstock.crc32c"
_SUMMED = ("bytes", "samples", "crc32c", "columns_crc32c")
COLUMNS = {
    "uri": "binary",
    "etag": "string",
    "bytes": "int64",
    "samples": "int64",
    "crc32c": "uint32",
    "columns_crc32c": "uint32",
}

# What a manifest takes: 112 bytes a shard and the names of the folders that were listed.
_MAX_MAPPED_BYTES, MAX_READ_BYTES = 2**30, 2**27
_NAMES_AT_ONCE = 2**14
_VERSION_TEXT = re.compile(rb'"version": \d+')


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """names: files of the shards or sidecars; etags: checksums of the sidecars, "" for packs.
    shard_bytes, samples: int64, crc32c: of the shard's sample CRCs as little-endian uint32,
    columns_crc32c: of its little-endian int64 (0 without labels), uint32; all of shape
    (shards,)."""

    about: About
    names: Sequence[bytes]
    etags: Sequence[str]
    shard_bytes: NDArray[np.int64]
    samples: NDArray[np.int64]
    crc32c: NDArray[np.uint32]
    columns_crc32c: NDArray[np.uint32]

    @property
    def format(self) -> Format:
        """That the dataset is of."""
        return format_named(self.about.kind)

    def sums(self, shard: int) -> Sums:
        """Checksums of one shard."""
        return Sums(int(self.crc32c[shard]), int(self.columns_crc32c[shard]))

    def entry(self, shard: int) -> ShardEntry:
        """What is said of one shard."""
        return ShardEntry(
            name=self.names[shard],
            size_bytes=int(self.shard_bytes[shard]),
            samples=int(self.samples[shard]),
            sums=self.sums(shard),
            overhead_bytes=self.about.overhead_bytes,
        )


def join_manifest(
    names: Sequence[bytes],
    shards: Sequence[ShardSummary],
    *,
    kind: str,
    classes: tuple[str, ...],
    quarantined: int,
    etags: Sequence[str] | None = None,
    **more: Any,
) -> Manifest:
    """Sum up shards, at least one, in their order. more: further fields of About. Raises
    DatasetError for more than a manifest may say."""
    labels = [s.labels for s in shards if s.labels is not None]
    fields = ("image", "label") if labels else ("image",)
    overheads = [s.overhead_bytes for s in shards if s.overhead_bytes is not None]
    samples = np.array([s.samples for s in shards], np.int64)
    crcs = np.array([s.sums.samples for s in shards], np.uint32)
    columns_crcs = np.array([s.sums.columns for s in shards], np.uint32)
    about = About(
        kind=kind,
        fields=fields,
        classes=classes,
        samples=int(samples.sum()),
        fingerprint=fingerprint(
            classes=classes, fields=fields, samples=samples, crcs=crcs, columns_crcs=columns_crcs
        ),
        icc=label_correlation(labels) if labels else None,
        images=join_ranges([s.images for s in shards]),
        channels=tuple(sorted({c for s in shards for c in s.channels})),
        codecs=tuple(sorted({c for s in shards for c in s.codecs})),
        quarantined=quarantined,
        progressive=_total([s.progressive for s in shards]),
        overhead_bytes=max(overheads) if len(overheads) == len(shards) else None,
        **more,
    )
    manifest = Manifest(
        about=about,
        names=names,
        etags=etags if etags is not None else [""] * len(names),
        shard_bytes=np.array([s.size_bytes for s in shards], np.int64),
        samples=samples,
        crc32c=crcs,
        columns_crc32c=columns_crcs,
    )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise DatasetError(
            f"{about.source or 'The dataset'}: {error}. Use smaller shards or tar files, or "
            "several datasets."
        ) from error
    return manifest


def _total(counts: Sequence[int | None]) -> int | None:
    counted = [count for count in counts if count is not None]
    return sum(counted) if len(counted) == len(counts) else None


class _Column(Sequence[Any]):
    """Values of a mapped column, decoded one at a time: 10^6 shards cost no memory."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, i: Any) -> Any:
        found = self._column[i]
        return found.to_pylist() if isinstance(i, slice) else found.as_py()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._column.to_pylist())


def write_manifest(path: bytes, manifest: Manifest) -> None:
    """Write a manifest whole. Raises WriteError."""
    columns = {
        "uri": pa.array(list(manifest.names), pa.binary()),
        "etag": pa.array(list(manifest.etags), pa.string()),
        "bytes": pa.array(manifest.shard_bytes, pa.int64()),
        "samples": pa.array(manifest.samples, pa.int64()),
        "crc32c": pa.array(manifest.crc32c, pa.uint32()),
        "columns_crc32c": pa.array(manifest.columns_crc32c, pa.uint32()),
    }
    about = {"version": VERSION, "penstock": _own_version(), **asdict(manifest.about)}
    text = json.dumps(about, sort_keys=True).encode("ascii")
    batch = pa.record_batch(columns)
    metadata = {_ROOT: text, _SUM: f"{_checksum(text, batch):08x}".encode()}
    write_whole(path, lambda temp: write_batch(temp, batch.replace_schema_metadata(metadata)))


def read_manifest(path: bytes, *, remedy: str, mapped: bool = True) -> Manifest:
    """Map a manifest. remedy: what to do where it can't be read, for the message. mapped: False
    reads it into memory: pyarrow ends the process over offsets that change under it, and a bit
    that turns in a cache's file must not do that.

    Raises CorruptShardError (torn, damaged, or it says what can't be), DatasetError (a newer
    version), FileNotFoundError.
    """
    try:
        _check_file(path, _MAX_MAPPED_BYTES if mapped else MAX_READ_BYTES)
        buffer = map_buffer(path) if mapped else _read(path)
        noted = metadata(buffer)
        text = noted[_ROOT]
        values = load_values(text)
        form = values.pop("version")
        if type(form) is not int:
            raise ValueError("its version isn't a number")
        by = str(values.get("penstock"))[:40]
    except FileNotFoundError:
        raise
    except BROKEN as error:
        raise _damaged(path, error, remedy) from error
    if form > VERSION and not _was_ours(buffer, text, noted.get(_SUM)):
        raise DatasetError(
            f"{printable(path)}: written by Penstock {by!r}, in a format newer than this one reads "
            f"(wanted {VERSION}). Upgrade penstock, or: {remedy}"
        )
    try:
        if form > VERSION:
            raise ValueError("its version was changed")
        batch = only_batch(buffer, COLUMNS)
        if int(noted[_SUM], 16) != _checksum(text, batch):
            raise ValueError("its checksum is wrong")
        manifest = Manifest(
            about=check_about(values),
            names=_Column(batch.column("uri")),
            etags=_Column(batch.column("etag")),
            shard_bytes=batch.column("bytes").to_numpy(),
            samples=batch.column("samples").to_numpy(),
            crc32c=batch.column("crc32c").to_numpy(),
            columns_crc32c=batch.column("columns_crc32c").to_numpy(),
        )
        check_manifest(manifest)
        return manifest
    except BROKEN as error:
        raise _damaged(path, error, remedy) from error


def _was_ours(buffer: Any, text: bytes, checksum: bytes | None) -> bool:
    """Whether a newer version's number came of bits that turned: with ours the checksum is right,
    and with theirs it isn't."""
    try:
        batch, wanted = only_batch(buffer, COLUMNS), int(checksum or b"", 16)
    except BROKEN:
        return False
    ours = _VERSION_TEXT.sub(b'"version": %d' % VERSION, text)
    return _checksum(text, batch) != wanted == _checksum(ours, batch)


def check_manifest(manifest: Manifest) -> None:
    """Whether shards can be what the manifest says. Raises ValueError."""
    about, samples, sizes = manifest.about, manifest.samples, manifest.shard_bytes
    if not len(samples):
        raise ValueError("it has no shards")
    _bounded("samples", samples, MAX_SHARD_SAMPLES)
    _bounded("bytes", sizes, MAX_SHARD_BYTES)
    format = manifest.format
    if (sizes // format.least_sample_bytes < samples).any():
        raise ValueError("a shard has more samples than its bytes can hold")
    if float(sizes.sum(dtype=np.float64)) > MAX_BYTES:
        raise ValueError(f"its shards have more than {MAX_BYTES:,} bytes in all")
    total = int(samples.sum())  # no overflow: 2^24 a shard, and 2^30 bytes of shards
    if total != about.samples or total > MAX_SAMPLES:
        raise ValueError(
            f"its shards have {total:,} samples and it says {about.samples:,}, wanted as many and "
            f"at most {MAX_SAMPLES:,}"
        )
    seen: set[bytes] = set()
    for start in range(0, len(samples), _NAMES_AT_ONCE):
        names = manifest.names[start : start + _NAMES_AT_ONCE]
        if are_unsafe(names):
            raise ValueError("a shard's name isn't a path below the dataset")
        if format.indexing is not None and not all(map(is_sidecar_name, names)):
            raise ValueError("a name isn't a sidecar's")
        seen.update(names)
    if len(seen) != len(samples):
        raise ValueError("two shards have one name")


def _bounded(what: str, column: NDArray[np.int64], most: int) -> None:
    least, largest = int(column.min()), int(column.max())
    if least < 1 or largest > most:
        wrong = least if least < 1 else largest
        raise ValueError(f"a shard has {wrong:,} {what}, wanted 1 to {most:,}")


def _check_file(path: bytes, most: int) -> None:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it isn't a regular file")
    if found.st_size > most:
        raise ValueError(f"it has {found.st_size:,} bytes, wanted at most {most:,}")


def _read(path: bytes) -> Any:
    with open(path, "rb") as file:
        return pa.py_buffer(file.read())


def _damaged(path: bytes, error: Exception, remedy: str) -> CorruptShardError:
    return CorruptShardError(
        f"{printable(path)}: not a whole manifest ({error}). It is torn or was changed. {remedy}"
    )


def _checksum(text: bytes, batch: Any) -> int:
    total = crc32c(text)
    for name in _SUMMED:
        total = crc32c(np.ascontiguousarray(batch.column(name).to_numpy()), total)
    return _sum_names(batch.column("etag"), _sum_names(batch.column("uri"), total))


def _sum_names(column: Any, total: int) -> int:
    """As of all of them joined by NUL, some at a time."""
    for start in range(0, len(column), _NAMES_AT_ONCE):
        some = column[start : start + _NAMES_AT_ONCE].to_pylist()
        some = [each.encode() if isinstance(each, str) else each for each in some]
        total = int(crc32c((b"\0" if start else b"") + b"\0".join(some), total))
    return total


def _own_version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # run from a checkout that isn't installed
        return "unknown"
