"""Every kind of bad file is rejected with a reason; good ones among them are never lost."""

from __future__ import annotations

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from penstock.augment import verify_images
from penstock.cache import MissingDependencyError
from penstock.readers import ImageFacts, Rejection
from tests.conftest import photograph

HEIGHT, WIDTH = photograph(0).shape[:2]


def encode(mode="RGB", kind="JPEG", picture=None, **options):
    image = Image.fromarray(photograph(0)).convert(mode) if picture is None else picture
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    return encode(exif=exif)


def sixteen_bit():
    gray = photograph(0)[..., 0].astype(np.uint16) * 257
    return encode(kind="PNG", picture=Image.fromarray(gray))


def with_bytes(data, at, new):
    return data[:at] + new + data[at + len(new) :]


def whole_numbers():
    picture = Image.fromarray(photograph(0)[..., 0].astype(np.int32))
    return encode(kind="TIFF", picture=picture)


def huge_jpeg():
    data = encode()
    return with_bytes(data, data.index(b"\xff\xc0") + 5, b"\xff\xff\xff\xff")


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png():
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 99)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def damaged_png():
    data = encode(kind="PNG")
    return with_bytes(data, data.index(b"IDAT") + 300, b"\x00\xff\x00\xff")


GOOD = {
    "jpeg": (encode(), 3, "jpeg"),
    "gray": (encode("L"), 1, "jpeg"),
    "cmyk": (encode("CMYK"), 4, "jpeg"),
    "progressive": (encode(progressive=True), 3, "jpeg"),
    "png": (encode(kind="PNG"), 3, "png"),
    "palette": (encode("P", "PNG"), 3, "png"),
    "one bit": (encode("1", "PNG"), 1, "png"),
    "gray and alpha": (encode("LA", "PNG"), 2, "png"),
    "alpha": (encode("RGBA", "PNG"), 4, "png"),
    "sixteen bit": (sixteen_bit(), 1, "png"),
    "webp": (encode(kind="WEBP"), 3, "webp"),
    "bmp": (encode(kind="BMP"), 3, "bmp"),
    "tiff": (encode(kind="TIFF"), 3, "tiff"),
    "ppm": (encode(kind="PPM"), 3, "pnm"),
    "jpeg 2000": (encode(kind="JPEG2000"), 3, "jpeg2k"),
}
BAD = {
    "32 bit tiff": (whole_numbers(), "its samples are int32"),
    "empty": (b"", "empty"),
    "one byte": (b"\xff", "1 byte(s)"),
    "text": (b"path,label\n0001.jpg,3\n0002.jpg,4\n", "not an image"),
    "zeros": (b"\0" * 5000, "not an image"),
    "gif": (encode(kind="GIF"), "not an image of a format"),
    "jpeg without its last quarter": (encode()[: len(encode()) * 3 // 4], "truncated"),
    "jpeg without its last bytes": (encode()[:-30], "truncated"),
    "jpeg's header alone": (encode()[:200], "not an image|truncated"),
    "png without its end": (encode(kind="PNG")[:-600], "not an image|truncated"),
    "damaged png": (damaged_png(), "truncated or damaged"),
    "65535 x 65535 jpeg": (huge_jpeg(), "65535 x 65535 pixels; wanted"),
    "2147483647 x 2147483647 png": (huge_png(), "pixels; wanted|not an image"),
}


def array(data):
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("name", GOOD)
def test_good_images_have_facts(name):
    data, channels, codec = GOOD[name]
    wanted = ImageFacts(height=HEIGHT, width=WIDTH, channels=channels, codec=codec)
    assert verify_images([array(data)]) == [wanted]


def test_sizes_are_after_the_orientation():
    one_pixel = encode(picture=Image.new("RGB", (1, 1)))
    facts = verify_images([array(turned()), array(one_pixel)])
    assert [(fact.height, fact.width) for fact in facts] == [(WIDTH, HEIGHT), (1, 1)]


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_rejected_with_a_reason(name):
    data, reason = BAD[name]
    (verdict,) = verify_images([array(data)])
    assert isinstance(verdict, Rejection)
    assert any(part in verdict.reason for part in reason.split("|"))


def test_good_images_among_bad_ones_are_never_lost():
    kinds = [data for data, *_ in (GOOD | BAD).values()]
    rng = np.random.default_rng(0)
    rows = rng.permutation(np.tile(np.arange(len(kinds)), 6))
    verdicts = verify_images([array(kinds[row]) for row in rows])
    assert len(verdicts) == len(rows)
    for row, verdict in zip(rows, verdicts, strict=True):
        assert isinstance(verdict, ImageFacts) == (row < len(GOOD))


def test_a_large_header_allocates_nothing():
    bombs = [array(huge_jpeg()), array(huge_png())] * 20
    with open("/proc/self/statm") as before:
        pages = int(before.read().split()[1])
        assert all(isinstance(verdict, Rejection) for verdict in verify_images(bombs))
        with open("/proc/self/statm") as after:
            assert int(after.read().split()[1]) - pages < 100 * 2**20 // 4096


def test_pixels_are_capped_per_image_and_per_group():
    pictures = [array(encode()) for _ in range(10)]
    pixels = HEIGHT * WIDTH
    assert all(
        isinstance(verdict, ImageFacts) for verdict in verify_images(pictures, max_pixels=pixels)
    )
    assert all(
        isinstance(verdict, Rejection) for verdict in verify_images(pictures, max_pixels=pixels - 1)
    )


def test_an_empty_batch_is_verified():
    assert verify_images([]) == []


def test_wrong_use_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(MissingDependencyError, match="penstock"):
        verify_images([])
