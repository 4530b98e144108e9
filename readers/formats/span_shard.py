"""Open shards whose samples are byte spans of files: mapped, read, or in a blob of the cache."""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes import DenseColumn
from penstock.readers.files import advise_willneed, map_buffer, printable
from penstock.readers.formats.local_files import (
    changed_file_error,
    open_file,
    read_file_into,
    read_up_to,
    unreadable_file_error,
)
from penstock.readers.formats.open_shard import BlobShard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob
    from penstock.cache.blobs import Remote
    from penstock.readers.fieldtypes import Column
    from penstock.readers.formats.extents import ShardFiles
    from penstock.readers.formats.local_files import FileSpan
    from penstock.readers.formats.open_shard import Ints, Places
    from penstock.readers.types import Encoded


class _NotedFields:
    """The fields of a shard that its index records with their values.

    names: of the samples. columns: values of recorded fields that aren't in the table.
    """

    def __init__(self, names: Sequence[bytes], columns: Mapping[str, Column]) -> None:
        self._names, self._columns = names, columns

    def name(self, row: int) -> str:
        """Return a sample's name for messages, such as "cat/17.jpg" or
        "train-000003.tar/dog.jpg"."""
        return printable(self._names[row])

    def source_names(self) -> list[bytes] | None:
        """Return None: the shard isn't a copy of other data."""
        return None

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
        """Copy recorded values of some samples."""
        del wrong
        column = self._columns[field]
        assert isinstance(column, DenseColumn)
        if corners is None:
            out[places] = column.values[rows]
        else:
            from penstock.readers.fieldtypes import put_parts  # not needed for images

            put_parts(column.values[rows], corners, out, places)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> dict[str, Column]:
        """Return recorded values of some samples."""
        del wrong
        return {name: self._columns[name].take(rows) for name in fields}


class FilesShard(_NotedFields):
    """A shard of several files of a local folder, which are opened each time that they are read.

    Small files aren't mapped, because reading them is cheaper. table: START and END count from the
    first byte of the first file, as if the files lay end to end. are_samples: each sample is one
    whole file.
    """

    is_mapped = False
    is_file_per_sample = True

    def __init__(
        self,
        root: bytes,
        files: ShardFiles,
        table: NDArray[np.int64],
        *,
        names: Sequence[bytes],
        columns: Mapping[str, Column],
        are_samples: bool,
    ) -> None:
        super().__init__(names, columns)
        self.table = table
        self._root, self._files, self._are_samples = root, files.names, are_samples
        self._starts = [] if are_samples else files.starts.tolist()

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Raise TypeError: these files are read, not mapped."""
        del starts, ends
        raise TypeError("a folder's files are read, not mapped")

    def file_spans(self, rows: list[int], starts: list[int], sizes: list[int]) -> list[FileSpan]:
        """Return the file spans of some samples, without reading them."""
        from penstock.readers.formats.local_files import FileSpan  # not needed for images

        found = []
        for row, start, size_bytes in zip(rows, starts, sizes, strict=True):
            number, begin, is_rest = row, 0, True
            if not self._are_samples:
                number = bisect_right(self._starts, start) - 1
                begin = start - self._starts[number]
                is_rest = start + size_bytes == self._starts[number + 1]
            name = self._files[number]
            path = os.path.join(self._root, name)
            found.append(FileSpan(path, name, begin, size_bytes, is_rest))
        return found

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read files, or parts of them, into their slots."""
        if self._are_samples:
            for row, slot in zip(rows, slots, strict=True):
                name = self._files[row]
                read_file_into(os.path.join(self._root, name), slot, name=name)
            return
        for start, slot in zip(starts, slots, strict=True):
            number = bisect_right(self._starts, start) - 1
            name, begin, end = self._files[number], self._starts[number], self._starts[number + 1]
            is_rest = start + len(slot) - 1 == end  # otherwise other spans follow
            into = slot if is_rest else slot[:-1]
            path = os.path.join(self._root, name)
            read_file_into(path, into, name=name, start=start - begin, is_rest=is_rest)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Do nothing: each file is read by one call, so there is nothing to read ahead."""


class MappedShard(_NotedFields):
    """A shard that is one local file, mapped. It holds no file descriptor. Its views keep the map
    alive."""

    is_mapped = True
    is_file_per_sample = False

    def __init__(
        self,
        root: bytes,
        files: ShardFiles,
        table: NDArray[np.int64],
        *,
        names: Sequence[bytes],
        columns: Mapping[str, Column],
    ) -> None:
        """Map the file. Raises IndexChangedError, DatasetError."""
        super().__init__(names, columns)
        self.table = table
        (self._file,) = files.entries()
        self.path = os.path.join(root, self._file.name)
        name, size_bytes = self._file.name, self._file.size_bytes
        try:
            buffer = map_buffer(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise changed_file_error(name, "it is gone") from None
        except ValueError:
            raise changed_file_error(name, "it is empty now") from None
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error
        if buffer.size != size_bytes:
            raise changed_file_error(name, f"it had {size_bytes} bytes, now {buffer.size}")
        self._data = np.frombuffer(buffer, np.uint8)
        self._address = buffer.address

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Return views of the map."""
        data = self._data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read from the file, not from the map."""
        del rows
        fd = open_file(self.path, self._file.name)
        try:
            for start, slot in zip(starts, slots, strict=True):
                end = start + len(slot) - 1
                if read_up_to(fd, slot[:-1], start) < len(slot) - 1:
                    raise changed_file_error(self._file.name, f"it ends before byte {end}")
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error
        finally:
            os.close(fd)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read these pages ahead."""
        advise_willneed(self._address + starts, self._address + ends)


class SpanBlob(_NotedFields, BlobShard):
    """A shard in a blob of the cache: one file, or several end to end."""

    def __init__(
        self,
        remote: Remote,
        blob: Blob,
        table: NDArray[np.int64],
        *,
        names: Sequence[bytes],
        columns: Mapping[str, Column],
    ) -> None:
        _NotedFields.__init__(self, names, columns)
        BlobShard.__init__(self, remote, blob, table)
