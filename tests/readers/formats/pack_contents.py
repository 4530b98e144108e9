"""Contents of packs with every type of field, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers import Facts
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Bytes,
    ClassLabel,
    Image,
    Keypoints,
    Mask,
    MultiLabel,
    Schema,
    Text,
    Tokens,
    Value,
)
from penstock.readers.formats.pack import PackSample, ShardContent, pack_form

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import FieldType

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
        "planes": Array("complex64", (None, None)),
        "penstock": Value("int8"),
    }
)


def content(
    schema: Schema = EVERY, *, samples: int = 9, seed: int = 0, lacking: tuple[str, ...] = ()
) -> ShardContent:
    """Random samples; every third sample lacks the fields in `lacking`."""
    rng = np.random.default_rng(seed)
    made = []
    for row in range(samples):
        values, facts = {}, {}
        for name, type in schema.items():
            value = _value(rng, type)
            if name in lacking and row % 3 == 1:
                continue
            values[name] = value
            if type.is_encoded:
                shape, codec = ((4, 5, 3), "png") if type.has_sides else ((), type.codec)
                facts[name] = Facts(crc32c(value), 0, len(value), shape, codec)
        made.append(PackSample(values=values, facts=facts))
    return ShardContent(
        schema=schema,
        samples=made,
        source=np.arange(samples) + 100,
        names=[b"sample-%d" % row for row in range(samples)],
    )


def _value(rng: np.random.Generator, type: FieldType) -> NDArray[Any]:
    form = pack_form(type)
    if form.kind == "bytes":
        return rng.integers(97, 122, rng.integers(1, 30)).astype(np.uint8)
    lengths = (None, *form.row) if form.kind == "ragged" else form.row
    shape = tuple(int(rng.integers(0, 4)) if length is None else length for length in lengths)
    return np.asarray(rng.integers(0, 2, shape)).astype(form.dtype)


def stored_values(content: ShardContent, name: str) -> list[NDArray[Any]]:
    """The value that a shard stores of each sample: zeros, or nothing, if it lacks the field."""
    empty = pack_form(content.schema[name]).empty
    return [sample.values.get(name, empty) for sample in content.samples]
