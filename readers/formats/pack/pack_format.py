"""Recognise packs, and open their shards: mapped local files, or blobs of the cache.

A pack consists of Arrow files. They contain everything that an index would record about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.files import OWN_FOLDER, below
from penstock.readers.formats.pack.pack_file import PackShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base import Blob
    from penstock.cache.blobs import Remote
    from penstock.readers.formats.format import Format, Indexing, ShardEntry, ShardOpener
    from penstock.readers.formats.pack.pack_blob import PackBlob
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.origin import Origin, RemoteFolder

# The first exists while a pack is being written, the second once it is complete.
_TRACES = (OWN_FOLDER + b"/pack.json", b"shard-000000.arrow")


@dataclass(frozen=True, slots=True)
class PackFormat:
    """The format of packs: a manifest in the pack's own folder lists its shard files."""

    name: ClassVar[str] = "pack"
    least_sample_bytes: ClassVar[int] = 40  # its checksum, source id and name
    is_file_per_sample: ClassVar[bool] = False
    indexing: ClassVar[Indexing | None] = None

    def recognises(self, origin: Origin) -> bool:
        """Return True if the root holds files that even an unfinished pack has.

        A finished pack is recognised earlier, by its manifest.
        """
        return origin.selection is None and any(origin.find(name) is not None for name in _TRACES)

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """Return the opener of a shard. It needs no sidecar: the shard describes itself."""
        del sidecar
        return PackOpener(entry)

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """Return the cache key of a shard's blob: a key by content, so that copies share it."""
        del etag
        return origin.blob_key(name, f"crc32c-{crc32c:08x}-{columns_crc32c:08x}")


@dataclass(frozen=True, slots=True)
class PackOpener:
    """Opens one shard of a pack."""

    entry: ShardEntry

    def open_local(self, root: bytes) -> PackShard:
        """Map the shard's file."""
        return PackShard(below(root, self.entry.name), self.entry)

    def open_blob(self, remote: Remote, blob: Blob) -> PackBlob:
        """Fetch the parts of the blob that locate the samples; samples are fetched when read."""
        from penstock.readers.formats.pack.pack_blob import PackBlob  # local packs don't need it

        return PackBlob(remote, blob, self.entry)


FORMAT: Format = PackFormat()
