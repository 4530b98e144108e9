"""Images of 12 of 16 bits, which 8 bits make black: a warning says so, once, and the way out."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from penstock import Array, DataLoader, Dataset, Map, Resize, pack
from penstock.cache import PenstockWarning
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("nvidia.dali")
SIDES = (24, 32)
NUMBERS = (np.arange(24 * 32).reshape(SIDES) * 5).astype(np.uint16)  # up to 3,835
KINDS = {
    "png": images.encoded(Image.fromarray(NUMBERS), "PNG"),
    "tif": images.encoded(Image.fromarray(NUMBERS), "TIFF"),
    "pgm": b"P5\n32 24\n4095\n" + NUMBERS.astype(">u2").tobytes(),
}


def folder(root: Path, data: bytes, kind: str) -> Path:
    return images.write_folder(root / "set", {f"{i}.{kind}": data for i in range(6)})


def told(root: Path) -> list[str]:
    """Warnings of values while an index is built and in two epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with DataLoader(Dataset(root), batch_size=2, augment=[Resize(SIDES)]) as loader:
            for _ in range(2):
                list(loader)
    messages = [str(each.message) for each in caught if each.category is PenstockWarning]
    return [each for each in messages if "looked at" in each]


@pytest.mark.parametrize("kind", KINDS)
def test_twelve_bits_of_sixteen_are_warned_of(tmp_path: Path, kind: str) -> None:
    indexed, message = told(folder(tmp_path, KINDS[kind], kind))
    assert "0 to 4,095" in indexed or kind == "pgm"
    assert "almost black" in message
    assert ("3,835" in message) == (kind != "pgm")


def test_floats_beyond_one_are_warned_of(tmp_path: Path) -> None:
    floats = images.encoded(Image.fromarray(np.float32(NUMBERS) / 15), "TIFF")
    _, message = told(folder(tmp_path, floats, "tif"))
    assert "becomes white" in message


@pytest.mark.parametrize(
    "numbers", [NUMBERS * 17, (NUMBERS // 16).astype(np.uint8), np.float32(NUMBERS) / 4000]
)
def test_others_are_silent(tmp_path: Path, numbers: np.ndarray) -> None:
    kind = "tif" if numbers.dtype == np.float32 else "png"
    data = images.encoded(Image.fromarray(numbers), {"tif": "TIFF", "png": "PNG"}[kind])
    assert told(folder(tmp_path, data, kind)) == []


@pytest.mark.filterwarnings("ignore:The images that were looked at")
def test_the_remedies_work(tmp_path: Path) -> None:
    def shares(data: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(data))).astype(np.float32) / 4095

    root = folder(tmp_path, KINDS["png"], "png")
    recipe = [Map(shares, fields="image", returns={"image": Array("float32", SIDES)})]
    with DataLoader(Dataset(root), batch_size=2, augment=recipe) as loader:
        (batch,) = next(iter(loader))
    assert float(batch.max()) == pytest.approx(3835 / 4095)


def test_packing_warns(tmp_path: Path) -> None:
    with pytest.warns(PenstockWarning, match="almost black"):
        pack(folder(tmp_path, KINDS["png"], "png"), tmp_path / "pack")
