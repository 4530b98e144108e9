"""Writing a pack's shard: one Arrow IPC file, uncompressed, one record batch, images as one flat
buffer. Any Arrow tool opens it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import write_batch
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.pack.columns import NAMES_SUM, sum_of_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """What goes into a shard; all of n samples.

    images: encoded bytes; heights, widths: oriented, in pixels; source: the sample's id in the
    source index; labels: None for a set without; names: of the samples in the source.
    """

    images: Sequence[Encoded]
    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    channels: NDArray[np.int32]
    codecs: Sequence[str]
    crcs: NDArray[np.uint32]
    source: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    names: Sequence[bytes]


def write_shard(path: bytes, content: ShardContent) -> int:
    """Write a shard whole; returns its bytes. Raises WriteError."""
    columns = {"image": _large_binary(content.images)}
    if content.labels is not None:
        columns["label"] = pa.array(content.labels, pa.int64())
    columns |= {
        "height": pa.array(content.heights, pa.int32()),
        "width": pa.array(content.widths, pa.int32()),
        "channels": pa.array(content.channels, pa.int32()),
        "codec": pa.array(list(content.codecs), pa.string()),
        "crc32c": pa.array(content.crcs, pa.uint32()),
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
