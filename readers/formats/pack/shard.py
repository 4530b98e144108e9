"""A pack's shard: one Arrow IPC file, uncompressed, one record batch, images as one flat buffer.

Any Arrow tool opens it. Here it is mapped once, and a sample is a slice of the flat buffer: no
Arrow object is made per sample.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache.errors import CorruptShardError, IndexChangedError
from penstock.readers.fields.facts import Sums
from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import only_batch, write_batch
from penstock.readers.files.names import printable
from penstock.readers.files.pages import BROKEN, advise_willneed, map_buffer, only_the_tail
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.local_files import read_up_to
from penstock.readers.formats.shard import check_rows, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

_COLUMNS = {
    "image": "large_binary",
    "label": "int64",
    "height": "int32",
    "width": "int32",
    "channels": "int32",
    "codec": "string",
    "crc32c": "uint32",
    "source": "int64",
    "name": "large_binary",
}
_OPTIONAL = frozenset(("label", "name"))
_NAMES_SUM = b"penstock.names.crc32c"

_JOINT = b"\0"
_REMEDY = "Run the same `penstock pack` again into an empty folder, or fetch the shard again."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """What goes into a shard; all of n samples.

    images: encoded bytes; heights, widths: oriented, in pixels; source: the sample's id in the
    source index; labels: None for a set without; names: of the samples in the source.
    """

    images: Sequence[Encoded]
    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    channels: NDArray[np.int32]
    codecs: Sequence[str]
    crcs: NDArray[np.uint32]
    source: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    names: Sequence[bytes]


def write_shard(path: bytes, content: ShardContent) -> int:
    """Write a shard whole; returns its bytes. Raises WriteError."""
    columns = {"image": _large_binary(content.images)}
    if content.labels is not None:
        columns["label"] = pa.array(content.labels, pa.int64())
    columns |= {
        "height": pa.array(content.heights, pa.int32()),
        "width": pa.array(content.widths, pa.int32()),
        "channels": pa.array(content.channels, pa.int32()),
        "codec": pa.array(list(content.codecs), pa.string()),
        "crc32c": pa.array(content.crcs, pa.uint32()),
        "source": pa.array(content.source, pa.int64()),
        "name": pa.array(list(content.names), pa.large_binary()),
    }
    metadata = {b"penstock.shard": str(VERSION).encode(), _NAMES_SUM: _sum_of(content.names)}
    batch = pa.record_batch(columns).replace_schema_metadata(metadata)
    write_whole(path, lambda temp: write_batch(temp, batch))
    return os.stat(path).st_size


def _sum_of(names: Sequence[bytes]) -> bytes:
    return f"{crc32c(_JOINT.join(names)):08x}".encode()


def _large_binary(images: Sequence[Encoded]) -> Any:
    offsets = np.zeros(len(images) + 1, np.int64)
    np.cumsum([len(image) for image in images], out=offsets[1:])
    flat = np.concatenate(images)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(images), [None, pa.py_buffer(offsets), pa.py_buffer(flat)]
    )


class ArrowColumns:
    """What a shard holds beside its images. table: as in OpenShard, START and END from the first
    image's first byte."""

    table: NDArray[np.int64]
    _shown: str

    def _parse(self, buffer: Any, samples: int, sums: Sums) -> None:
        """Raises one of BROKEN."""
        self._batch = batch = only_batch(buffer, _COLUMNS, optional=_OPTIONAL)
        if batch.num_rows != samples:
            raise ValueError(f"{batch.num_rows} samples, the manifest says {samples}")
        _, offsets, flat = batch.column("image").buffers()
        self._flat = flat
        self._file_offset, self._flat_bytes = flat.address - buffer.address, flat.size
        self._source_offset = batch.column("source").buffers()[1].address - buffer.address
        self.table = _table(batch, np.frombuffer(offsets, np.int64, samples + 1), flat.size, sums)

    def name(self, row: int) -> str:
        """Such as "shard-000003.arrow[17]"."""
        return f"{self._shown}[{row}]"

    def source(self) -> NDArray[np.int64]:
        """Each sample's id in the index that the pack was made from, int64, shape (samples,)."""
        source: NDArray[np.int64] = self._batch.column("source").to_numpy()
        return source

    def source_names(self) -> list[bytes] | None:
        """Each sample's name in what the pack was made from; None in a pack that doesn't keep them,
        or where they were damaged."""
        if "name" not in self._batch.schema.names:
            return None
        names: list[bytes] = self._batch.column("name").to_pylist()
        told = (self._batch.schema.metadata or {}).get(_NAMES_SUM)
        return names if told == _sum_of(names) else None

    def codecs(self) -> list[str]:
        """Each sample's codec."""
        codecs: list[str] = self._batch.column("codec").to_pylist()
        return codecs

    def channels(self) -> NDArray[np.int32]:
        """Each sample's channels, int32, shape (samples,)."""
        channels: NDArray[np.int32] = self._batch.column("channels").to_numpy()
        return channels


