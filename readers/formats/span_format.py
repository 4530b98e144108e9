"""What formats have in common whose samples are spans of files that an index of ours tells."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.fields.schema import Schema
    from penstock.readers.formats.format import ShardEntry, ShardOpener
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.origin.remote import RemoteFolder

_IDENTITY = re.compile(rb".*-([0-9a-f]{32})\.arrow", re.S)


class SpanFormat:
    """A format whose samples are spans: a sidecar says all that it takes to read them."""

    least_sample_bytes: ClassVar[int] = 1
    is_file_per_sample: ClassVar[bool] = False

    def default_fields(self, schema: Schema) -> tuple[str, ...] | None:
        """The fields of a batch where nobody chose any; None: as of any dataset."""
        del schema
        return None

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """The sidecar, which knows each file and opens the shard."""
        del entry
        return sidecar()

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """A key by what a listing told of a file that is a shard, which its sidecar's name carries:
        so it is the key that the file was fetched under before it had an index. Of several files a
        key by the sidecar's checksum, and so by all that it says of them."""
        del crc32c, columns_crc32c
        found = _IDENTITY.fullmatch(name)
        return (
            origin.blob_key(name, etag) if found is None else origin.archive_key(found[1].decode())
        )
