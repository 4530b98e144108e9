"""Decoding returns the stored values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image as Picture

from penstock.readers import Rejection
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Image,
    Mask,
    Schema,
    Text,
    decode_array,
    examine,
    to_xyxy,
)
from tests import images
from tests.files import npy
from tests.properties import examples
from tests.readers.fieldtypes.arrays import encoded, palette, picture

DTYPES = [f"{order}{kind}" for order in "<>" for kind in ("i2", "i8", "u4", "f2", "f8", "c16")]


def read(type, data, name="x"):
    """Return the payload, codec and shape of one field of one good sample."""
    fields, samples = {name: type}, {name: [encoded(data)]}
    if isinstance(type, Mask | Boxes):
        fields["image"], samples["image"] = Image(), [encoded(images.jpeg(0, 8, 6))]
    (facts,) = examine(samples, Schema(fields), images.verify)
    assert not isinstance(facts, Rejection)
    found = facts[name]
    payload = encoded(data)[found.start : found.start + found.size]
    return payload, found.codec, found.shape


arrays = st.sampled_from([*DTYPES, "|b1", "|i1", "|u1"]).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    )
)


@given(array=arrays, is_fortran=st.booleans())
def test_arrays_of_any_dtype_shape_and_order_are_decoded_unchanged(array, is_fortran):
    stored = np.asfortranarray(array) if is_fortran and array.ndim else array
    found = decode_array(*read(Array(), npy(stored)))
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.shape == array.shape
    assert found.flags.c_contiguous
    assert found.tobytes() == array.astype(found.dtype).tobytes()


@given(codec=st.text(max_size=6), shape=st.lists(st.integers(-3, 2**62), max_size=3))
def test_any_codec_and_shape_decodes_or_raises_a_value_error(codec, shape):
    try:
        decode_array(encoded(b"12345678"), codec, shape)
    except ValueError:
        return


def mask_of(data):
    """Decode a mask from the payload of its facts."""
    payload, codec, shape = read(Mask(of="image"), data)
    found = Mask(of="image").decode(payload)
    assert (found.dtype.name, (*found.shape, 1)) == (
        "int32" if codec.endswith(":i4") else "uint8",
        tuple(shape),
    )
    return found


masks = st.sampled_from([1, 2, 4, 8, 16]).flatmap(
    lambda bits: st.tuples(
        st.just(bits), hnp.arrays(np.uint16, (8, 6), elements=st.integers(0, 2**bits - 1))
    )
)


def grey_png(classes, bits):
    """Return a grey PNG of some bits; Pillow writes 2 and 4 bits as palettes only."""
    import struct
    import zlib

    height, width = classes.shape
    places = (classes[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    rows = np.packbits(places.reshape(height, -1).astype(np.uint8), axis=1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind, data):
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@examples(60)
@given(mask=masks)
def test_grey_masks_of_any_depth_are_decoded_unchanged(mask):
    bits, classes = mask
    found = mask_of(grey_png(classes, bits))
    assert found.dtype == (np.int32 if bits == 16 else np.uint8)
    assert np.array_equal(found, classes)


@examples(60)
@given(
    classes=hnp.arrays(np.uint8, (8, 6)),
    kind=st.sampled_from(["PNG", "TIFF", "BMP"]),
    bits=st.sampled_from([1, 2, 4, 8]),
)
def test_palettes_keep_their_numbers(classes, kind, bits):
    classes = classes & (2**bits - 1)
    options = {"bits": bits} if kind == "PNG" else {}
    data = picture(palette(classes), kind, **options)
    assert np.array_equal(mask_of(data), classes)


@given(
    classes=st.sampled_from(["|b1", "|i1", "|u1", ">u2", "<i8"]).flatmap(
        lambda dtype: hnp.arrays(dtype, (8, 6), elements=st.integers(0, 1))
    )
)
def test_array_masks_are_equal_and_may_be_widened(classes):
    payload, _, _ = read(Mask(of="image"), npy(classes))
    found = Mask(of="image").decode(payload)
    assert found.dtype == (np.uint8 if classes.dtype.str in ("|b1", "|u1") else np.int32)
    assert np.array_equal(found, classes)
    assert Mask(of="image", dtype="int32").decode(payload).dtype == np.int32


def test_a_turned_mask_is_turned_upright():
    exif = Picture.Exif()
    exif[0x0112] = 6
    classes = np.arange(48, dtype=np.uint8).reshape(6, 8)
    data = picture(palette(classes), exif=exif)
    assert np.array_equal(mask_of(data), np.rot90(classes, -1))


def test_a_damaged_mask_raises_a_value_error():
    data = encoded(picture(palette(np.zeros((8, 6), np.uint8))))
    floats = encoded(npy(np.zeros((8, 6))))
    for bad in (data[:-30], floats, encoded(b"x" * 99)):
        with pytest.raises(ValueError, match=r"mask|truncated or damaged"):
            Mask(of="image").decode(bad)
    with pytest.raises(ValueError, match="header"):
        Mask(of="image").decode(floats[:-1])
    deep, _, _ = read(Mask(of="image"), npy(np.zeros((8, 6), np.int32)))
    with pytest.raises(ValueError, match="8 bits"):
        Mask(of="image", dtype="uint8").decode(deep)


@given(text=st.text(st.characters(exclude_categories=["Cs"])), is_marked=st.booleans())
def test_texts_are_decoded_unchanged(text, is_marked):
    is_marked = is_marked or text.startswith("\ufeff")  # one mark is removed
    payload, _, _ = read(Text(), ("\ufeff" * is_marked + text).encode())
    assert Text().decode(payload) == text
    with pytest.raises(ValueError, match="UTF-8"):
        Text().decode(encoded(text.encode() + b"\xc3"))


corners = hnp.arrays(np.int16, (3, 4), elements=st.integers(-2, 5))


@given(corners=corners)
def test_boxes_of_each_format_are_the_same_boxes(corners):
    low, high = (
        np.minimum(corners[:, :2], corners[:, 2:]),
        np.maximum(corners[:, :2], corners[:, 2:]),
    )
    high = np.maximum(high, 0)
    wanted = np.concatenate((low, high), axis=1)
    forms = {
        "xyxy": wanted,
        "xywh": np.concatenate((low, high - low), axis=1),
        "cxcywh": np.concatenate(((low + high) / 2, high - low), axis=1),
    }
    for format, stored in forms.items():
        payload, codec, shape = read(Boxes(of="image", format=format), npy(stored))
        found = to_xyxy(decode_array(payload, codec, shape), format)
        assert found.dtype == np.float32
        assert np.array_equal(found, wanted)
