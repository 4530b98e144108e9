"""A tar file of a local folder, open as a shard: images are views of the mapped archive."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.files.names import printable
from penstock.readers.files.pages import advise_willneed, map_buffer
from penstock.readers.formats.local_files import changed, open_file, read_up_to, unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.origin.origin import Entry
    from penstock.readers.types import Encoded


class TarShard:
    """A mapped archive. It holds no descriptor; views that it gave keep the map alive."""

    is_mapped = True
    is_file_per_sample = False

    def __init__(
        self, root: bytes, archive: Entry, names: Sequence[bytes], table: NDArray[np.int64]
    ) -> None:
        """root: the dataset's folder; names: of the images' members. Raises IndexChangedError,
        DatasetError."""
        self._archive, self._names, self.table = archive, names, table
        self.path = os.path.join(root, archive.name)
        try:
            buffer = map_buffer(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise changed(archive.name, "it is gone") from None
        except ValueError:
            raise changed(archive.name, "it is empty now") from None
        except OSError as error:
            raise unreadable(archive.name, error) from error
        if buffer.size != archive.size_bytes:
            raise changed(archive.name, f"it had {archive.size_bytes} bytes, now {buffer.size}")
        self._data = np.frombuffer(buffer, np.uint8)
        self._address = buffer.address

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of the map."""
        data = self._data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read the file, past the map."""
        del rows
        fd = open_file(self.path, self._archive.name)
        try:
            for start, slot in zip(starts, slots, strict=True):
                wanted = slot[:-1]
                if read_up_to(fd, wanted, start) < len(wanted):
                    raise changed(self._archive.name, f"it ends before byte {start + len(wanted)}")
        except OSError as error:
            raise unreadable(self._archive.name, error) from error
        finally:
            os.close(fd)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read these pages ahead."""
        advise_willneed(self._address + starts, self._address + ends)

    def name(self, row: int) -> str:
        """A sample's name for people, such as "train-000003.tar/dog.jpg"."""
        return printable(self._archive.name + b"/" + self._names[row])

    def source_names(self) -> list[bytes] | None:
        """Always None: these are the data themselves."""
        return None
