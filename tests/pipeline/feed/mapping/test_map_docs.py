"""The examples of docs/howto/map.md run as printed."""

from __future__ import annotations

import io
import re
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.layers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "howto" / "map.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore:Sample .* is bad", "ignore:Labels cluster")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for number in range(8):
        pixels = np.full((20, 24, 3), number * 20, np.uint8)
        Image.fromarray(pixels).save(pairs / f"{number}.png")
        (pairs / f"{number}.txt").write_text(f"a picture of number {number} in grey")
    with tarfile.open(tmp_path / "scans.tar", "w") as tar:
        for number in range(12):
            scan = b"SCAN" + np.full((4, 8), number, np.int16).tobytes()
            for name, data in (("scan", b"JUNK" if number == 5 else scan), ("cls", b"1")):
                member = tarfile.TarInfo(f"{number:02}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.mark.usefixtures("place")
def test_tokens_of_captions() -> None:
    (code,) = (block for block in BLOCKS if "def tokens" in block)
    found = run(code)
    assert found["images"].shape == (4, 3, 32, 32)
    caption, row = found["captions"][-1], found["padded"][-1].tolist()
    assert caption == "a picture of number 7 in grey"
    assert row == [1, *caption.encode(), 2, *[0] * (64 - 2 - len(caption))]


@pytest.mark.usefixtures("place")
def test_a_format_of_ones_own() -> None:
    (code,) = (block for block in BLOCKS if "def volume" in block)
    found = run(code)
    assert (found["volumes"].dtype, found["volumes"].shape) == (torch.int16, (4, 4, 8))
    assert found["loader"].statistics().bad == 1
    assert found["labels"].tolist() == [1] * 4


@pytest.mark.usefixtures("place")
def test_random_numbers() -> None:
    (code,) = (block for block in BLOCKS if "without_some_words" in block)
    assert run(code)["captions"] == run(code)["captions"]


def test_one_of_several_captions(place: Path) -> None:
    captions = {f"a picture of {number}\nno {number}": number for number in range(8)}
    for text, number in captions.items():
        (place / "pairs" / f"{number}.txt").write_text(text)
    (code,) = (block for block in BLOCKS if "def one_of" in block)
    found = run(code)["captions"]
    assert found == run(code)["captions"]
    assert {*found} <= {line for text in captions for line in text.splitlines()}


def test_all_that_is_printed_runs_here() -> None:
    assert len(BLOCKS) == 4
