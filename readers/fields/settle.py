"""Settling a schema: what arrays and masks are, once all samples were seen.

Lengths that differ are ragged; a dtype or a number of dimensions that differs is an error, as no
batch could hold both, and nothing is cast unasked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache.errors import DatasetError
from penstock.readers.fields.facts import array_codec
from penstock.readers.fields.field_types import AUTO_DTYPE, Array, Mask
from penstock.readers.fields.fit import advice, widened
from penstock.readers.fields.masks import mask_dtype
from penstock.readers.fields.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.readers.fields.facts import Facts
    from penstock.readers.fields.field_types import FieldType


@dataclass(frozen=True, slots=True)
class _First:
    """An array that was seen first, for the message."""

    sample: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape} in {self.sample}"


class Settling:
    """Sees the facts of all good samples, one after another, and knows the schema then."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._open = schema.unsettled
        self._found: dict[str, FieldType] = {}
        self._first: dict[str, _First] = {}

    @property
    def is_done(self) -> bool:
        """Whether nothing has to be seen, as the schema is settled already."""
        return not self._open

    def see(self, facts: Mapping[str, Facts], *, sample: str) -> None:
        """Take one good sample into account. sample: its name for people. Raises DatasetError
        (schema drift)."""
        for name in self._open:
            if name not in facts:
                continue
            if isinstance(type := self._schema[name], Mask):
                self._see_mask(name, type, mask_dtype(facts[name].codec))
                continue
            codec = array_codec(facts[name].codec)
            assert codec is not None
            assert isinstance(type, Array)
            self._see_array(name, type, _First(sample, codec.name, facts[name].shape))

    def _see_mask(self, name: str, type: Mask, dtype: str) -> None:
        found = self._found.get(name)
        if found is None or dtype == "int32":
            self._found[name] = replace(type, dtype=dtype)

    def _see_array(self, name: str, type: Array, seen: _First) -> None:
        found, first = self._found.get(name), self._first.setdefault(name, seen)
        if found is None:
            self._found[name] = replace(
                type,
                dtype=seen.dtype if type.dtype == AUTO_DTYPE else type.dtype,
                shape=seen.shape if type.shape is None else type.shape,
            )
            return
        assert isinstance(found, Array)
        assert found.shape is not None
        if found.dtype != seen.dtype or len(found.shape) != len(seen.shape):
            wanted = advice(name, replace(type, dtype=found.dtype, shape=found.shape))
            raise DatasetError(
                f'The field "{name}" is {first}, and {seen}: a field has one dtype and number of '
                f"dimensions. Convert the others, or say which is meant and quarantine the others: "
                f"{wanted}."
            )
        if type.shape is None and found.shape != seen.shape:
            self._found[name] = replace(found, shape=widened(found.shape, seen.shape))

    def schema(self) -> Schema:
        """The settled schema. What no sample has is taken for empty float32, masks for uint8."""
        none: dict[str, FieldType] = {
            name: _of_none(type) for name, type in self._schema.items() if name in self._open
        }
        fields = {**dict(self._schema), **none, **self._found}
        return Schema({name: fields[name] for name in self._schema})


def settle(schema: Schema, samples: Iterable[tuple[str, Mapping[str, Facts]]]) -> Schema:
    """Settle a schema by all good samples: their names for people, and facts. Raises
    DatasetError (schema drift)."""
    settling = Settling(schema)
    if not settling.is_done:
        for name, facts in samples:
            settling.see(facts, sample=name)
    return settling.schema()


def _of_none(type: FieldType) -> FieldType:
    if isinstance(type, Mask):
        return replace(type, dtype="uint8")
    assert isinstance(type, Array)
    return replace(
        type,
        dtype="float32" if type.dtype == AUTO_DTYPE else type.dtype,
        shape=(0,) if type.shape is None else type.shape,
    )
