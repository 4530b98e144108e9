"""The columns of a pack's shard, checked against the manifest as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers.files.ipc import only_batch
from penstock.readers.formats.image_columns import ImageColumns
from penstock.readers.formats.limits import MAX_SHARD_BYTES, MAX_SIDE
from penstock.readers.formats.summary import Sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.layout import Layout

COLUMNS = {
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
NAMES_SUM = b"penstock.names.crc32c"

_JOINT = b"\0"


def sum_of_names(names: Sequence[bytes]) -> bytes:
    """CRC-32C of all names, in hex."""
    return f"{crc32c(_JOINT.join(names)):08x}".encode()


class PackColumns:
    """The columns of one shard, and where its images lie.

    table: as in OpenShard. flat: the buffer of all images, end to end; file_offset: where it begins
    in the file; source_offset: where the column of source ids does.
    """

    def __init__(
        self, buffer: Any, *, samples: int, sums: Sums, layout: Layout, from_file: bool = False
    ) -> None:
        """buffer: of the whole file; samples, sums: what the manifest promises; from_file: START
        and END count from the file's first byte, else from the first image's. Raises one of
        BROKEN."""
        self._batch = batch = only_batch(buffer, COLUMNS, optional=_OPTIONAL)
        if batch.num_rows != samples:
            raise ValueError(f"{batch.num_rows} samples, the manifest says {samples}")
        _, offsets, self.flat = batch.column("image").buffers()
        self.file_offset = self.flat.address - buffer.address
        self.source_offset = batch.column("source").buffers()[1].address - buffer.address
        offsets = np.frombuffer(offsets, np.int64, samples + 1)
        self.table = _table(batch, offsets, self.flat.size, sums, layout)
        if from_file:
            place = layout.table.spans["image"]
            self.table[:, place.start : place.end + 1] += self.file_offset

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
        noted = (self._batch.schema.metadata or {}).get(NAMES_SUM)
        return names if noted == sum_of_names(names) else None

    def codecs(self) -> list[str]:
        """The codec of each sample."""
        codecs: list[str] = self._batch.column("codec").to_pylist()
        return codecs

    def channels(self) -> NDArray[np.int32]:
        """Each sample's channels, int32, shape (samples,)."""
        channels: NDArray[np.int32] = self._batch.column("channels").to_numpy()
        return channels


def _table(
    batch: Any, offsets: NDArray[np.int64], flat_bytes: int, sums: Sums, layout: Layout
) -> NDArray[np.int64]:
    offsets = offsets.copy()
    if offsets[0] < 0 or (np.diff(offsets) < 0).any() or offsets[-1] > flat_bytes:
        raise ValueError("its offsets lead out of the file")
    # Copies of what may be a map: what is checked here is what is used.
    crcs, heights, widths, channels = (
        batch.column(name).to_numpy().copy() for name in ("crc32c", "height", "width", "channels")
    )
    labels = batch.column("label").to_numpy().copy() if "label" in batch.schema.names else None
    columns = ImageColumns(
        crcs=crcs, heights=heights, widths=widths, channels=channels, codecs=(), labels=labels
    )
    if Sums.of(columns.notes()) != sums:
        raise ValueError("its columns aren't what the manifest promises")
    _check_rows(np.diff(offsets), heights, widths)
    found = np.zeros((len(crcs), layout.table.count), np.int64)
    place = layout.table.spans["image"]
    assert place.height is not None
    found[:, place.start], found[:, place.end] = offsets[:-1], offsets[1:]
    found[:, place.height], found[:, place.height + 1] = heights, widths
    found[:, place.crc] = crcs
    if labels is not None:
        found[:, layout.table.values["label"]] = labels
    return found


def _check_rows(
    sizes: NDArray[np.int64], heights: NDArray[np.int32], widths: NDArray[np.int32]
) -> None:
    """Whether samples can have these bytes, heights and widths. Raises ValueError."""
    for what, column, most in (
        ("bytes", sizes, MAX_SHARD_BYTES),
        ("rows of pixels", heights, MAX_SIDE),
        ("columns of pixels", widths, MAX_SIDE),
    ):
        if len(column) and not (column.min() >= 1 and column.max() <= most):
            raise ValueError(f"a sample has {column.min():,} to {column.max():,} {what}")
