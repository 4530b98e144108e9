"""The samples settle the types that a schema leaves open; types that differ are an error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import DatasetError
from penstock.readers import Facts
from penstock.readers.fields import Array, Image, Mask, Schema, Settling, Text

UNKNOWN = Schema({"x": Array()})


def settle(schema, samples):
    settling = Settling(schema)
    for name, facts in samples:
        settling.add(facts, sample=name)
    return settling.schema()


def array(shape, dtype="<f4"):
    return {"x": Facts(0, 0, 4 * int(np.prod(shape)), shape, dtype)}


@given(
    shapes=st.integers(0, 3).flatmap(
        lambda n: st.lists(st.tuples(*[st.integers(0, 3)] * n), min_size=1, max_size=6)
    )
)
def test_lengths_that_differ_are_ragged(shapes):
    settled = settle(UNKNOWN, [(str(i), array(shape)) for i, shape in enumerate(shapes)])
    lengths = zip(*shapes, strict=True)
    wanted = tuple(each[0] if len(set(each)) == 1 else None for each in lengths)
    assert settled == Schema({"x": Array("float32", wanted)})


def test_byte_orders_are_one_dtype():
    assert settle(UNKNOWN, [("a", array((2,), ">f4")), ("b", array((2,), "<f4:F"))]) == Schema(
        {"x": Array("float32", (2,))}
    )


@pytest.mark.parametrize("other", [array((2,), "<f8"), array((2,), "<i4"), array((2, 1))])
def test_drift_names_both_samples_and_what_to_pass(other):
    with pytest.raises(DatasetError) as caught:
        settle(UNKNOWN, [("a.npy", array((2,))), ("b.npy", other)])
    for words in ("float32 of shape (2,) in a.npy", "in b.npy", 'schema={"x": Array("float32"'):
        assert words in str(caught.value)


def test_the_types_of_the_user_are_kept():
    known = Schema({"t": Text(), "x": Array("float32", (None, 3))})
    assert Settling(known).is_done
    assert settle(known, [("a", array((4, 3)))]) == known
    half = Schema({"x": Array(shape=(None, 3))})
    assert settle(half, [("a", array((4, 3)))]) == Schema({"x": Array("float32", (None, 3))})


def test_masks_are_as_wide_as_the_widest():
    schema = Schema({"image": Image(), "mask": Mask(of="image")})

    def mask(codec):
        return {"mask": Facts(0, 0, 0, (1, 1, 1), codec)}

    def dtype(*codecs):
        settled = settle(schema, [("", mask(codec)) for codec in codecs])
        return settled.of_type(Mask)["mask"].dtype

    assert dtype() == dtype("png", "npy") == "uint8"
    assert dtype("png", "png:i4", "png") == dtype("npy:i4") == "int32"
