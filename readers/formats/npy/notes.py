"""What an index notes of a shard of arrays, to find its samples again: pieces of files, in order.

A piece is a run of samples of one group of arrays: of each field a slab of an array along its first
axis, or a compressed array as a whole. Its extents stand in the order of the pieces, those of one
in the order of the fields.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import CorruptShardError
from penstock.readers.fields.facts import array_codec
from penstock.readers.formats.grid import Windows
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.npy.stored import MAX_AXES, Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.fields.facts import ArrayCodec

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """What a piece has of one array. rows: first and end along the first axis of what its extent
    holds. windows: of the array's samples. packed: see `StoredArray`."""

    codec: ArrayCodec
    rows: tuple[int, int]
    windows: Windows
    packed: Packed | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the extent holds."""
        return (self.rows[1] - self.rows[0], *self.windows.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of samples of one group. name: of its file, for people; first: the number of its first
    sample in the group; slabs: of each field."""

    name: str
    samples: int
    first: int
    slabs: Sequence[Slab]


def write_notes(pieces: Sequence[Piece], *, is_by_file: bool) -> bytes:
    """Notes of a shard."""
    told = [
        [piece.name, piece.samples, piece.first, [_told(slab) for slab in piece.slabs]]
        for piece in pieces
    ]
    return json.dumps([_VERSION, is_by_file, told], separators=(",", ":")).encode()


def _told(slab: Slab) -> list[Any]:
    windows, packed = slab.windows, slab.packed
    told: list[Any] = [
        slab.codec.dtype.str + ":F" * slab.codec.is_fortran,
        windows.shape,
        slab.rows,
        windows.window,
        windows.stride,
        int(windows.is_step),
        windows.repeat,
    ]
    if packed is not None:
        told.append([packed.size_bytes, packed.head_bytes, packed.crc32])
    return told


def read_notes(notes: bytes, *, fields: int, samples: int) -> tuple[list[Piece], bool]:
    """The pieces of a shard, and whether each is a sample. Raises CorruptShardError."""
    try:
        version, is_by_file, told = json.loads(notes)
        if version != _VERSION:
            raise ValueError(f"version {version!r}")
        pieces = [_piece(*each, fields=fields) for each in told]
        if sum(piece.samples for piece in pieces) != samples:
            raise ValueError("other numbers of samples")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptShardError(
            f"An index of arrays says what can't be ({error}). {REINDEX}"
        ) from error
    return pieces, bool(is_by_file)


def _piece(name: str, samples: int, first: int, slabs: list[list[Any]], *, fields: int) -> Piece:
    found = [_slab(*each) for each in slabs]
    if len(found) != fields or samples < 1 or first < 0:
        raise ValueError(f"{samples} samples of {len(found)} fields")
    for slab in found:
        if first + samples > slab.windows.samples:
            raise ValueError("samples behind an array's end")
    return Piece(name=str(name), samples=int(samples), first=int(first), slabs=found)


def _slab(
    codec: str,
    shape: list[int],
    rows: list[int],
    window: list[int],
    stride: list[int],
    is_step: int,
    repeat: int,
    packed: list[int] | None = None,
) -> Slab:
    found = array_codec(codec)
    axes = [*zip(shape, window, stride, strict=True)]
    low, high = rows
    if found is None or not 1 <= len(axes) <= MAX_AXES or repeat < 1:
        raise ValueError(f"an array of {codec!r}, {len(axes)} axes")
    if any(not 0 <= part <= length or step < 1 for length, part, step in axes):
        raise ValueError(f"windows {window} of {shape}")
    if not 0 <= low <= high <= shape[0]:
        raise ValueError(f"rows {rows} of {shape}")
    return Slab(
        codec=found,
        rows=(int(low), int(high)),
        windows=Windows(
            shape=tuple(map(int, shape)),
            window=tuple(map(int, window)),
            stride=tuple(map(int, stride)),
            is_step=bool(is_step),
            repeat=int(repeat),
        ),
        packed=None if packed is None else _packed(found, shape, *packed),
    )


def _packed(
    codec: ArrayCodec, shape: list[int], size_bytes: int, head_bytes: int, crc32: int
) -> Packed:
    if head_bytes < 0 or size_bytes - head_bytes != math.prod(shape) * codec.dtype.itemsize:
        raise ValueError(f"{size_bytes} bytes of shape {shape}")
    return Packed(size_bytes=int(size_bytes), head_bytes=int(head_bytes), crc32=int(crc32))
