"""Open the shards of a local folder. A shard that is one file is mapped as a whole; the files of
others are opened when they are read (`loose_files`, which mapped shards don't load)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.byte_source import ByteSource, LocalFile, SourceSpans
from penstock.readers.files import advise_willneed, below, only_the_tail, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.base import ReadMode
    from penstock.readers.byte_source import Unread
    from penstock.readers.formats import Parts, ShardFiles, Sidecar
    from penstock.readers.types import Encoded, Ints


class LocalPlace:
    """A local folder with the files of shards; a `ShardPlace`."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    def file(self, name: bytes, size_bytes: int, *, is_below: bool, remedy: str = "") -> ByteSource:
        """Map the file."""
        path = below(self._root, name) if is_below else os.path.join(self._root, name)
        return MappedFile(LocalFile(path, name, size_bytes, remedy))

    def files(self, files: ShardFiles) -> ByteSource:
        """Return the files, which are opened when they are read."""
        from penstock.readers.loose_files import LooseFiles

        return LooseFiles(self._root, files.names, files.sizes, None)

    def parts(self, sidecar: Sidecar, fields: Sequence[str]) -> Parts:
        """Return the files, which have all extents."""
        from penstock.readers.loose_files import LooseFiles

        files, extents = sidecar.files, sidecar.extents
        assert extents is not None
        begins = files.starts[extents.files] + extents.starts
        used = begins, begins + extents.sizes
        return LooseFiles(self._root, files.names, files.sizes, used), begins, None


class MappedFile(ByteSource):
    """The bytes of a shard that is one file, mapped as a whole. It holds no file descriptor."""

    def __init__(self, file: LocalFile) -> None:
        self._file, self.size_bytes = file, file.size_bytes
        self.shown = printable(file.path)
        self._buffer = mapped = file.map(file.open(), 0, file.size_bytes)
        self._data, self._address = np.frombuffer(mapped, np.uint8), mapped.address

    def load(self, wanted: Sequence[SourceSpans], mode: ReadMode) -> list[list[Unread]]:
        """Return views of maps."""
        return [each.source._spans(each.starts, each.ends, mode) for each in wanted]  # type: ignore[attr-defined]

    def _spans(self, starts: Sequence[int], ends: Sequence[int], mode: ReadMode) -> list[Unread]:
        if mode != "pread":
            data = self._data
            return [data[start:end] for start, end in zip(starts, ends, strict=True)]
        slots = [np.empty(end - start, np.uint8) for start, end in zip(starts, ends, strict=True)]
        self.fill(starts, slots, mode)
        for slot in slots:
            slot.flags.writeable = False
        return [*slots]

    def fill(self, starts: Sequence[int], slots: Sequence[Encoded], mode: ReadMode) -> None:
        """Read bytes past the map; the file is opened once."""
        fd = self._file.open()
        try:
            for start, slot in zip(starts, slots, strict=True):
                self._file.fill(fd, start, slot)
        finally:
            os.close(fd)

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Ask the kernel to read these pages ahead."""
        advise_willneed(self._address + starts, self._address + ends)

    def buffer(self, spans: Sequence[tuple[int, int]]) -> Any:
        """Return the map."""
        return self._buffer

    def parsing(self) -> AbstractContextManager[None]:
        """Let the kernel read the end of the map ahead."""
        return only_the_tail(self._address, self.size_bytes)
