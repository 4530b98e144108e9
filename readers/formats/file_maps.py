"""The local files of a shard, mapped when they are first looked into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.files.names import below
from penstock.readers.files.pages import map_buffer
from penstock.readers.formats.local_files import changed, unreadable

if TYPE_CHECKING:
    from penstock.readers.formats.shard_files import ShardFiles
    from penstock.readers.types import Encoded


class FileMaps:
    """Maps files of a local folder, each once; no descriptor stays open, and views keep their map
    alive. Safe for several threads."""

    def __init__(self, root: bytes, files: ShardFiles) -> None:
        self._root, self._files = root, files
        self._maps: dict[int, Encoded] = {}

    def view(self, file: int, start: int, size_bytes: int) -> Encoded:
        """Bytes of a file by its number, read-only. Raises IndexChangedError, DatasetError."""
        found = self._maps.get(file)
        if found is None:
            found = self._maps[file] = self._map(file)
        return found[start : start + size_bytes]

    def _map(self, file: int) -> Encoded:
        name, size_bytes = self._files.names[file], int(self._files.sizes[file])
        try:
            data = np.frombuffer(map_buffer(below(self._root, name)), np.uint8)
        except (FileNotFoundError, NotADirectoryError):
            raise changed(name, "it is gone") from None
        except ValueError:
            raise changed(name, "it is empty now") from None
        except OSError as error:
            raise unreadable(name, error) from error
        if len(data) != size_bytes:
            raise changed(name, f"it had {size_bytes} bytes, now {len(data)}")
        return data
