"""The files that a shard's samples lie in, end to end: remote ones are a blob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.origin.origin import Entry
from penstock.readers.origin.remote import segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardFiles:
    """The files of one shard, in order. sizes: bytes, mtimes_ns: 0 of remote ones, both int64,
    shape (files,); versions: etags or the like, "" of local ones."""

    names: Sequence[bytes]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    versions: Sequence[str]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> ShardFiles:
        """What a listing says of some files."""
        return cls(
            names=[entry.name for entry in entries],
            sizes=np.array([entry.size_bytes for entry in entries], np.int64),
            mtimes_ns=np.array([entry.mtime_ns for entry in entries], np.int64),
            versions=[entry.version for entry in entries],
        )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def size_bytes(self) -> int:
        """The bytes of all."""
        return int(self.sizes.sum())

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each begins if they lie end to end, and the end, int64, shape (files + 1,)."""
        return np.concatenate(([0], np.cumsum(self.sizes))).astype(np.int64)

    def entries(self) -> Iterator[Entry]:
        """What a listing said of each."""
        rows = zip(
            self.names, self.sizes.tolist(), self.mtimes_ns.tolist(), self.versions, strict=True
        )
        for name, size_bytes, mtime_ns, version in rows:
            yield Entry(name=name, size_bytes=size_bytes, mtime_ns=mtime_ns, version=version)

    def segments(self) -> Sequence[Segment]:
        """The objects of a blob."""
        rows = zip(self.names, self.sizes.tolist(), self.versions, strict=True)
        return tuple(segment(*row) for row in rows)
