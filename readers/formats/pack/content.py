"""Writing a pack's shard: an Arrow IPC file of one record batch, which any Arrow tool opens.

It is uncompressed, and its images are one flat buffer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.fields.field_types import ClassLabel, Image
from penstock.readers.fields.schema import Schema
from penstock.readers.fields.sniff import is_progressive
from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import write_batch
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.pack.columns import NAMES_SUM, sum_of_names
from penstock.readers.formats.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.image_columns import ImageColumns
    from penstock.readers.formats.summary import ShardSummary
    from penstock.readers.types import Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """What goes into a shard; all of n samples.

    encoded: the images' bytes; columns: what is noted of them; source: the sample's id in the
    source index, int64, shape (n,); names: of the samples in the source.
    """

    encoded: Sequence[Encoded]
    columns: ImageColumns
    source: NDArray[np.int64]
    names: Sequence[bytes]

    def summary(self, size_bytes: int) -> ShardSummary:
        """The shard's contribution to the manifest. size_bytes: of its file."""
        progressive = sum(map(is_progressive, self.encoded))
        return summarise(
            image_schema(self.columns.labels is not None),
            self.columns.notes(progressive=progressive),
            samples=len(self.encoded),
            size_bytes=size_bytes,
            overhead_bytes=size_bytes - sum(map(len, self.encoded)),
        )


def image_schema(has_labels: bool, classes: tuple[str, ...] = ()) -> Schema:
    """The fields of a pack of images."""
    label: dict[str, FieldType] = {"label": ClassLabel(classes)} if has_labels else {}
    return Schema({"image": Image(), **label})


def write_shard(path: bytes, content: ShardContent) -> int:
    """Write a shard whole; returns its bytes. Raises WriteError."""
    noted = content.columns.arrow()
    labels = {"label": noted.pop("label")} if "label" in noted else {}
    crcs = noted.pop("crc32c")
    columns = {
        "image": _large_binary(content.encoded),
        **labels,
        **noted,
        "crc32c": crcs,
        "source": pa.array(content.source, pa.int64()),
        "name": pa.array(list(content.names), pa.large_binary()),
    }
    metadata = {b"penstock.shard": str(VERSION).encode(), NAMES_SUM: sum_of_names(content.names)}
    batch = pa.record_batch(columns).replace_schema_metadata(metadata)
    write_whole(path, lambda temp: write_batch(temp, batch))
    return os.stat(path).st_size


def _large_binary(images: Sequence[Encoded]) -> Any:
    offsets = np.zeros(len(images) + 1, np.int64)
    np.cumsum([len(image) for image in images], out=offsets[1:])
    flat = np.concatenate(images)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(images), [None, pa.py_buffer(offsets), pa.py_buffer(flat)]
    )
