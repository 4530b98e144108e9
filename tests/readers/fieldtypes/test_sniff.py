"""Images are recognised without decoding them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.readers import Rejection
from penstock.readers.fieldtypes import IMAGE_HEAD_BYTES, check_jpeg, sniff
from tests import images
from tests.properties import examples

PLAIN = images.jpeg(1, 40, 50, quality=95)
PROGRESSIVE = images.jpeg(2, 40, 50, progressive=True)
RESTARTS = images.jpeg(3, 40, 50, restart_marker_blocks=2)
COMMENTED = images.jpeg(4, comment=b"\xff\xd9 is no end here", exif=b"Exif\0\0" + PLAIN)
WHOLE = [PLAIN, PROGRESSIVE, RESTARTS, COMMENTED]


def check(data: bytes) -> Rejection | None:
    return check_jpeg(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("data", WHOLE)
def test_whole_jpegs_pass_with_anything_after_them(data: bytes) -> None:
    assert check(data) is None
    assert check(data + PLAIN[:100]) is None


@pytest.mark.parametrize("data", WHOLE)
def test_jpegs_cut_anywhere_are_rejected(data: bytes) -> None:
    for end in range(2, len(data)):
        assert check(data[:end]) is not None


@examples(100)
@given(data=st.binary(max_size=300))
def test_garbage_after_the_magic_never_raises(data: bytes) -> None:
    check(b"\xff\xd8\xff" + data)


def test_a_marker_that_cannot_be_in_a_scan_is_found() -> None:
    broken = check(images.with_corrupt_scan(PLAIN))
    assert broken is not None
    assert "corrupt" in broken.reason


@pytest.mark.parametrize(("name", "data"), images.GOOD.items())
def test_good_images_have_a_codec(name: str, data: bytes) -> None:
    ending = name.rpartition(".")[2]
    assert sniff(data[:IMAGE_HEAD_BYTES]) == {"jpg": "jpeg", "tif": "tiff"}.get(ending, ending)


@examples(100)
@given(head=st.binary(max_size=IMAGE_HEAD_BYTES))
def test_any_head_has_a_codec_or_a_reason(head: bytes) -> None:
    found = sniff(head)
    if isinstance(found, Rejection):
        assert found.reason
    else:
        assert found in {"bmp", "jpeg", "jpeg2000", "png", "pnm", "tiff", "webp"}
