"""The manifest of an index: one Arrow table of shards and what is true of them all, as JSON beside
it.

The same file describes a folder (rows name sidecars) and a pack (rows name shard files). It is
memory-mapped and O(shards), and carries a checksum of itself: a bit that flips in it would be a
wrong dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from cache.errors import CorruptShardError, DatasetError
from readers.atomic import write_whole
from readers.facts import ShardFacts, Sums, fingerprint, join_ranges, label_correlation
from readers.names import printable
from readers.pages import BROKEN, map_buffer
from readers.types import ImageRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = 1
"""Version of manifest, sidecar and shard. A reader refuses a higher one."""

MANIFEST = b"manifest.arrow"
_ROOT, _SUM = b"penstock", b"penstock.crc32c"
_COLUMNS = ("bytes", "samples", "crc32c", "columns_crc32c")

Kind = Literal["folder", "tar", "arrow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is true of all shards; the JSON part of a manifest.

    classes: names by label; images: bounds over all samples; icc: see `readers.facts`; source: URL
    of what a pack was made from; settings: what a pack was asked to be; directories: name and
    modification time in ns of each listed folder (local folders); listing: fingerprint of what an
    index was built over, hex; passed_over: members of tar files that are no part of a sample, by
    extension; progressive: JPEGs of that kind, None where nobody counted.
    """

    kind: Kind
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    samples: int
    fingerprint: str
    icc: float | None
    images: ImageRange
    channels: tuple[int, ...]
    codecs: tuple[str, ...]
    quarantined: int
    shuffled: bool = False
    seed: int | None = None
    source: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    directories: tuple[tuple[str, int], ...] = ()
    listing: str = ""
    passed_over: dict[str, int] = field(default_factory=dict)
    progressive: int | None = None


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

    def sums(self, shard: int) -> Sums:
        """Checksums of one shard."""
        return Sums(int(self.crc32c[shard]), int(self.columns_crc32c[shard]))


def join_manifest(
    names: Sequence[bytes],
    facts: Sequence[ShardFacts],
    *,
    kind: Kind,
    classes: tuple[str, ...],
    quarantined: int,
    etags: Sequence[str] | None = None,
    **more: Any,
) -> Manifest:
    """Sum up shards, at least one, in their order. more: further fields of About."""
    labels = [f.labels for f in facts if f.labels is not None]
    fields = ("image", "label") if labels else ("image",)
    samples = np.array([f.samples for f in facts], np.int64)
    crcs = np.array([f.sums.samples for f in facts], np.uint32)
    columns_crcs = np.array([f.sums.columns for f in facts], np.uint32)
    about = About(
        kind=kind,
        fields=fields,
        classes=classes,
        samples=int(samples.sum()),
        fingerprint=fingerprint(
            classes=classes, fields=fields, samples=samples, crcs=crcs, columns_crcs=columns_crcs
        ),
        icc=label_correlation(labels) if labels else None,
        images=join_ranges([f.images for f in facts]),
        channels=tuple(sorted({c for f in facts for c in f.channels})),
        codecs=tuple(sorted({c for f in facts for c in f.codecs})),
        quarantined=quarantined,
        progressive=_total([f.progressive for f in facts]),
        **more,
    )
    return Manifest(
        about=about,
        names=names,
        etags=etags if etags is not None else [""] * len(names),
        shard_bytes=np.array([f.size_bytes for f in facts], np.int64),
        samples=samples,
        crc32c=crcs,
        columns_crc32c=columns_crcs,
    )


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


class _Column(Sequence[Any]):
    """Values of a mapped column, decoded one at a time: 10^6 shards cost no memory."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, i: Any) -> Any:
        return self._column[i].as_py()

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
    about = {"version": FORMAT, "penstock": _own_version(), **asdict(manifest.about)}
    text = json.dumps(about, sort_keys=True).encode("ascii")
    batch = pa.record_batch(columns)
    metadata = {_ROOT: text, _SUM: f"{_checksum(text, batch):08x}".encode()}
    write_whole(path, lambda temp: write_batch(temp, batch.replace_schema_metadata(metadata)))


def read_manifest(path: bytes, *, remedy: str, mapped: bool = True) -> Manifest:
    """Map a manifest. remedy: what to do where it can't be read, for the message. mapped: False
    reads it into memory: pyarrow ends the process over offsets that change under it, and a bit
    that turns in a cache's file must not do that.

    Raises CorruptShardError (torn or damaged), DatasetError (a newer version), FileNotFoundError.
    """
    try:
        batch = only_batch(map_buffer(path) if mapped else _read(path))
        text = batch.schema.metadata[_ROOT]
        about = json.loads(text)
        newer = int(about.pop("version")) > FORMAT
    except FileNotFoundError:
        raise
    except BROKEN as error:
        raise _damaged(path, error, remedy) from error
    if newer:
        raise DatasetError(
            f"{printable(path)}: written by Penstock {about.get('penstock')}, in a format newer "
            f"than this one reads (wanted {FORMAT}). Upgrade penstock, or: {remedy}"
        )
    try:
        if int(batch.schema.metadata[_SUM], 16) != _checksum(text, batch):
            raise ValueError("its checksum is wrong")
        return Manifest(
            about=_about(about),
            names=_Column(batch.column("uri")),
            etags=_Column(batch.column("etag")),
            shard_bytes=batch.column("bytes").to_numpy(),
            samples=batch.column("samples").to_numpy(),
            crc32c=batch.column("crc32c").to_numpy(),
            columns_crc32c=batch.column("columns_crc32c").to_numpy(),
        )
    except BROKEN as error:
        raise _damaged(path, error, remedy) from error


def _read(path: bytes) -> Any:
    with open(path, "rb") as file:
        return pa.py_buffer(file.read())


def _about(values: dict[str, Any]) -> About:
    values.pop("penstock", None)
    values["images"] = ImageRange(**values["images"])
    for name in ("fields", "classes", "channels", "codecs"):
        values[name] = tuple(values[name])
    values["directories"] = tuple((name, mtime_ns) for name, mtime_ns in values["directories"])
    return About(**values)


def _damaged(path: bytes, error: Exception, remedy: str) -> CorruptShardError:
    return CorruptShardError(
        f"{printable(path)}: not a whole manifest ({error}). It is torn or was changed. {remedy}"
    )


def _checksum(text: bytes, batch: Any) -> int:
    total = crc32c(text)
    for name in _COLUMNS:
        total = crc32c(np.ascontiguousarray(batch.column(name).to_numpy()), total)
    names = b"\0".join(batch.column("uri").to_pylist())
    etags = "\0".join(batch.column("etag").to_pylist())
    return int(crc32c(etags.encode(), crc32c(names, total)))


def _own_version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # run from a checkout that isn't installed
        return "unknown"


def write_batch(path: bytes, batch: Any) -> None:
    """One record batch as an uncompressed Arrow IPC file."""
    with pa.OSFile(os.fsdecode(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def only_batch(buffer: Any) -> Any:
    """The one record batch of a mapped Arrow IPC file. Raises one of BROKEN."""
    reader = pa.ipc.open_file(pa.BufferReader(buffer))
    if reader.num_record_batches != 1:
        raise ValueError(f"{reader.num_record_batches} record batches, wanted 1")
    batch = reader.get_batch(0)
    batch.validate(full=True)  # or offsets that lead nowhere end in a crash
    return batch
