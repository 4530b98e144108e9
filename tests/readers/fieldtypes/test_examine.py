"""Every field of a sample is checked completely, and a bad one has a reason."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture
from PIL import ImageFile

from penstock.readers import Facts, Rejection
from penstock.readers.fieldtypes import (
    Array,
    Audio,
    Boxes,
    Bytes,
    Image,
    Keypoints,
    Mask,
    Schema,
    Text,
    Tokens,
    Video,
    examine,
    strict_pillow,
    verify_for,
)
from tests import images
from tests.files import npy
from tests.properties import examples
from tests.readers.fieldtypes.arrays import encoded, npy_with, palette, picture

HEIGHT, WIDTH = 24, 32
CLASSES = (np.arange(HEIGHT * WIDTH) % 7).astype(np.uint8).reshape(HEIGHT, WIDTH)


def one(type, data, **options):
    """Examine the only field "x" of one sample."""
    (verdict,) = examine({"x": [encoded(data)]}, Schema({"x": type}), None, **options)
    return verdict if isinstance(verdict, Rejection) else verdict["x"]


def with_image(type, data, name="x"):
    """Examine a field of a sample with an image of 24 x 32."""
    schema = Schema({name: type, "image": Image()})
    samples = {"image": [encoded(images.jpeg(1))], name: [encoded(data)]}
    (verdict,) = examine(samples, schema, images.verify)
    return verdict if isinstance(verdict, Rejection) else verdict[name]


def reason(verdict) -> str:
    assert isinstance(verdict, Rejection), verdict
    return verdict.reason


def test_images_are_decoded_and_bad_ones_keep_their_place():
    samples = {
        "image": [encoded(images.jpeg(1)), encoded(b"<html>"), None, Rejection("it is gone")]
    }
    schema = Schema({"image": Image()})
    first, second, third, fourth = examine(samples, schema, images.verify)
    data = images.jpeg(1)
    assert first == {"image": Facts(crc32c(data), 0, len(data), (24, 32, 3), "jpeg")}
    assert reason(second).startswith("not an image")
    assert third == {}
    assert reason(fourth) == "it is gone"


def test_facts_stand_in_the_schemas_order_and_reasons_name_their_field():
    schema = Schema({"mask": Mask(of="right"), "left": Image(), "right": Image(), "t": Text()})
    samples = {
        "t": [encoded(b"one"), encoded(b"\xff")],
        "right": [encoded(images.jpeg(1)), encoded(images.jpeg(2))],
        "left": [encoded(images.jpeg(3)), encoded(images.jpeg(4))],
        "mask": [encoded(picture(palette(CLASSES)))] * 2,
    }
    good, bad = examine(samples, schema, images.verify)
    assert list(good) == ["mask", "left", "right", "t"]
    assert reason(bad).startswith("t: not UTF-8")


def test_text_is_utf8_without_its_byte_order_mark():
    assert one(Text(), b"") == Facts(0, 0, 0, (), "utf-8")
    data = "\ufeffein Hund, größer".encode()
    assert one(Text(), data) == Facts(crc32c(data[3:]), 3, len(data) - 3, (), "utf-8")
    assert "0xE9 at byte 3" in reason(one(Text(), "caf\u00e9".encode("latin-1")))
    assert "0xFF at byte 0" in reason(one(Text(), "a dog".encode("utf-16")))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_arrays_are_noted_by_dtype_shape_and_payload(version):
    array = np.arange(12, dtype=">f8").reshape(3, 4)
    for stored, codec in ((array, ">f8"), (np.asfortranarray(array), ">f8:F")):
        data = npy(stored, version=version)
        payload = stored.tobytes(order="A")
        start = len(data) - len(payload)
        found = one(Array(), data)
        assert found == Facts(crc32c(payload), start, len(payload), (3, 4), codec)
        assert one(Array("float64", (None, 4)), data) == found
    assert one(Array("int8", (0, 2)), npy(np.zeros((0, 2), np.int8))).size == 0
    assert one(Array(), npy(np.float32(3))).shape == ()


ODD_ARRAYS = {
    "empty": (b"", "empty file"),
    "not npy": (b"PK\x03\x04" + b"\0" * 60, "not an .npy file"),
    "cut": (npy(np.ones(9))[:-1], "takes 72 bytes, and 71 follow"),
    "more behind": (npy(np.ones(9)) + b"\0", "and 73 follow"),
    "cut header": (npy(np.ones(9))[:40], "header can't be read"),
    "version 9": (b"\x93NUMPY\x09\x00" + b"\0" * 60, "unknown version 9.0"),
    "objects": (npy(np.array([{}]), allow_pickle=True), "pickled and never loaded"),
    "records": (npy(np.zeros(2, "i4,f4")), "structured"),
    "strings": (npy(np.array(["a"])), "dtype '<U1'"),
    "dates": (npy(np.zeros(2, "M8[s]")), "dtype '<M8[s]'"),
    "code": (npy_with("__import__('os').abort()"), "header can't be read"),
    "nested": (npy_with("(" * 4000), "header can't be read"),
    "huge": (
        npy_with("{'descr':'<f8','fortran_order':False,'shape':(1099511627776,1099511627776)}"),
        "takes",
    ),
    "negative": (npy_with("{'descr':'<f8','fortran_order':False,'shape':(-1,)}"), "shape"),
    "booleans": (npy(np.array([True]))[:-1] + b"\x07", "neither 0 nor 1"),
    "long header": (npy_with(" " * 20_000), "a header of 20,000 bytes"),
}


@pytest.mark.parametrize(("data", "words"), ODD_ARRAYS.values(), ids=ODD_ARRAYS)
def test_odd_npy_files_are_refused_and_never_opened(data, words):
    assert words in reason(one(Array(), data))


def test_a_difference_from_the_schema_names_both_sides_and_the_remedy():
    data = npy(np.ones((5, 3), np.float32))
    words = reason(one(Array("float32", (4, 3)), data))
    assert "(5, 3)" in words
    assert "(4, 3)" in words
    assert 'schema={"x": Array("float32", (None, 3))}' in words
    assert 'Array("float32", (None, 3))' in reason(one(Array("float64", (4, 3)), data))
    assert "(5, 3)" in reason(one(Array("float32", (15,)), data))
    assert isinstance(one(Tokens("int64"), npy(np.arange(4))), Facts)
    assert "int64" in reason(one(Tokens("uint16"), npy(np.arange(4))))


MASKS = {
    "palette": (palette(CLASSES), "PNG", "png"),
    "grey": (Picture.fromarray(CLASSES), "PNG", "png"),
    "one bit": (Picture.fromarray(CLASSES > 3), "PNG", "png"),
    "16 bit": (Picture.fromarray(CLASSES.astype(np.uint16) * 1000), "PNG", "png:i4"),
    "32 bit": (Picture.fromarray(CLASSES.astype(np.int32) * 10**8), "TIFF", "tiff:i4"),
    "bmp": (palette(CLASSES), "BMP", "bmp"),
    "pgm": (Picture.fromarray(CLASSES), "PPM", "pnm"),
}


@pytest.mark.parametrize(("image", "kind", "codec"), MASKS.values(), ids=MASKS)
def test_masks_have_their_images_size(image, kind, codec):
    data = picture(image, kind)
    wanted = Facts(crc32c(data), 0, len(data), (HEIGHT, WIDTH, 1), codec)
    assert with_image(Mask(of="image"), data) == wanted
    words = reason(with_image(Mask(of="image"), picture(image.resize((31, 24)), kind)))
    assert words == "x: it is 31 wide and 24 high, and its image is 32 wide and 24 high"


def test_masks_may_be_arrays_of_integers():
    for dtype, codec in (("bool", "npy"), ("uint8", "npy"), ("int16", "npy:i4"), (">i8", "npy:i4")):
        data = npy(CLASSES.astype(dtype))
        wanted = Facts(crc32c(data), 0, len(data), (HEIGHT, WIDTH, 1), codec)
        assert with_image(Mask(of="image"), data) == wanted
    assert "float32" in reason(with_image(Mask(of="image"), npy(CLASSES.astype(np.float32))))
    assert "one class a pixel" in reason(
        with_image(Mask(of="image"), npy(np.stack([CLASSES] * 3, axis=2)))
    )
    assert "32 bits" in reason(with_image(Mask(of="image"), npy(CLASSES.astype(int) << 40)))


WINDOWS = picture(palette(CLASSES), "BMP")
ODD_MASKS = {
    "colours": (picture(palette(CLASSES).convert("RGB")), "several channels (RGB)"),
    "jpeg": (images.jpeg(1), "JPEG, WebP and GIF change"),
    "gif": (picture(palette(CLASSES), "GIF"), "match no lossless format"),
    "floats": (picture(Picture.fromarray(CLASSES.astype(np.float32)), "TIFF"), "floats"),
    "cut": (picture(palette(CLASSES))[:-60], "doesn't decode"),
    "inverted": (picture(Picture.fromarray(CLASSES), "TIFF", tiffinfo={262: 0}), "0 is white"),
    "pages": (
        picture(
            Picture.fromarray(CLASSES),
            "TIFF",
            save_all=True,
            append_images=[Picture.fromarray(CLASSES)],
        ),
        "several pictures",
    ),
    "huge": (WINDOWS[:18] + b"\x00\x00\x10\x00" * 2 + WINDOWS[26:], "1048576 x 1048576 pixels"),
    "few greys": (b"P5 # by hand\n32 24\n7\n" + CLASSES.tobytes(), "neither 255 nor 65535"),
    "nothing": (b"", "empty file"),
}


@pytest.mark.parametrize(("data", "words"), ODD_MASKS.values(), ids=ODD_MASKS)
def test_a_wrong_mask_names_the_remedy(data, words):
    assert words in reason(with_image(Mask(of="image"), data))


def test_a_mask_needs_its_image_and_the_depth_of_the_schema():
    schema = Schema({"image": Image(), "mask": Mask(of="image")})
    (verdict,) = examine(
        {"image": [None], "mask": [encoded(picture(palette(CLASSES)))]}, schema, images.verify
    )
    assert reason(verdict) == 'mask: a mask without its image ("image")'
    deep = picture(Picture.fromarray(CLASSES.astype(np.uint16)))
    assert "8 bits" in reason(with_image(Mask(of="image", dtype="uint8"), deep))


def test_truncated_files_are_rejected_and_pillows_switch_is_restored(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with strict_pillow():
        noise = np.random.default_rng(0).integers(0, 9, (HEIGHT, WIDTH), np.uint8)
        cut = picture(palette(noise))[:-100]
        assert "doesn't decode" in reason(with_image(Mask(of="image"), cut))
        assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_boxes_are_finite_ordered_and_touch_their_image():
    type = Boxes(of="image", format="xywh")
    assert with_image(type, npy(np.array([[-5, -5, 10.0, 10]]))).shape == (1, 4)
    assert with_image(type, npy(np.zeros((0, 4)))).shape == (0, 4)
    assert with_image(type, npy(np.zeros(0))).shape == (0, 4)
    assert with_image(type, npy(np.array([[0, 0, 0, 0]]))).codec == "<i8"
    far = reason(with_image(type, npy(np.array([[0, 0, 1, 1], [40, 0, 4, 4]]))))
    assert far.startswith("x: box 1 lies outside its image: (40, 0, 4, 4) (xywh)")
    assert "32 wide and 24 high" in far
    assert "inverted" in reason(with_image(type, npy(np.array([[3.0, 3, -1, 2]]))))
    assert "finite" in reason(with_image(type, npy(np.array([[3.0, 3, np.nan, 2]]))))
    assert "finite" in reason(with_image(type, npy(np.array([[1e300, 3, 1, 2]]))))
    assert "shape (k, 4)" in reason(with_image(type, npy(np.ones((3, 5)))))
    assert "inverted" in reason(with_image(Boxes(of="image"), npy(np.array([[3.0, 3, 1, 2]]))))
    assert with_image(Keypoints(of="image"), npy(np.array([[-1, 99]]))).shape == (1, 2)
    assert "finite" in reason(with_image(Keypoints(of="image"), npy(np.array([[np.inf, 0]]))))


def test_boxes_of_a_table_are_checked_against_the_image():
    schema = Schema(
        {
            "image": Image(),
            "boxes": Boxes(of="image"),
            "classes": Array("int64", (None,), of="boxes"),
        }
    )
    samples = {"image": [encoded(images.jpeg(i)) for i in range(4)]}
    boxes = [np.array([[0, 0, 9, 9]]), np.array([[90, 0, 99, 9]]), None, np.ones((2, 4))]
    classes = [np.array([1]), np.array([1]), None, np.array([1])]
    noted = {"boxes": boxes, "classes": classes}
    good, far, without, short = examine(samples, schema, images.verify, noted=noted)
    assert list(good) == list(without) == ["image"]
    assert reason(far).startswith("boxes: box 0 lies outside its image: (90, 0, 99, 9)")
    assert reason(short) == 'classes: 1 rows for the 2 boxes of "boxes"'


def test_sound_video_and_bytes_are_not_checked():
    for type in (Audio(), Video(), Bytes()):
        assert one(type, b"anything") == Facts(crc32c(b"anything"), 0, 8, (), "bytes")


def test_only_images_need_a_decoder(monkeypatch):
    monkeypatch.setitem(sys.modules, "penstock.augment.verify", None)
    assert verify_for(Schema({"x": Text()}), None, workers=1) is None
    assert verify_for(Schema({"x": Image()}), images.verify, workers=1) is images.verify


HEADS = [
    b"",
    b"\x89PNG\r\n\x1a\n",
    b"II*\0",
    b"BM",
    b"P5 ",
    b"\x93NUMPY\x01\0v\0{",
    b"RIFF",
    b"\xff",
]


@examples(150)
@given(
    head=st.sampled_from([*HEADS, npy(np.ones((2, 4)))[:90], picture(palette(CLASSES))[:60]]),
    data=st.binary(max_size=80),
)
def test_any_bytes_have_facts_or_a_reason(head, data):
    sample = encoded(head + data)
    types = [Text(), Bytes(), Audio(), Video(), Array(), Tokens(), Mask(of="i"), Boxes(of="i")]
    for type in (*types, Keypoints(of="i")):
        schema, samples = {"x": type}, {"x": [sample]}
        if hasattr(type, "of") and type.of:
            schema["i"], samples["i"] = Image(), [encoded(images.GOOD["one.png"])]
        (verdict,) = examine(samples, Schema(schema), images.verify)
        if isinstance(verdict, Rejection):
            assert verdict.reason
        else:
            found = verdict["x"]
            payload = sample[found.start : found.start + found.size]
            assert crc32c(payload) == found.crc32c
