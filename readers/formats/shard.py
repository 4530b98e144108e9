"""An open shard, whatever format it is of: its table of samples, and how they are read.

Samples are read in two ways, which one shard may mix, field by field (`Layout.storage`). What is
stored as a *span* is a range of bytes with a checksum in the shard's flat data, so that a sample
can be had by itself. What is stored by *rows* the shard alone can tell: values that were noted, or
chunks that have to be decoded as a whole (a row group, a chunk of an array).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Places = Ints | slice


class OpenShard(Protocol):
    """A shard whose samples can be read.

    table: what is known of each sample, int64, shape (samples, columns); `Layout.table` says what
    its columns are. is_mapped: spans can be had as views of a map. is_file_per_sample: one sample
    can be gone or changed while the others are well.
    """

    table: NDArray[np.int64]
    is_mapped: bool
    is_file_per_sample: bool

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of the flat data, if is_mapped."""

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read spans of samples, each into its slot, which is one byte longer than the span. rows:
        the samples'. Raises CorruptShardError, IndexChangedError, DatasetError, FetchError."""

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        wrong: dict[int, str],
        *,
        corners: Ints | None = None,
    ) -> None:
        """Read a field that is stored by rows and whose samples have one shape: out[places] = the
        rows, 0 where a sample lacks it. places: numbers, or a slice where they lie side by side and
        in order. wrong: where bad samples are noted, by place in rows, with the reason. corners: of
        the part of each that is wanted, which has the shape of out, int64, shape (n, dimensions);
        None: all of it. Raises as read_into does."""

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read other fields that are stored by rows, of samples in any order. wrong: as for
        gather. Raises as read_into does."""

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read these bytes of the flat data ahead; returns at once."""

    def name(self, row: int) -> str:
        """The sample's name for people."""

    def source_names(self) -> list[bytes] | None:
        """The samples' names in what the shard was made from; None where it wasn't made of
        anything else, or doesn't tell."""
