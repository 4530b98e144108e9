"""Recognise packs, and open their shards.

A pack consists of Arrow files. They contain everything that an index would record about them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from penstock.readers.files import OWN_FOLDER
from penstock.readers.formats.format import Format
from penstock.readers.formats.pack.pack_shard import PackShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats.format import ShardEntry
    from penstock.readers.formats.sidecar import ShardPlace, Sidecar
    from penstock.readers.origin import Origin, RemoteFolder

# The first exists while a pack is being written, the second once it is complete.
_TRACES = (OWN_FOLDER + b"/pack.json", b"shard-000000.arrow")


class PackFormat(Format):
    """The format of packs: a manifest in the pack's own folder lists its shard files."""

    name: ClassVar[str] = "pack"
    least_sample_bytes: ClassVar[int] = 40  # its checksum, source id and name
    has_own_index: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Return True if the root holds files that even an unfinished pack has.

        A finished pack is recognised earlier, by its manifest.
        """
        return origin.selection is None and any(origin.entry(name) is not None for name in _TRACES)

    def open(
        self, entry: ShardEntry, sidecar: Callable[[], Sidecar], place: ShardPlace
    ) -> PackShard:
        """Open a shard at its place. It needs no sidecar: the shard describes itself."""
        del sidecar
        return PackShard(place, entry)

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """Return the cache key of a shard's blob: a key by content, so that copies share it."""
        del etag
        return origin.blob_key(name, f"crc32c-{crc32c:08x}-{columns_crc32c:08x}")


FORMAT = PackFormat()
