"""What an index notes of a shard of Parquet, so that opening it needs no footer."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.formats.arrow.notes import (
    tensor_of_json,
    torn_notes,
    units_of_json,
    units_to_json,
)
from penstock.readers.formats.parquet.chunk import ChunkForm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.arrow.unit_reader import Units
    from penstock.readers.formats.chunked import ShardFacts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParquetNotes:
    """The units of a shard, and how each chunk of it is decoded. chunks: of each extent the number
    of its form, its values, its bytes decompressed and its nulls (-1: not told), int64, shape
    (extents, 4)."""

    units: Units
    forms: Sequence[ChunkForm]
    chunks: NDArray[np.int64]

    def to_bytes(self) -> bytes:
        """As `read_notes` reads it."""
        told: dict[str, Any] = {
            **units_to_json(self.units),
            "chunks": self.chunks.tolist(),
            "forms": [
                {
                    "path": form.path,
                    "elements": [base64.b64encode(each).decode() for each in form.elements],
                    "physical": form.physical,
                    "parts": form.parts,
                    "writer": base64.b64encode(form.writer).decode(),
                    "codec": form.codec,
                    "is_flat": form.is_flat,
                    "has_levels": form.has_levels,
                    **({} if form.tensor is None else {"tensor": form.tensor}),
                }
                for form in self.forms
            ],
        }
        return json.dumps(told).encode()


def read_notes(shard: ShardFacts) -> ParquetNotes:
    """What was noted of a shard. Raises CorruptShardError."""
    try:
        told = json.loads(shard.notes)
        units = units_of_json(told, shard)
        forms = [
            ChunkForm(
                path=tuple(each["path"]),
                elements=tuple(base64.b64decode(one) for one in each["elements"]),
                physical=int(each["physical"]),
                parts=int(each["parts"]),
                writer=base64.b64decode(each["writer"]),
                codec=int(each["codec"]),
                is_flat=bool(each["is_flat"]),
                has_levels=bool(each["has_levels"]),
                tensor=tensor_of_json(each["tensor"]) if "tensor" in each else None,
            )
            for each in told["forms"]
        ]
        chunks = np.array(told["chunks"], np.int64).reshape(-1, 4)
        if len(chunks) != len(shard.extents):
            raise ValueError("its chunks differ in number")
        if len(chunks) and not (chunks[:, :3].min() >= 0 and chunks[:, 0].max() < len(forms)):
            raise ValueError("its chunks have forms that aren't there")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise torn_notes(error) from error
    return ParquetNotes(units=units, forms=forms, chunks=chunks)
