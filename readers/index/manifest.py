"""The manifest of an index: one row a shard, and what is true of them all.

The same value describes foreign data (rows name sidecars) and a pack (rows name shard files).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import are_unsafe
from penstock.readers.formats.format import ShardEntry
from penstock.readers.formats.limits import (
    MAX_BYTES,
    MAX_SAMPLES,
    MAX_SHARD_BYTES,
    MAX_SHARD_SAMPLES,
)
from penstock.readers.formats.registry import format_named
from penstock.readers.formats.summary import ShardSummary, Sums, join_summaries
from penstock.readers.index.about import About
from penstock.readers.index.sidecar_names import is_sidecar_name
from penstock.readers.index.totals import fingerprint, label_correlation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.schema import Schema
    from penstock.readers.formats.format import Format

NAMES_AT_ONCE = 2**14
"""Names that are looked at together: few enough to cost no memory, many enough to be quick."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """What an index says, by shard.

    names: files of the shards or sidecars; etags: checksums of the sidecars, "" for packs. units:
    rows of each shard's decode units, little-endian uint32; empty where a sample can be had alone.
    field_bytes: to read each field of a shard of chunks, little-endian uint32, or uint64 where one
    takes it; None of other formats.
    shard_bytes, samples, files (that a shard's samples lie in): int64; crc32c, columns_crc32c: see
    `Sums`, uint32; all of shape (shards,)."""

    about: About
    names: Sequence[bytes]
    etags: Sequence[str]
    shard_bytes: NDArray[np.int64]
    samples: NDArray[np.int64]
    files: NDArray[np.int64]
    units: Sequence[bytes]
    crc32c: NDArray[np.uint32]
    columns_crc32c: NDArray[np.uint32]
    field_bytes: Sequence[bytes] | None = None

    @property
    def is_of_chunks(self) -> bool:
        """Whether samples lie in chunks, which metadata tell of."""
        return self.field_bytes is not None

    @property
    def format(self) -> Format:
        """The format that the dataset is of."""
        return format_named(self.about.kind)

    def sums(self, shard: int) -> Sums:
        """The checksums of one shard."""
        return Sums(int(self.crc32c[shard]), int(self.columns_crc32c[shard]))

    def units_of(self, shard: int) -> NDArray[np.int64]:
        """Rows of each decode unit of a shard, int64, shape (units,); empty where a sample can be
        had alone."""
        return np.frombuffer(self.units[shard], "<u4").astype(np.int64)

    def bytes_of(self, fields: Iterable[str]) -> NDArray[np.int64]:
        """To read these fields of each shard of chunks: int64, shape (shards,)."""
        names, wanted = list(self.about.schema), set(fields)
        chosen = np.array([name in wanted for name in names], np.int64)
        rows = (_numbers(row, len(names)) @ chosen for row in self.field_bytes or ())
        return np.fromiter(rows, np.int64, len(self.names))

    def entry(self, shard: int, fields: tuple[str, ...] = ()) -> ShardEntry:
        """What is said of one shard. fields: see there."""
        return ShardEntry(
            name=self.names[shard],
            size_bytes=int(self.shard_bytes[shard]),
            samples=int(self.samples[shard]),
            sums=self.sums(shard),
            layout=self.about.layout,
            overhead_bytes=self.about.overhead_bytes,
            fields=fields,
        )


def join_manifest(
    names: Sequence[bytes],
    shards: Sequence[ShardSummary],
    *,
    kind: str,
    schema: Schema,
    quarantined: int,
    etags: Sequence[str] | None = None,
    **more: Any,
) -> Manifest:
    """Sum up shards, at least one, in their order. schema: settled; more: further fields of About.
    Raises DatasetError for more than a manifest may say."""
    labels = [s.labels for s in shards if s.labels is not None]
    overheads = [s.overhead_bytes for s in shards if s.overhead_bytes is not None]
    samples = np.array([s.samples for s in shards], np.int64)
    crcs = np.array([s.sums.samples for s in shards], np.uint32)
    columns_crcs = np.array([s.sums.columns for s in shards], np.uint32)
    about = About(
        kind=kind,
        schema=schema,
        fields={name: join_summaries([s.fields[name] for s in shards]) for name in schema},
        samples=int(samples.sum()),
        fingerprint=fingerprint(
            schema=schema, samples=samples, crcs=crcs, columns_crcs=columns_crcs
        ),
        icc=label_correlation(labels) if labels else None,
        quarantined=quarantined,
        overhead_bytes=max(overheads) if len(overheads) == len(shards) else None,
        **more,
    )
    manifest = Manifest(
        about=about,
        names=names,
        etags=etags if etags is not None else [""] * len(names),
        shard_bytes=np.array([s.size_bytes for s in shards], np.int64),
        samples=samples,
        files=np.array([s.files for s in shards], np.int64),
        units=[np.array(s.units, "<u4").tobytes() for s in shards],
        crc32c=crcs,
        columns_crc32c=columns_crcs,
        field_bytes=_field_bytes(shards),
    )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise DatasetError(
            f"{about.source or 'The dataset'}: {error}. Use smaller shards or tar files, or "
            "several datasets."
        ) from error
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Whether shards can be what the manifest says. Raises ValueError."""
    about, samples, sizes = manifest.about, manifest.samples, manifest.shard_bytes
    if not len(samples):
        raise ValueError("it has no shards")
    _bounded("samples", samples, MAX_SHARD_SAMPLES)
    format = manifest.format
    # A shard whose samples are all noted lies in no file; chunks may be left out as fill values.
    has_files = manifest.files > 0 if format.indexing is not None else np.ones(len(samples), bool)
    _bounded("bytes", sizes[has_files] + manifest.is_of_chunks, MAX_SHARD_BYTES)
    _bounded("files", manifest.files[has_files], MAX_SHARD_SAMPLES)
    _bounded("bytes", sizes[~has_files] + 1, 1)
    _bounded("files", manifest.files[~has_files] + 1, 1)
    least = format.least_sample_bytes
    if least and (sizes[has_files] // least < samples[has_files]).any():
        raise ValueError("a shard has more samples than its bytes can hold")
    if float(sizes.sum(dtype=np.float64)) > MAX_BYTES:
        raise ValueError(f"its shards have more than {MAX_BYTES:,} bytes in all")
    total = int(samples.sum())  # no overflow: 2^24 a shard, and 2^30 bytes of shards
    if total != about.samples or total > MAX_SAMPLES:
        raise ValueError(
            f"its shards have {total:,} samples and it says {about.samples:,}, wanted as many and "
            f"at most {MAX_SAMPLES:,}"
        )
    if manifest.is_of_chunks != about.is_of_chunks:
        raise ValueError("it tells the bytes of fields of what lies in no chunks, or the reverse")
    seen: set[bytes] = set()
    for start in range(0, len(samples), NAMES_AT_ONCE):
        names = manifest.names[start : start + NAMES_AT_ONCE]
        _check_units(manifest, start)
        _check_field_bytes(manifest, start)
        if are_unsafe(names):
            raise ValueError("a shard's name isn't a path below the dataset")
        if format.indexing is not None and not all(map(is_sidecar_name, names)):
            raise ValueError("a name isn't a sidecar's")
        seen.update(names)
    if len(seen) != len(samples):
        raise ValueError("two shards have one name")


def _bounded(what: str, column: NDArray[np.int64], most: int) -> None:
    if not len(column):
        return
    least, largest = int(column.min()), int(column.max())
    if least < 1 or largest > most:
        wrong = least if least < 1 else largest
        raise ValueError(f"a shard has {wrong:,} {what}, wanted 1 to {most:,}")


def _field_bytes(shards: Sequence[ShardSummary]) -> list[bytes] | None:
    if not any(each.field_bytes for each in shards):
        return None
    return [
        np.array(each.field_bytes, "<u8" if max(each.field_bytes) >= 2**32 else "<u4").tobytes()
        for each in shards
    ]


def _numbers(row: bytes, fields: int) -> NDArray[np.int64]:
    """The bytes of each field of one shard. Raises ValueError."""
    if len(row) not in (4 * fields, 8 * fields):
        raise ValueError("it doesn't tell the bytes of each field")
    return np.frombuffer(row, "<u8" if len(row) == 8 * fields else "<u4").astype(np.int64)


def _check_field_bytes(manifest: Manifest, start: int) -> None:
    """Whether the fields of some shards have the shards' bytes. Raises ValueError."""
    if manifest.field_bytes is None:
        return
    fields = len(manifest.about.schema)
    for place, row in enumerate(manifest.field_bytes[start : start + NAMES_AT_ONCE], start):
        each = _numbers(row, fields)
        if each.min() < 0 or sum(each.tolist()) != int(manifest.shard_bytes[place]):
            raise ValueError("the bytes of a shard's fields aren't the shard's")


def _check_units(manifest: Manifest, start: int) -> None:
    """Whether some shards' decode units hold their samples. Raises ValueError."""
    for place, units in enumerate(manifest.units[start : start + NAMES_AT_ONCE], start):
        if not units:
            continue
        rows = manifest.units_of(place)
        if int(rows.min()) < 1 or int(rows.sum()) != int(manifest.samples[place]):
            raise ValueError("a shard's decode units don't hold its samples")
