"""Where the extents of a shard of chunks lie in its blob: those of some fields, end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache.base.blob import LEAST_ABSENT_BYTES
from penstock.readers.origin.remote import segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Segment
    from penstock.readers.formats.chunked_shard import Extents
    from penstock.readers.formats.layout import Layout
    from penstock.readers.formats.shard_files import ShardFiles

    Ints = NDArray[np.int64]

NOWHERE = -1
_TOGETHER_BYTES = 4096


class Told(Protocol):
    """What an index notes of a shard of chunks."""

    @property
    def layout(self) -> Layout: ...

    @property
    def files(self) -> ShardFiles: ...

    @property
    def extents(self) -> Extents | None: ...


class BlobExtents:
    """The extents of some fields in a blob, in the order of their files, so that what lies side by
    side there does so here.

    begins: of each extent of the shard its first byte in the blob, NOWHERE where it isn't in it,
    int64, shape (extents,).
    """

    def __init__(self, told: Told, fields: Iterable[str]) -> None:
        assert told.extents is not None
        wanted = set(fields)
        numbers = [i for i, name in enumerate(told.layout.schema) if name in wanted]
        chosen = np.flatnonzero(np.isin(told.extents.fields, numbers))
        self._place(told, chosen)

    @classmethod
    def of(cls, told: Told, extents: Sequence[int]) -> BlobExtents:
        """Of some extents by number."""
        made = cls.__new__(cls)
        made._place(told, np.unique(np.array(extents, np.int64)))
        return made

    def _place(self, told: Told, chosen: Ints) -> None:
        assert told.extents is not None
        self._files, self._extents = told.files, told.extents
        order = np.lexsort((told.extents.starts[chosen], told.extents.files[chosen]))
        self._chosen = chosen = chosen[order]
        sizes = told.extents.sizes[chosen]
        self.size_bytes = int(sizes.sum())
        self.begins: Ints = np.full(len(told.extents), NOWHERE, np.int64)
        self.begins[chosen] = np.cumsum(sizes) - sizes

    def segments(self, *, may_lack: bool = False) -> tuple[Segment, ...]:
        """The ranges of objects that the blob is made of. Small ones in a row are one. may_lack: an
        object that isn't there is no error."""
        extents, files = self._extents, self._files
        versions = files.versions
        # Too few bytes of one can't tell that it isn't there: then it is an error after all.
        small = extents.sizes[self._chosen] < LEAST_ABSENT_BYTES
        surely = set(extents.files[self._chosen][small].tolist())
        found: list[tuple[int, int, int]] = []
        rows = zip(
            extents.files[self._chosen].tolist(),
            extents.starts[self._chosen].tolist(),
            extents.sizes[self._chosen].tolist(),
            strict=True,
        )
        for file, start, size in rows:
            if found:
                before, begin, end = found[-1]
                # Parts of a segment can be fetched alone, at multiples of so many bytes.
                if (before, end) == (file, start) and start + size - begin <= _TOGETHER_BYTES:
                    found[-1] = before, begin, start + size
                    continue
            if size:
                found.append((file, start, start + size))
        return tuple(
            segment(
                files.names[file],
                end - start,
                versions[file],
                start=start,
                object_bytes=int(files.sizes[file]),
                may_lack=may_lack and file not in surely,
            )
            for file, start, end in found
        )
