"""Rewrite images while packing: smaller, in another quality, or as baseline JPEGs without loss."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image, ImageOps

from penstock.cache import ConfigError, DestinationError, MissingDependencyError
from penstock.readers import Dataset, pack
from penstock.readers.fieldtypes import is_progressive
from penstock.readers.packing import Transcode
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers import Encoded


def samples(folder: Path) -> list[Encoded]:
    """Return all samples of a pack of one shard, by id."""
    dataset = Dataset(folder)
    rows = np.array([(0, row) for row in range(len(dataset))], np.int64)
    batch = dataset.read(rows)
    for sample, dims in zip(
        batch.columns["image"].samples, batch.columns["image"].dims.tolist(), strict=True
    ):
        assert upright(sample).size == tuple(reversed(dims))
    return batch.encoded("image").encoded


def upright(data: Encoded | bytes) -> Image.Image:
    """Return the decoded image, upright."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(bytes(data))))


def packed(src: Path, dst: Path, **options: object) -> list[Encoded]:
    """Pack unshuffled, and return the samples."""
    pack(src, dst, shuffle=False, verify=images.verify, workers=2, **options)  # type: ignore[arg-type]
    return samples(dst)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "0.jpg": images.jpeg(0, 60, 90),
        "1.jpg": images.rotated_jpeg(1, 60, 90),
        "2.jpg": images.jpeg(2, 32, 200, progressive=True),
        "3.png": images.encoded(images.picture(3, 50, 40, "RGBA"), "PNG"),
        "4.jpg": images.encoded(images.picture(4, 70, 50, "CMYK")),
        "5.jpg": images.encoded(images.picture(5, 64, 48, "L"), progressive=True),
    }
    return images.write_folder(tmp_path / "src", files)


def test_longer_short_sides_shrink_upright_and_the_rest_stays(folder: Path, tmp_path: Path) -> None:
    before = samples_of(folder)
    after = packed(folder, tmp_path / "dst", short_side=32, quality=80)
    sizes = [upright(sample).size for sample in after]
    assert sizes == [(48, 32), (32, 48), (200, 32), (32, 40), (50, 70), (32, 43)]
    for i in (2, 4):  # not longer; colours of which there is no equal
        assert bytes(after[i]) == before[i]
    for i in (0, 1, 3, 5):
        assert Image.open(io.BytesIO(bytes(after[i]))).format == "JPEG"
        assert not is_progressive(after[i])
        assert 0x0112 not in Image.open(io.BytesIO(bytes(after[i]))).getexif()
        small = upright(before[i]).convert("RGB").resize(sizes[i], Image.Resampling.LANCZOS)
        difference = np.abs(np.asarray(upright(after[i]).convert("RGB"), int) - np.asarray(small))
        assert difference.mean() < 4
    assert Dataset(tmp_path / "dst").index.about.settings["short_side"] == 32


def samples_of(folder: Path) -> list[bytes]:
    """Return the bytes of the files in the order of their names."""
    return [path.read_bytes() for path in sorted(folder.glob("*.*"))]


def test_quality_alone_rewrites_every_image_at_its_size(folder: Path, tmp_path: Path) -> None:
    summary = pack(folder, tmp_path / "dst", shuffle=False, verify=images.verify, quality=40)
    after = samples(tmp_path / "dst")
    assert summary.progressive == 0
    for old, new in zip(samples_of(folder), after, strict=True):
        assert upright(old).size == upright(new).size
    same = [old == bytes(new) for old, new in zip(samples_of(folder), after, strict=True)]
    assert same == [False, False, False, False, True, False]


def test_baseline_keeps_every_pixel_and_the_metadata(tmp_path: Path) -> None:
    pytest.importorskip("jpeglib")
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {
        f"{mode}-{height}-{sub}.jpg": images.encoded(
            images.picture(height, height, 41, mode),
            progressive=True,
            exif=exif,
            comment=b"hello",
            **({"subsampling": sub} if mode == "RGB" else {}),
        )
        for mode in ("RGB", "L", "CMYK")
        for height in (9, 33)
        for sub in (0, 1, 2)
    }
    folder = images.write_folder(tmp_path / "src", files)
    assert pack(folder, tmp_path / "as-is", verify=images.verify).progressive == len(files)
    for old, new in zip(
        samples_of(folder), packed(folder, tmp_path / "dst", baseline=True), strict=True
    ):
        assert is_progressive(np.frombuffer(old, np.uint8))
        assert not is_progressive(new)
        one, other = Image.open(io.BytesIO(old)), Image.open(io.BytesIO(bytes(new)))
        assert np.array_equal(np.asarray(one), np.asarray(other))
        assert (one.mode, one.info["exif"], one.info["comment"]) == (
            other.mode,
            other.info["exif"],
            other.info["comment"],
        )


def test_a_pack_with_other_settings_is_another_pack(folder: Path, tmp_path: Path) -> None:
    packed(folder, tmp_path / "dst", short_side=32)
    packed(folder, tmp_path / "dst", short_side=32, quality=92)
    with pytest.raises(DestinationError, match="quality"):
        packed(folder, tmp_path / "dst", short_side=32, quality=50)
    with pytest.raises(DestinationError, match="another"):
        packed(folder, tmp_path / "dst")


@pytest.mark.parametrize("wrong", [{"short_side": 0}, {"quality": 0}, {"quality": 101}])
def test_wrong_values_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Transcode(**wrong)  # type: ignore[arg-type]


def test_without_jpeglib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jpeglib", None)
    with pytest.raises(MissingDependencyError, match=r"penstock\[transcode\]"):
        Transcode(baseline=True)


def test_only_progressive_jpegs_are_taken_for_such() -> None:
    found = {
        name for name, data in images.GOOD.items() if is_progressive(np.frombuffer(data, "u1"))
    }
    assert found == {"progressive.jpg"}
    for data, _ in images.BAD.values():
        assert is_progressive(np.frombuffer(data, "u1")) in (False, True)
