"""Batches of fields of many types, and Mappers over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import Map, check_maps, split_maps
from penstock.pipeline.feed import Mapper
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Bytes,
    ClassLabel,
    DenseColumn,
    EncodedColumn,
    Image,
    RaggedColumn,
    SampleBatch,
    Schema,
    Text,
    Tokens,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = Schema(
    {
        "image": Image(),
        "caption": Text(),
        "blob": Bytes(),
        "number": Value("int64"),
        "label": ClassLabel(("a", "b", "c")),
        "vector": Array("float32", (4,)),
        "signal": Array("float32", (None, 2)),
        "tokens": Tokens("int32"),
        "boxes": Boxes(of="image"),
    }
)


def batch_of(ids: Sequence[int]) -> SampleBatch:
    """Samples by their ids alone; those of ids that 5 divides lack their caption."""

    def encoded(make: Any) -> EncodedColumn:
        return EncodedColumn([np.frombuffer(make(i), np.uint8) for i in ids])

    def ragged(make: Any, empty: Any) -> RaggedColumn:
        like = RaggedColumn(empty, np.zeros(1, np.int64))
        return RaggedColumn.of([make(i) for i in ids], like=like)

    present = np.array([i % 5 != 0 for i in ids], np.bool_)
    return SampleBatch(
        ids=np.array(ids, np.int64),
        columns={
            "image": encoded(lambda i: b"\x89PNG" + bytes([i % 256])),
            "caption": encoded(lambda i: f"sample {i} é".encode() if i % 5 else b""),
            "blob": encoded(lambda i: bytes([i % 256] * 3)),
            "number": DenseColumn(np.array(ids, np.int64)),
            "label": DenseColumn(np.array([i % 3 for i in ids], np.int64)),
            "vector": DenseColumn(np.array([[i] * 4 for i in ids], np.float32).reshape(-1, 4)),
            "signal": ragged(
                lambda i: np.full((i % 4, 2), i, np.float32), np.zeros((0, 2), np.float32)
            ),
            "tokens": ragged(lambda i: np.arange(i % 3, dtype=np.int32), np.zeros(0, np.int32)),
            "boxes": ragged(
                lambda i: np.full((i % 2, 4), i, np.float32), np.zeros((0, 4), np.float32)
            ),
        },
        present={"caption": present},
    )


def mapper(*maps: Map, seed: int = 3, **options: Any) -> Mapper:
    found, _ = split_maps(list(maps))
    placed, _ = check_maps(found, SCHEMA)
    names: Any = lambda ids: [f"sample-{i}.png" for i in ids]  # noqa: E731
    return Mapper(placed, seed=seed, names=names, **options)


def values_of(batch: SampleBatch, field: str) -> list[Any]:
    """Each sample of a field in plain Python."""
    column: Any = batch.columns[field]
    if isinstance(column, DenseColumn):
        return list(column.values.tolist())
    if isinstance(column, RaggedColumn):
        return [column.sample(row).tolist() for row in range(len(column))]
    return list(column.samples)


def mapped(
    batch: SampleBatch, *maps: Map, epoch: int = 0, seed: int = 3
) -> tuple[SampleBatch, dict[int, str]]:
    one = mapper(*maps, seed=seed)
    bad: dict[int, str] = {}
    try:
        return one(batch, epoch=epoch, bad=bad), bad
    finally:
        one.close()
