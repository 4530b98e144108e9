"""An open shard, whatever format it is of: its table of samples and how their bytes are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.readers.formats.limits import MAX_SHARD_BYTES, MAX_SIDE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

START, END, HEIGHT, WIDTH, LABEL, CRC = range(6)
"""Columns of a shard's table. START, END: the sample's bytes in the shard's flat data, end
exclusive (a folder's file: 0 and its size). One int64 table, because a batch gathers rows from many
shards: one gather of 4 rows takes 0.7 us, six from separate columns 4.2."""


class OpenShard(Protocol):
    """A shard whose samples can be read.

    table: int64, shape (samples, 6). is_mapped: samples can be had as views of a map.
    is_file_per_sample: one sample can be gone or changed while the others are well.
    """

    table: NDArray[np.int64]
    is_mapped: bool
    is_file_per_sample: bool

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of the flat data, if is_mapped."""

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read the samples of rows, each into its slot, which is one byte longer than the sample.
        Raises CorruptShardError, IndexChangedError, DatasetError, FetchError."""

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read these bytes of the flat data ahead; returns at once."""

    def name(self, row: int) -> str:
        """The sample's name for people."""

    def source_names(self) -> list[bytes] | None:
        """The samples' names in what the shard was made from; None where it wasn't made of
        anything else, or doesn't tell."""


def check_rows(
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


def table(
    *,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    heights: NDArray[np.int32],
    widths: NDArray[np.int32],
    labels: NDArray[np.int64] | None,
    crcs: NDArray[np.uint32],
) -> NDArray[np.int64]:
    """The table of a shard, int64, shape (samples, 6); labels are 0 where there are none."""
    columns = np.zeros((len(starts), 6), np.int64)
    columns[:, START], columns[:, END] = starts, ends
    columns[:, HEIGHT], columns[:, WIDTH] = heights, widths
    columns[:, CRC] = crcs
    if labels is not None:
        columns[:, LABEL] = labels
    return columns
