"""Contents of packs with every type of field, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Bytes,
    ClassLabel,
    DenseColumn,
    EncodedColumn,
    Image,
    Keypoints,
    Mask,
    MultiLabel,
    RaggedColumn,
    Schema,
    Text,
    Tokens,
    Value,
)
from penstock.readers.formats.pack import PictureFacts, ShardContent, pack_form

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType

EVERY = Schema(
    {
        "image": Image(),
        "caption": Text(),
        "raw": Bytes(),
        "mask": Mask("image"),
        "label": ClassLabel(("cat", "dog")),
        "score": Value("float32"),
        "is_new": Value("bool"),
        "phase": Value("complex64"),
        "tags": MultiLabel(("x", "y", "z")),
        "vector": Array("float32", (64,)),
        "volume": Array("float16", (3, 4, 5)),
        "bits": Array("bool", (2, 3)),
        "complex": Array("complex128", (2,)),
        "nothing": Array("int8", (0,)),
        "scalar": Array("uint16", ()),
        "boxes": Boxes("image"),
        "points": Keypoints("image"),
        "tokens": Tokens("int32"),
        "series": Array("float64", (None,)),
        "waves": Array("complex64", (None,)),
        "flags": Array("bool", (None, 2)),
        "spectrum": Array("float32", (None, None)),
        "cube": Array("uint8", (None, 2, None)),
        "penstock": Value("int8"),
    }
)


def content(
    schema: Schema = EVERY, *, samples: int = 9, seed: int = 0, lacking: tuple[str, ...] = ()
) -> ShardContent:
    """Random samples; of the fields in `lacking` every third sample has nothing."""
    rng = np.random.default_rng(seed)
    gone = np.arange(samples) % 3 == 1
    columns = {
        name: _column(rng, type, samples, gone & (name in lacking)) for name, type in schema.items()
    }
    return ShardContent(
        schema=schema,
        columns=columns,
        pictures={
            name: PictureFacts(
                shapes=np.array([4, 5, 3]) * ~(gone & (name in lacking))[:, None],
                codecs=["png"] * samples,
            )
            for name, type in schema.items()
            if type.has_sides
        },
        present={name: ~gone for name in lacking},
        source=np.arange(samples) + 100,
        names=[b"sample-%d" % row for row in range(samples)],
    )


def _column(
    rng: np.random.Generator, type: FieldType, samples: int, gone: NDArray[np.bool_]
) -> Column:
    form = pack_form(type)
    if form.kind == "bytes":
        sizes = np.where(gone, 0, rng.integers(1, 30, samples))
        return EncodedColumn([rng.integers(97, 122, size).astype(np.uint8) for size in sizes])
    if not form.is_span:
        shape = (samples, *(length or 0 for length in form.row))
        values = rng.integers(0, 2, shape).astype(form.dtype)
        values[gone] = 0
        return DenseColumn(values)
    shape_of: tuple[Any, ...] = form.row if form.kind == "shaped" else (None, *form.row)
    arrays = []
    for is_gone in gone:
        shape = tuple(int(rng.integers(0, 4)) if length is None else length for length in shape_of)
        if is_gone:
            shape = tuple(0 if length is None else length for length in shape_of)
        arrays.append(rng.integers(0, 2, shape).astype(form.dtype))
    flat = [each.reshape(-1) if form.kind == "shaped" else each for each in arrays]
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in flat])))
    shapes = np.array([each.shape for each in arrays]) if form.kind == "shaped" else None
    return RaggedColumn(np.concatenate(flat), offsets, shapes)
