"""Test codecs of arrays, numbers as bits in a table, and checksums of joined bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from penstock.readers import Facts, array_codec
from penstock.readers.fieldtypes import (
    ARRAY_CODECS,
    ArrayForm,
    as_bits,
    bare_facts,
    codec_number,
    from_bits,
)

NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


FLOATS = ("float16", "float32", "float64", "complex64")


@pytest.mark.parametrize("dtype", [*NUMBERS, *FLOATS])
def test_numbers_survive_the_bits_of_a_table(dtype: str) -> None:
    kind = np.dtype(dtype)
    extremes: list[Any] = [0, 1]
    if kind.kind in "iu":
        extremes += [np.iinfo(kind).min, np.iinfo(kind).max]
    elif kind.kind in "fc":
        extremes += [-0.0, np.nan, np.inf, -np.inf, np.finfo(kind).max, np.finfo(kind).tiny]
    values = np.array(extremes, kind)
    table = np.stack([as_bits(values), as_bits(values)], axis=1)
    assert table.dtype == np.int64
    again = from_bits(table[:, 1], kind)
    assert again.dtype == kind
    assert np.array_equal(again, values, equal_nan=kind.kind in "fc")


def test_every_codec_has_a_number() -> None:
    assert [codec_number(codec) for codec in ARRAY_CODECS] == list(range(len(ARRAY_CODECS)))
    assert all(str(array_codec(codec)) == codec for codec in ARRAY_CODECS)
    with pytest.raises(ValueError, match="isn't an array's codec"):
        codec_number("|O8")


def test_bare_numbers_have_the_shape_that_their_bytes_fill() -> None:
    data = np.arange(24, dtype=np.uint8)
    form = ArrayForm(np.dtype("int16"), (None, 3))
    assert bare_facts(data, form, "<i2") == Facts(crc32c(data), 0, 24, (4, 3), "<i2")
    fixed = ArrayForm(np.dtype("int16"), (2, 3))
    for wrong, of in ((data[:-1], form), (data, fixed), (data[:0], fixed)):
        with pytest.raises(ValueError, match="truncated"):
            bare_facts(wrong, of, "<i2")
    assert bare_facts(data[:12], fixed, "<i2") == Facts(crc32c(data[:12]), 0, 12, (2, 3), "<i2")
