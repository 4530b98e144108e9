"""Hold one sample on its way into a pack, and turn samples into the columns of a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields import (
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
    image_fields,
    is_progressive,
)
from penstock.readers.formats.pack import PictureFacts, ShardContent, pack_forms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Column, Schema
    from penstock.readers.formats.pack import PackForm
    from penstock.readers.types import Encoded, Facts

    _Payloads = Sequence[Encoded | None]

_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSample:
    """One good sample, by field; a field that it lacks isn't there.

    payloads: of encoded fields, facts: of the same. arrays: of all others, in their own shape and
    dtype, as they are stored.
    """

    payloads: Mapping[str, Encoded]
    facts: Mapping[str, Facts]
    arrays: Mapping[str, NDArray[Any]]

    @property
    def fields(self) -> set[str]:
        """The names of those that it has."""
        return {*self.payloads, *self.arrays}


def payload_of(column: Column, row: int) -> Encoded:
    """The bytes of one sample of a field that is encoded."""
    if isinstance(column, EncodedColumn):
        return column.samples[row]
    assert isinstance(column, ListColumn)
    sample = column.samples[row]
    return np.frombuffer(sample.encode() if isinstance(sample, str) else sample, np.uint8)


def shard_content(
    samples: Sequence[PackSample],
    schema: Schema,
    *,
    source: NDArray[np.int64],
    names: Sequence[bytes],
) -> ShardContent:
    """What goes into a shard: n samples, at least one. source, names: of each, see there."""
    columns: dict[str, Column] = {}
    crcs: dict[str, NDArray[np.uint32]] = {}
    pictures: dict[str, PictureFacts] = {}
    present: dict[str, NDArray[np.bool_]] = {}
    images = image_fields(schema, schema)
    for name, form in pack_forms(schema).items():
        if form.kind == "bytes":
            payloads = [sample.payloads.get(name) for sample in samples]
            facts = [sample.facts.get(name) for sample in samples]
            there = np.array([each is not None for each in payloads], bool)
            columns[name] = EncodedColumn([_NOTHING if p is None else p for p in payloads])
            crcs[name] = np.array([0 if f is None else f.crc32c for f in facts], np.uint32)
            if form.is_picture:
                pictures[name] = _picture(facts, payloads if name in images else None)
        else:
            arrays = [sample.arrays.get(name) for sample in samples]
            there = np.array([each is not None for each in arrays], bool)
            columns[name] = _numbers(arrays, form)
        if not there.all():
            present[name] = there
    return ShardContent(
        schema=schema,
        columns=columns,
        crcs=crcs,
        pictures=pictures,
        present=present,
        source=source,
        names=names,
    )


def _picture(facts: Sequence[Facts | None], images: _Payloads | None) -> PictureFacts:
    shapes = [(0, 0, 0) if each is None else each.shape for each in facts]
    return PictureFacts(
        shapes=np.array(shapes, np.int64).reshape(len(facts), 3),
        codecs=["" if each is None else each.codec for each in facts],
        progressive=(
            None
            if images is None
            else sum(is_progressive(image) for image in images if image is not None)
        ),
    )


def _numbers(arrays: Sequence[NDArray[Any] | None], form: PackForm) -> Column:
    """A column of arrays; zeros, or nothing, where a sample has none."""
    if not form.is_span:
        values = np.zeros((len(arrays), *(length or 0 for length in form.row)), form.dtype)
        for row, each in enumerate(arrays):
            if each is not None:
                values[row] = each
        return DenseColumn(values)
    lengths = form.row if form.kind == "shaped" else (0, *form.row)
    nothing = np.empty(tuple(length or 0 for length in lengths), form.dtype)
    found = [nothing if each is None else each.astype(form.dtype, copy=False) for each in arrays]
    like = RaggedColumn(nothing, np.zeros(1, np.int64))
    if form.kind == "shaped":
        like = RaggedColumn(
            nothing.reshape(-1), np.zeros(1, np.int64), np.zeros((0, nothing.ndim), np.int64)
        )
    return RaggedColumn.of(found, like=like)
