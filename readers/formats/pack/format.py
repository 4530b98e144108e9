"""Penstock's own packs as a format: Arrow files that carry what an index would say of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.files.names import OWN_FOLDER, below
from penstock.readers.formats.pack.blob import PackBlob
from penstock.readers.formats.pack.shard import PackShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base.blob import Blob
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.formats.format import Format, Indexing, ShardEntry, ShardOpener
    from penstock.readers.formats.shard import OpenShard
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.remote import RemoteFolder

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


def pack_shard(shard: OpenShard) -> PackShard | PackBlob:
    """Check that an open shard is a pack's, which has columns that others don't."""
    if not isinstance(shard, PackShard | PackBlob):
        raise TypeError(f"{shard!r} is not a pack's shard")
    return shard


@dataclass(frozen=True, slots=True)
class PackOpener:
    """Opens one shard of a pack."""

    entry: ShardEntry

    def open_local(self, root: bytes) -> PackShard:
        """Map its file."""
        return PackShard(below(root, self.entry.name), self.entry)

    def open_blob(self, remote: Remote, blob: Blob) -> PackBlob:
        """Fetch what tells where its samples are; these come as they are needed."""
        return PackBlob(remote, blob, self.entry)


FORMAT: Format = PackFormat()
