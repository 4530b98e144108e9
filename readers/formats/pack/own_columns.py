"""Penstock's own columns of a pack's shard, beside the fields': checksums, dimensions, origins.

A slash stands in each name, which no field's name has; so none can hide a field. Fields of one
shape have a CRC-32C for each block of rows too, in the schema's metadata: so a batch of small
arrays is one gather, and a block is checked once.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.readers.formats.pack.forms import column_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.pack.forms import PackForm

SOURCE, NAME = "penstock/source", "penstock/name"

CRC, HEIGHT, WIDTH, CHANNELS, CODEC = "crc32c", "height", "width", "channels", "codec"

SHARD, SCHEMA = b"penstock.shard", b"penstock.schema"
NAMES_SUM, BLOCK_SUMS = b"penstock.names.crc32c", b"penstock.blocks.crc32c"

_PICTURE = {HEIGHT: pa.int32(), WIDTH: pa.int32(), CHANNELS: pa.int32(), CODEC: pa.string()}
_BLOCK_BYTES = 2**20


_JOINT = b"\0"


def own_name(kind: str, field: str) -> str:
    """Such as "penstock/crc32c/image"."""
    return f"penstock/{kind}/{field}"


def arrow_schema(fields: Mapping[str, PackForm]) -> Any:
    """The columns of a shard, in order: the fields, what is noted of each, and where each sample
    came from."""
    columns = [
        pa.field(name, own.arrow, metadata=column_metadata(own)) for name, own in fields.items()
    ]
    for name, own in fields.items():
        if own.has_crcs:
            columns.append(pa.field(own_name(CRC, name), pa.uint32()))
        if own.is_picture:
            columns += [pa.field(own_name(kind, name), type) for kind, type in _PICTURE.items()]
    columns += [pa.field(SOURCE, pa.int64()), pa.field(NAME, pa.large_binary())]
    return pa.schema(columns)


def block_rows(own: PackForm) -> int:
    """Rows of a field of one shape that have a CRC together: about 1 MiB."""
    if own.is_bits:  # a block begins with a byte
        return max(8, 8 * _BLOCK_BYTES // max(1, own.numbers) // 8 * 8)
    return max(1, _BLOCK_BYTES // max(1, own.row_bytes))


def block_bounds(own: PackForm, rows: int) -> NDArray[np.int64]:
    """Where each block of a field's column begins, in bytes, and the end; int64, shape
    (blocks + 1,)."""
    each = block_rows(own)
    if own.is_bits:
        end, step = -(-rows * own.numbers // 8), each * own.numbers // 8
    else:
        end, step = rows * own.row_bytes, each * own.row_bytes
    starts = np.arange(-(-rows // each), dtype=np.int64) * step
    return np.append(starts, end)


def write_block_sums(sums: Mapping[str, Sequence[int]]) -> bytes:
    """As the schema's metadata has them: 8 hex digits a block."""
    return json.dumps(
        {name: "".join(f"{crc:08x}" for crc in crcs) for name, crcs in sums.items()}
    ).encode()


def read_block_sums(text: bytes) -> dict[str, NDArray[np.uint32]]:
    """What a shard says, which may come from anybody. Raises ValueError, TypeError."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its blocks' checksums are nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("its blocks' checksums aren't an object")
    return {
        name: np.frombuffer(bytes.fromhex(crcs), ">u4").astype(np.uint32)
        for name, crcs in found.items()
    }


def sum_of_names(names: Sequence[bytes]) -> bytes:
    """CRC-32C of all names, in hex."""
    return f"{crc32c(_JOINT.join(names)):08x}".encode()
