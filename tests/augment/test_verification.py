"""Test that training decodes what verification accepts, and that odd images are reported: values of
more than 8 bits, and damage.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from penstock.augment import Graph, GraphPlan, RandomResizedCrop, check_recipe, draw, verify_images
from penstock.readers import EncodedBatch, ImageFacts, ImageRange, Rejection
from penstock.readers.fieldtypes import Image as ImageField
from penstock.readers.fieldtypes import Mask, Schema, check_files
from tests import images

if TYPE_CHECKING:
    from penstock.readers import Encoded


pytest.importorskip("nvidia.dali")


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8))


ROWS = [bytes((width, 50)) for width in (7, 7, 7, 7, 7)]


WHOLE = {
    "rle.bmp": images.rle_bmp(ROWS, 7),
    "early.bmp": images.rle_bmp([bytes((3, 50)), b""], 7),
    "grey.bmp": images.encoded(NOISE.convert("L"), "BMP"),
    "one.bmp": images.encoded(NOISE.crop((0, 0, 1, 1)), "BMP"),
    "lzw.tif": images.encoded(NOISE, "TIFF", compression="tiff_lzw"),
    "zip.tif": images.encoded(NOISE, "TIFF", compression="tiff_adobe_deflate"),
    "jpeg.tif": images.encoded(NOISE, "TIFF", compression="jpeg"),
    "strip.tif": images.encoded(NOISE.crop((0, 0, 80, 1)), "TIFF"),
    "film.png": images.encoded(NOISE, "PNG", save_all=True, append_images=[NOISE.rotate(90)]),
    "film.webp": images.encoded(NOISE, "WEBP", save_all=True, append_images=[NOISE.rotate(90)]),
    "lossless.webp": images.encoded(NOISE, "WEBP", lossless=True),
}


def holed(data: bytes, share: float = 0.5) -> bytes:
    """A file that was overwritten in its middle, or elsewhere."""
    at = int(len(data) * share)
    return data[:at] + bytes(60) + data[at + 60 :]


DAMAGED = {
    # DALI takes the palette for pixels, but not where it decodes a window.
    "overflow.bmp": images.rle_bmp([bytes((9, 50))] * 5, 7),
    "cut.bmp": WHOLE["grey.bmp"][:-200],
    "cut.tif": images.encoded(NOISE, "TIFF")[:-99],
    # DALI returns uninitialised rows.
    "hole-lzw.tif": holed(WHOLE["lzw.tif"]),
    "hole-zip.tif": holed(WHOLE["zip.tif"]),
    "hole-film.png": holed(WHOLE["film.png"], 0.2),
    "cut.webp": WHOLE["lossless.webp"][:-2000],
}


def array(data: bytes) -> Encoded:
    return np.frombuffer(data, np.uint8)


def test_whole_files_of_odd_kinds_pass() -> None:
    verdicts = dict(
        zip(WHOLE, verify_images([array(data) for data in WHOLE.values()]), strict=True)
    )
    assert {n for n, each in verdicts.items() if not isinstance(each, ImageFacts)} == set()


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_that_a_decoder_passes_over_is_found(name: str) -> None:
    good = array(WHOLE["lzw.tif"])
    verdicts = verify_images([good, array(DAMAGED[name]), good])
    assert [type(each) for each in verdicts] == [ImageFacts, Rejection, ImageFacts]
    assert "damaged" in verdicts[1].reason


def test_channels_that_a_decoder_mixes_up_are_refused() -> None:
    tifffile = pytest.importorskip("tifffile")
    planes = io.BytesIO()
    options = {"photometric": "rgb", "planarconfig": "separate", "extrasamples": ["unassalpha"]}
    pixels = np.array(NOISE.convert("RGBA")).transpose(2, 0, 1)
    tifffile.imwrite(planes, np.ascontiguousarray(pixels), **options)
    two = images.encoded(NOISE.convert("LA"), "TIFF")
    verdicts = verify_images([array(two), array(planes.getvalue())])
    assert [isinstance(each, Rejection) and each.reason[:6] for each in verdicts] == ["a TIFF"] * 2


def flips(data: bytes, count: int, seed: int) -> list[bytes]:
    """Copies of a file, a few bits of each turned over."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        flipped = np.frombuffer(data, np.uint8).copy()
        at = rng.integers(min(54, len(flipped) - 4), len(flipped), 3)
        flipped[at] ^= (1 << rng.integers(0, 8, 3)).astype(np.uint8)
        out.append(flipped.tobytes())
    return out


@pytest.mark.parametrize("name", WHOLE)
def test_every_window_of_what_passes_decodes(name: str) -> None:
    files = [array(data) for data in flips(WHOLE[name], 40, seed=len(name))]
    verdicts = verify_images(files)
    assert [type(each) for each in verify_images(files[::-1])] == [type(e) for e in verdicts[::-1]]
    passed = [
        (file, (facts.height, facts.width))
        for file, facts in zip(files, verdicts, strict=True)
        if isinstance(facts, ImageFacts) and facts.height * facts.width < 10**6
    ]
    if not passed:
        return
    batch = EncodedBatch(
        ids=np.arange(len(passed)),
        encoded=[file for file, _ in passed],
        dims=np.array([size for _, size in passed], np.int32),
    )
    low, high = batch.dims.min(axis=0), batch.dims.max(axis=0)
    sizes = ImageRange(
        min_height=int(low[0]),
        max_height=int(high[0]),
        min_width=int(low[1]),
        max_width=int(high[1]),
    )
    recipe = check_recipe((RandomResizedCrop(16),), images=sizes)
    graph = Graph(GraphPlan(recipe, batch_size=40, threads=2))
    for epoch in range(3):
        graph.feed(batch, draw(recipe, ids=batch.ids, dims=batch.dims, seed=1, epoch=epoch))
        assert graph.outputs_marked().bad == {}
    graph.close()


SMOOTH = images.picture(1, 60, 80, "L")


ZIPPED = holed(images.encoded(SMOOTH, "TIFF", compression="tiff_adobe_deflate"), 0.2)


def test_damaged_files_are_rejected() -> None:
    png = images.encoded(NOISE, "PNG")
    odd = [ZIPPED, png[:-300], images.rle_bmp([bytes((9, 50))] * 5, 7)]
    verdicts = verify_images([np.frombuffer(data, np.uint8) for data in odd], threads=1)
    assert all(isinstance(each, Rejection) for each in verdicts)


def test_masks_too() -> None:
    schema = Schema({"image": ImageField(), "mask": Mask(of="image")})
    (verdict,) = check_files(
        {"mask": [np.frombuffer(ZIPPED, np.uint8)]}, schema, codecs={}, max_pixels=2**27
    )["mask"]
    assert isinstance(verdict, Rejection)
    assert "doesn't decode" in verdict.reason
