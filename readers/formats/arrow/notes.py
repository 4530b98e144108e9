"""What an index notes of a shard of Arrow files, so that opening it needs no request."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.errors import CorruptShardError
from penstock.readers.formats.arrow.chunks import ColumnChunk, form_of_text
from penstock.readers.formats.arrow.unit_reader import Units

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.formats.arrow.types import Tensor
    from penstock.readers.formats.chunked import ShardFacts


def units_to_json(units: Units) -> dict[str, Any]:
    """As `units_of_json` reads them."""
    return {
        "names": list(units.names),
        "files": units.files.tolist(),
        "firsts": units.firsts.tolist(),
        "extents": units.chunks.tolist(),
        "lacking": sorted(units.lacking),
    }


def units_of_json(told: Any, shard: ShardFacts) -> Units:
    """The units of a shard, checked. Raises ValueError, TypeError, KeyError."""
    units = Units(
        names=[str(name) for name in told["names"]],
        files=np.array(told["files"], np.int64),
        firsts=np.array(told["firsts"], np.int64),
        chunks=np.array(told["extents"], np.int64).reshape(-1, len(shard.schema)),
        lacking=frozenset(told["lacking"]),
    )
    counts = {len(shard.units), len(units.files), len(units.firsts), len(units.chunks)}
    if len(counts) > 1 or not len(shard.units) or int(shard.units.sum()) != shard.samples:
        raise ValueError("its units differ in number")
    if not units.chunks.min() >= -1 or int(units.chunks.max()) >= len(shard.extents):
        raise ValueError("its units have chunks that aren't there")
    if not (units.files.min() >= 0 and units.files.max() < len(units.names)):
        raise ValueError("its units lie in files that aren't there")
    if units.firsts.min() < 0:
        raise ValueError("its units begin before their files")
    return units


def tensor_of_json(told: Any) -> Tensor:
    """How tensors are stored, checked. Raises ValueError, TypeError."""
    shape, axes = (tuple(map(int, each)) for each in told)
    if sorted(axes) != list(range(len(shape))) or not shape or min(shape) < 0:
        raise ValueError("its tensors have axes that aren't there")
    return shape, axes


def torn_notes(error: Exception) -> CorruptShardError:
    """The error for notes that can't be so."""
    return CorruptShardError(
        f"What an index notes of a shard of tables can't be so ({error}). Run `penstock index` on "
        "the dataset again."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowNotes:
    """The units of a shard; of each field the names of structs' parts inside of which its values
    lie; how each extent is decoded, and the types of chunks, as `chunks.form_of` has them. tensors:
    how a field's tensors are stored, by its number, of those that have any."""

    units: Units
    parts: Sequence[Sequence[str]]
    chunks: Sequence[ColumnChunk]
    forms: Sequence[str]
    tensors: Mapping[int, Tensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As `read_notes` reads it."""
        told = {
            **units_to_json(self.units),
            "parts": [list(each) for each in self.parts],
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "forms": list(self.forms),
        }
        if self.tensors:
            told["tensors"] = [[number, *tensor] for number, tensor in self.tensors.items()]
        return json.dumps(told).encode()


def read_notes(shard: ShardFacts) -> tuple[ArrowNotes, list[Any]]:
    """What was noted of a shard, and the types of its chunks. Raises CorruptShardError."""
    try:
        told = json.loads(shard.notes)
        notes = ArrowNotes(
            units=units_of_json(told, shard),
            parts=[[str(part) for part in each] for each in told["parts"]],
            chunks=[ColumnChunk.of_json(each) for each in told["chunks"]],
            forms=[str(form) for form in told["forms"]],
            tensors={
                int(number): tensor_of_json([shape, axes])
                for number, shape, axes in told.get("tensors", ())
            },
        )
        forms = [form_of_text(form) for form in notes.forms]
        _check(shard, notes)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise torn_notes(error) from error
    return notes, forms


def _check(shard: ShardFacts, notes: ArrowNotes) -> None:
    count = len(shard.extents)
    if len(notes.chunks) != count or len(notes.parts) != len(shard.schema):
        raise ValueError("its chunks or fields differ in number")
    for chunk, size in zip(notes.chunks, shard.extents.sizes.tolist(), strict=True):
        places = (start >= 0 and 0 <= length <= size - start for start, length in chunk.buffers)
        others = (0 <= other < count for other in chunk.dictionaries)
        if not (0 <= chunk.form < len(notes.forms) and all(places) and all(others)):
            raise ValueError("a chunk has parts that aren't there")
        if any(not 0 <= nulls <= length for length, nulls in chunk.nodes):
            raise ValueError("a chunk has arrays of no length")