class ArrowShard(ArrowColumns):
    """An open shard. Holds a map and no descriptor; the views that it gave keep the map alive."""

    is_mapped = True

    def __init__(
        self, path: bytes, *, size_bytes: int, samples: int, sums: Sums, shown: str
    ) -> None:
        """size_bytes, samples, sums: what the manifest promises; shown: the shard's name for
        people. Raises CorruptShardError, IndexChangedError."""
        self.path, self._shown = path, shown
        _check_size(path, size_bytes)
        try:
            buffer = map_buffer(path)
            with only_the_tail(buffer.address, buffer.size):
                self._parse(buffer, samples, sums)
            self._data = np.frombuffer(self._flat, np.uint8)
            self._address = self._flat.address
        except FileNotFoundError:
            raise _missing(path) from None
        except BROKEN as error:
            raise CorruptShardError(
                f"{printable(path)}: not a shard that Penstock wrote, or changed since ({error}). "
                f"{_REMEDY}"
            ) from error

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of the map; see OpenShard."""
        data = self._data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read past the map; see OpenShard."""
        del rows
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _missing(self.path) from None
        try:
            for start, slot in zip(starts, slots, strict=True):
                wanted = slot[:-1]
                if read_up_to(fd, wanted, self._file_offset + start) < len(wanted):
                    raise CorruptShardError(
                        f"{printable(self.path)}: torn: it ends before byte "
                        f"{self._file_offset + start + len(wanted)}. {_REMEDY}"
                    )
        finally:
            os.close(fd)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Start reading the pages; see OpenShard."""
        advise_willneed(self._address + starts, self._address + ends)

    def rewrite_source(self, source: NDArray[np.int64]) -> None:
        """Replace the source column in the file, in place; for the packer, before anyone reads."""
        with open(self.path, "r+b", buffering=0) as file:
            file.seek(self._source_offset)
            file.write(np.ascontiguousarray(source, "<i8").tobytes())
            os.fsync(file.fileno())


def _check_size(path: bytes, size_bytes: int) -> None:
    try:
        got = os.stat(path).st_size
    except FileNotFoundError:
        raise _missing(path) from None
    if got < size_bytes:
        raise CorruptShardError(
            f"{printable(path)}: torn: got {got} bytes, the manifest promises {size_bytes}. "
            f"{_REMEDY}"
        )
    if got > size_bytes:
        raise IndexChangedError(
            f"{printable(path)}: changed: got {got} bytes, the manifest promises {size_bytes}. "
            f"{_REMEDY}"
        )


def _missing(path: bytes) -> CorruptShardError:
    return CorruptShardError(
        f"{printable(path)}: the shard is missing, the manifest names it. {_REMEDY}"
    )


def _table(
    batch: Any, offsets: NDArray[np.int64], flat_bytes: int, sums: Sums
) -> NDArray[np.int64]:
    offsets = offsets.copy()
    if offsets[0] < 0 or (np.diff(offsets) < 0).any() or offsets[-1] > flat_bytes:
        raise ValueError("its offsets lead out of the file")
    # Copies of what may be a map: what is checked here is what is used.
    crcs, heights, widths = (
        batch.column(name).to_numpy().copy() for name in ("crc32c", "height", "width")
    )
    labels = batch.column("label").to_numpy().copy() if "label" in batch.schema.names else None
    if Sums.of(crcs, heights, widths, labels) != sums:
        raise ValueError("its columns aren't what the manifest promises")
    check_rows(np.diff(offsets), heights, widths)
    return table(
        starts=offsets[:-1],
        ends=offsets[1:],
        heights=heights,
        widths=widths,
        labels=labels,
        crcs=crcs,
    )
