"""Texts, bytes and masks of a batch: decoded by the reading threads, as images are by DALI."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.columns import EncodedColumn, ListColumn
from penstock.readers.fields.field_types import (
    Bytes,
    ClassLabel,
    FieldType,
    Mask,
    Text,
    Value,
)
from penstock.readers.types import MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.readers.fields.columns import Column, SampleBatch
    from penstock.readers.types import Encoded

    Decode = Callable[[Encoded], Any]

_NO_MASK = np.zeros((0, 0), np.uint8)
_NO_MASK.flags.writeable = False


class Payloads:
    """Decodes those encoded columns that aren't images; on any thread.

    are_slow: they take a thread longer than to read and to check them; are_none: there are none.
    """

    def __init__(self, types: Mapping[str, FieldType], *, max_pixels: int = MAX_PIXELS) -> None:
        """types: of the fields that are read. max_pixels: of a mask."""
        decoders = {name: _decoder(type, max_pixels) for name, type in types.items()}
        self._decoders = {name: each for name, each in decoders.items() if each is not None}
        self.are_none = not self._decoders
        self.are_slow = any(isinstance(type, Mask) for type in types.values())
        kinds = [type for type in types.values() if not isinstance(type, Value | ClassLabel)]
        self._names_fields = len(kinds) > 1

    def reason(self, field: str, why: str) -> str:
        """Why a sample is bad: with the field in front where a sample has several that can be."""
        return f"{field}: {why}" if self._names_fields else why

    def __call__(self, content: SampleBatch, bad: dict[int, str]) -> SampleBatch:
        """The samples with these columns decoded; what is missing or bad is empty. bad: rows that
        are known to be; those that don't decode are added, with reasons."""
        if not self._decoders:
            return content
        columns: dict[str, Column] = {}
        for name, (decode, empty) in self._decoders.items():
            column = content.columns[name]
            if not isinstance(column, EncodedColumn):
                continue
            samples, present = list[Any](), content.present.get(name)
            for row, payload in enumerate(column.samples):
                value = empty
                if row not in bad and (present is None or present[row]):
                    try:
                        value = decode(payload)
                    except ValueError as error:
                        bad[row] = self.reason(name, str(error))
                samples.append(value)
            columns[name] = ListColumn(samples)
        return content.with_columns(columns)


def _decoder(type: FieldType, max_pixels: int) -> tuple[Decode, Any] | None:
    """How a payload is decoded, and what stands for one that isn't there; None: elsewhere."""
    if isinstance(type, Text):
        from penstock.readers.fields.decode import decode_text  # images need none of it

        return decode_text, ""
    if isinstance(type, Bytes):
        return _as_bytes, b""
    if isinstance(type, Mask):
        from penstock.readers.fields.decode import decode_mask

        return partial(decode_mask, dtype=type.dtype, max_pixels=max_pixels), _NO_MASK
    return None


def _as_bytes(payload: Encoded) -> bytes:
    return payload.tobytes()
