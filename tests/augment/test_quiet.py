"""Odd files leave the process's standard error alone; their reasons say what was found."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.augment import verify_images
from penstock.readers import Rejection
from penstock.readers.fields import Image, Mask, Schema, check_masks
from tests import images
from tests.augment.test_second_look import NOISE, holed

pytest.importorskip("nvidia.dali")

SMOOTH = images.picture(1, 60, 80, "L")
ZIPPED = holed(images.encoded(SMOOTH, "TIFF", compression="tiff_adobe_deflate"), 0.2)


def test_decoders_write_nothing_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    png = images.encoded(NOISE, "PNG")
    jpeg = images.jpeg(1)
    odd = [
        ZIPPED,
        holed(png),
        png[:-300],
        images.rle_bmp([bytes((9, 50))] * 5, 7),
        jpeg[:-9] + bytes(3) + jpeg[-2:],  # libjpeg: premature end of data segment
    ]
    verdicts = verify_images([np.frombuffer(data, np.uint8) for data in odd], threads=1)
    assert isinstance(verdicts[0], Rejection)
    assert all(isinstance(each, Rejection) for each in verdicts[2:4])
    assert "data check" in verdicts[0].reason or "Decoding error" in verdicts[0].reason
    assert capfd.readouterr().err == ""


def test_masks_too(capfd: pytest.CaptureFixture[str]) -> None:
    schema = Schema({"image": Image(), "mask": Mask(of="image")})
    (verdict,) = check_masks({"mask": [np.frombuffer(ZIPPED, np.uint8)]}, schema)["mask"]
    assert isinstance(verdict, Rejection)
    assert "Decoding error" in verdict.reason
    assert capfd.readouterr().err == ""
