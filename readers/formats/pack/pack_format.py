"""Recognise packs, and open their shards: mapped local files, or blobs of the cache.

A pack is Arrow files that carry what an index would say of them.
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

# What is there from the first moment of packing to its end, and what is there after it.
_TRACES = (OWN_FOLDER + b"/pack.json", b"shard-000000.arrow")


@dataclass(frozen=True, slots=True)
class PackFormat:
    """A pack, whose manifest in its own folder names shard files instead of sidecars."""

    name: ClassVar[str] = "pack"
    least_sample_bytes: ClassVar[int] = 40  # what is noted of it
    is_file_per_sample: ClassVar[bool] = False
    indexing: ClassVar[Indexing | None] = None

    def recognises(self, origin: Origin) -> bool:
        """Whether there is what an unfinished pack has too; a whole one is known by its
        manifest."""
        return origin.selection is None and any(origin.find(name) is not None for name in _TRACES)

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """What opens a shard by the manifest alone; the rest stands in the shard."""
        del sidecar
        return PackOpener(entry)

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """A key by content, so that copies are told apart without asking the store."""
        del etag
        return origin.blob_key(name, f"crc32c-{crc32c:08x}-{columns_crc32c:08x}")


@dataclass(frozen=True, slots=True)
class PackOpener:
    """Opens one shard of a pack."""

    entry: ShardEntry

    def open_local(self, root: bytes) -> PackShard:
        """Map its file."""
        return PackShard(below(root, self.entry.name), self.entry)

    def open_blob(self, remote: Remote, blob: Blob) -> PackBlob:
        """Fetch what tells where its samples are; these come as they are needed."""
        from penstock.readers.formats.pack.pack_blob import PackBlob  # a local pack has none

        return PackBlob(remote, blob, self.entry)


FORMAT: Format = PackFormat()
